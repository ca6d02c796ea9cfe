"""`tutti runs`, `tutti compare` and `tutti report`: runs as a table and side by side, a study as one page."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tutti import units
from tutti.cli.options import RunsFolder, examples
from tutti.errors import ConfigError, FolderError, nearest
from tutti.report.runs import RunOutcome, difference_rows, read_run, result_rows
from tutti.runs.folder import RunFolder
from tutti.runs.listing import RunSummary, find_run, find_runs, name_runs

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
