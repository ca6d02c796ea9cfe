"""Commands on what was trained: runs as a table and side by side, a study as one page; evaluate, export and apply."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti import units
from tutti.checkpoint.manifest import read_pointer
from tutti.cli.options import Overrides, Ranks, RunsFolder, examples
from tutti.config.load import resolve
from tutti.config.run import RunConfig
from tutti.errors import ConfigError, FolderError, nearest
from tutti.ranks.placement import Placement
from tutti.report.runs import RunOutcome, difference_rows, read_run, result_rows
from tutti.runs.folder import RunFolder
from tutti.runs.listing import RunSummary, find_run, find_runs, name_runs

if TYPE_CHECKING:
    from tutti.after.evaluate import Evaluation
    from tutti.after.run import ChosenCheckpoint, OpenedRun

Run = Annotated[str, typer.Argument(help="A run folder, its name as tutti runs prints it, or latest.")]
Ema = Annotated[bool, typer.Option("--ema", help="Take the weights averaged over steps (ema in the recipe).")]
Checkpoint = Annotated[str, typer.Option(help="best, last or the step of a checkpoint.", metavar="best|last|STEP")]

_TITLES = (
    "recipe",
    "state",
    "ranks",
    "epochs",
    "metrics",
    "samples/s",
    "batch",
    "time",
    "memory",
    "predicted",
    "run folder",
)
_ORDERS: dict[str, Callable[[RunSummary], str | float | None]] = {
    "recipe": lambda run: run.recipe,
    "ranks": lambda run: run.ranks,
    "epochs": lambda run: run.epochs,
    "batch": lambda run: run.global_batch,
    "time": lambda run: run.training_seconds,
    "samples/s": lambda run: run.samples_per_second,
    "memory": lambda run: run.memory.get("measured_peak_bytes"),
}


_FORMATS = (".png", ".svg", ".pdf")

app = typer.Typer()


@app.command(epilog=examples("tutti runs", "tutti runs mnist --out /scratch/runs", "tutti runs digits --sort accuracy"))
def runs(
    recipe: Annotated[str | None, typer.Argument(help="Only the runs of this recipe.")] = None,
    out: RunsFolder = Path("runs"),
    sort: Annotated[
        str, typer.Option(help="started, recipe, ranks, batch, time, samples/s, memory, or a metric; the best is last.")
    ] = "started",
) -> None:
    """List run folders with their ranks, epochs, metrics, speed, and the memory of a rank at its peak."""
    if not out.is_dir():
        raise FolderError(f"{out}: no such folder of runs. Train something first, or name the folder with --out.")
    found = find_runs(out, recipe)
    if not found:
        of = f" of {recipe!r}" if recipe else ""
        print(f"no runs{of} in {out}")
        return
    units.print_table(_TITLES, map(_row, _sorted(found, sort)), left=("recipe", "state", "metrics", "run folder"))


def _sorted(runs: list[RunSummary], order: str) -> list[RunSummary]:
    """Sort the best last and runs without a value first; equal ones in the order in which they started."""
    if order == "started":
        return runs
    metrics = sorted({name.removeprefix("valid_") for run in runs for name in run.metrics})
    choices = ["started", *_ORDERS, *metrics]
    if order not in choices:
        raise ConfigError(f"--sort {order}: expected one of {', '.join(choices)}.{nearest(order, choices)}")
    value_of = _ORDERS.get(order, lambda run: run.metrics.get(f"valid_{order}"))
    known = [run for run in runs if value_of(run) is not None]
    known.sort(key=lambda run: value_of(run) or 0, reverse=order.endswith("loss"))
    return [run for run in runs if value_of(run) is None] + known


def _row(run: RunSummary) -> tuple[str, ...]:
    metrics = "  ".join(f"{name.removeprefix('valid_')} {units.metric(name, v)}" for name, v in run.metrics.items())
    rate = "" if run.samples_per_second is None else units.number(run.samples_per_second)
    batch = "" if run.global_batch is None else units.count(run.global_batch)
    time = "" if run.training_seconds is None else units.duration(run.training_seconds, keep_zeros=True)
    peaks = (run.memory.get(f"{name}_peak_bytes") for name in ("measured", "predicted"))
    memory = ("" if peak is None else units.size(peak) for peak in peaks)
    counts = str(run.ranks), str(run.epochs)
    return run.recipe, run.state, *counts, metrics, rate, batch, time, *memory, str(run.folder.path)


@app.command(
    epilog=examples(
        "tutti compare runs/digits/2026-11-15_101500_n1 runs/digits/2026-11-15_101530_n4",
        "tutti compare 2026-11-15_101500_n1 2026-11-15_101530_n4 --plot compare.png",
    )
)
def compare(
    runs: Annotated[list[str], typer.Argument(help="Run folders, or their names as tutti runs prints them.")],
    out: RunsFolder = Path("runs"),
    plot: Annotated[Path | None, typer.Option(help="Draw loss and metrics by step and by time into this file.")] = None,
) -> None:
    """Show runs side by side: what differs between them, their results, and where the time went."""
    if plot is not None:
        _check_plot(plot)
    named = name_runs(_find(runs, out))
    outcomes = {name: read_run(folder) for name, folder in named.items()}
    _print_side_by_side(outcomes, [str(folder.path) for folder in named.values()])
    if plot is not None:
        _draw(outcomes, plot)


def _find(given: Sequence[str], out: Path) -> list[RunFolder]:
    if len(given) < 2:
        raise ConfigError(
            f"tutti compare {' '.join(given)}: expected two runs or more. Name others, as `tutti runs` prints them."
        )
    found: dict[Path, tuple[str, RunFolder]] = {}
    for word in given:
        folder = find_run(word, out)
        place = folder.path.resolve()
        if place in found:
            raise ConfigError(f"{found[place][0]} and {word} are the same run, {place}: name every run once.")
        found[place] = (word, folder)
    return [folder for _, folder in found.values()]


def _print_side_by_side(runs: dict[str, RunOutcome], folders: list[str]) -> None:
    titles = ["", *runs]
    differences = difference_rows([*runs.values()])
    results = result_rows([*runs.values()], partial(units.duration, keep_zeros=True))
    blank = [""] * len(titles)
    rows = [[row.title, *row.texts] for row in differences] or [["nothing differs", *blank[1:]]]
    rows += [blank, *([row.title, *row.texts] for row in results), blank, ["run folder", *folders]]
    units.print_table(titles, rows, left=titles)


def _check_plot(plot: Path) -> None:
    if plot.suffix.lower() not in _FORMATS:
        raise ConfigError(f"--plot {plot}: expected a file that ends in {', '.join(_FORMATS)}.")
    if not plot.parent.is_dir():
        raise ConfigError(f"--plot {plot}: there is no folder {plot.parent}. Create it, or choose another.")


def _draw(runs: dict[str, RunOutcome], plot: Path) -> None:
    from tutti.report.curves import draw_comparison

    try:
        draw_comparison(runs, plot)
    except OSError as error:
        raise ConfigError(f"--plot {plot}: cannot be written: {error.strerror or error}.") from error
    print(f"curves: {plot}")


@app.command(
    epilog=examples(
        "tutti report runs/studies/digits/2026-11-15_101500_scale_weak",
        "tutti report runs/studies/a --compare runs/studies/b --out comparison.html",
        "tutti report runs/studies/a --collectives runs/bench/collectives/2026-11-15_101500_n4",
    )
)
def report(
    study: Annotated[Path, typer.Argument(help="The folder of a study.")],
    compare: Annotated[Path | None, typer.Option(help="Another study to compare it with.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The HTML file; figures are written next to it.", show_default="STUDY/report.html"),
    ] = None,
    collectives: Annotated[
        Path | None,
        typer.Option(
            help="A run of tutti bench collectives, to compare the communication of a scaling study with.",
            metavar="RUN",
        ),
    ] = None,
    fabric: Annotated[
        str | None,
        typer.Option(help="The network between nodes, for the forecast: hpc or tcp.", show_default="as recorded"),
    ] = None,
) -> None:
    """Show a study on one page: conclusions, figures, points and conditions; also as PNG, SVG and CSV."""
    from tutti.cli.forecast.forecast import read_fabric
    from tutti.report.study.write import write_report

    written = write_report(study, compare, out, collectives, read_fabric(fabric))
    for sentence in written.conclusions:
        print(sentence)
    print(f"figures:    {written.pictures}")
    print(f"points:     {written.points}")
    print(f"report:     {written.page}")


@app.command(
    epilog=examples(
        "tutti evaluate latest -n 2",
        "tutti evaluate 2026-11-15_101500_n2 --checkpoint last -n 4 --json",
        "tutti evaluate runs/imagenet/2026-11-15_101500_n8 --data /data/other_images",
    )
)
def evaluate(
    run: Run,
    overrides: Overrides = None,
    split: Annotated[str, typer.Option(help="valid, test, train, or a set in `valid` of the recipe.")] = "valid",
    checkpoint: Checkpoint = "best",
    ema: Ema = False,
    data: Annotated[str | None, typer.Option(help="Other data: the value of data.path of the recipe.")] = None,
    ranks: Ranks = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    out: RunsFolder = Path("runs"),
) -> None:
    """Compute the loss and metrics of a trained model on the validation data of its run, or on other data."""
    from tutti.after.evaluate import check_split, for_ranks
    from tutti.cli.ranks import place, without_folder

    opened, placement = _open(run, out), place(ranks)
    config = _with_data(opened, overrides or [], data, split)
    check_split(config, split)
    config = for_ranks(config, opened.record, ranks or placement.world_size, overrides or [])
    chosen = opened.checkpoint(checkpoint, ema)

    def work(placement: Placement) -> Any:
        from tutti.after import evaluate as after
        from tutti.cli.train import find_framework

        framework = find_framework(config)
        found = after.evaluate(framework, config, placement, split, chosen.path, chosen.manifest, chosen.ema)
        if placement.rank == 0:
            _show_evaluation(opened, chosen, checkpoint, found, as_json)
        return found

    from tutti.cli.train import find_needs

    without_folder(config, ranks, placement, find_needs(config), work)


def _with_data(run: "OpenedRun", overrides: list[str], data: str | None, split: str) -> RunConfig:
    """The configuration of a run with overrides and other data."""
    if data is None:
        return resolve(str(run.folder.config), overrides).config
    known = type(run.config.data).model_fields
    key = "path" if "path" in known or ":" in run.config.data.name else split
    if key not in known and ":" not in run.config.data.name:
        raise ConfigError(
            f"--data {data}: data.name={run.config.data.name} reads no files of this split. Leave it out, or set its "
            "options, as in data.seed=2."
        )
    return resolve(str(run.folder.config), [*overrides, f"data.{key}={data}"]).config


def _describe(run: "OpenedRun", chosen: "ChosenCheckpoint", asked: str) -> str:
    """The recipe and the step of a checkpoint, and whether it is the best one, which was asked for."""
    best = " (best)" if asked == "best" and chosen.path.name == read_pointer(chosen.path.with_name("best")) else ""
    return f"{run.config.recipe}, step {chosen.manifest.step:,}{best}{', averaged weights' if chosen.ema else ''}"


def _show_evaluation(
    run: "OpenedRun", chosen: "ChosenCheckpoint", asked: str, found: "Evaluation", as_json: bool
) -> None:
    step = chosen.manifest.step
    if chosen.note:
        print(f"note: {chosen.note}", file=sys.stderr)
    if as_json:
        where = {"run": str(run.folder.path), "recipe": run.config.recipe, "checkpoint": chosen.path.name, "step": step}
        print(json.dumps(where | asdict(found)), flush=True)
        return
    values = "  ".join(f"{name.replace('_', ' ')} {units.metric(name, v)}" for name, v in found.metrics.items())
    counts = f"{units.count(found.samples, 'sample')}, {units.count(found.ranks, 'rank')}"
    print(f"{_describe(run, chosen, asked)}: {values}  ({counts})", flush=True)


@app.command(
    epilog=examples(
        "tutti export runs/digits/2026-11-15_101500_n2 --to torch",
        "tutti export 2026-11-15_101500_n2 --to safetensors --out model.safetensors --checkpoint last",
        "tutti export 2026-11-15_101500_n2 --to onnx",
    )
)
def export(
    run: Run,
    to: Annotated[
        str, typer.Option(help="safetensors, torch or onnx; of runs in Keras and TensorFlow: keras or weights.h5.")
    ],
    out: Annotated[Path | None, typer.Option(help="The file.", show_default="RUN/model.SUFFIX")] = None,
    checkpoint: Checkpoint = "best",
    ema: Ema = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    runs: Annotated[Path, typer.Option(help="The folder of run folders.")] = Path("runs"),
) -> None:
    """Write a trained model as a file that PyTorch, ONNX Runtime or Keras open without tutti."""
    from tutti.after.run import export as write

    opened = _open(run, runs)
    path, chosen = write(opened, to, out, checkpoint, force, ema)
    if chosen.note:
        print(f"note: {chosen.note}", file=sys.stderr)
    print(f"{_describe(opened, chosen, checkpoint)}: {path} ({units.size(path.stat().st_size)})")


@app.command(
    epilog=examples(
        "tutti apply latest images/ --out scores.csv",
        "tutti apply latest spectra.npy --out found.npy --checkpoint last",
        "tutti apply runs/nbody/2026-11-15_101500_n4 box.h5:Nbody --out hydro.h5",
    )
)
def apply(
    run: Run,
    inputs: Annotated[str, typer.Argument(help="A .npy file, FILE.h5:DATASET, an image or a folder of images.")],
    out: Annotated[Path, typer.Option(help="The file of the outputs: .npy, .h5, or .csv for one row a sample.")],
    checkpoint: Checkpoint = "best",
    ema: Ema = False,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples in one pass.", show_default="batch.eval")] = None,
    tile: Annotated[
        int | None,
        typer.Option(min=1, help="Cells of a tile in each direction.", show_default="as many as fit into memory"),
    ] = None,
    overlap: Annotated[
        int | None,
        typer.Option(min=0, help="Cells by which tiles overlap on each side.", show_default="the reach of a border"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    runs: Annotated[Path, typer.Option(help="The folder of run folders.")] = Path("runs"),
) -> None:
    """Compute the outputs of a trained model for samples, images or a volume of any size."""
    opened = _open(run, runs)
    chosen = opened.checkpoint(checkpoint, ema)
    from rich.console import Console
    from rich.progress import Progress

    from tutti.after import apply as after

    if chosen.note:
        print(f"note: {chosen.note}", file=sys.stderr)
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task(_describe(opened, chosen, checkpoint), total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        try:
            shape = after.apply(opened, chosen, inputs, out, batch, tile, overlap, force, report, print)
        except OSError as error:
            raise FolderError(f"{out} cannot be written: {error.strerror or error}.") from error
    sides, size = " x ".join(map(str, shape)), units.size(out.stat().st_size)
    print(f"{_describe(opened, chosen, checkpoint)}: {out}, {sides} ({size})")


def _open(run: str, out: Path) -> "OpenedRun":
    """Open a run, whose own modules are then found where they were found in training."""
    from tutti.after.run import open_run
    from tutti.config.recipes import make_importable
    from tutti.runs.record import python_path

    opened = open_run(run, out)
    make_importable(str(opened.folder.config), python_path(opened.record))
    return opened
