"""Recipes before they run: `new` writes a first one, `show` resolves one, `list` and `schema` say what there is."""

import keyword
import os
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from tutti import units
from tutti.cli.options import Overrides, Recipe, examples
from tutti.config import options, parts
from tutti.config.load import Resolved, resolve
from tutti.config.plan import MANY_SAMPLES, Plan, make_plan
from tutti.config.recipes import built_in, make_importable
from tutti.config.run import RunConfig
from tutti.config.schedule import Schedule, make_schedule
from tutti.errors import ConfigError, FolderError
from tutti.launch.local import check_ranks
from tutti.runs.files import write_durably

app = typer.Typer()
_TEMPLATES = Path(__file__).parent / "project"
_NAME = "PROJECT"  # in the templates and in the paths of files
_FILES = {
    "README.md": "README.md",
    "PROJECT.yaml": "recipe.yaml",
    "PROJECT/data.py": "data.py.txt",
    "PROJECT/model.py": "model.py.txt",
    "test_PROJECT.py": "test.py.txt",
}


@app.command(epilog=examples("tutti new galaxies", "cd galaxies && tutti train galaxies.yaml -n 2"))
def new(
    project: Annotated[Path, typer.Argument(help="The folder to make; its name is that of the Python package in it.")],
) -> None:
    """Write a small project that trains at once: recipe, model, data, test and README."""
    name = _package_name(project)
    _check_folder(project)
    aside = project.absolute().with_name(f".{name}.{os.getpid()}")
    try:
        _write_project(aside, name)
        aside.replace(project)
    except OSError as error:
        raise FolderError(f"{project}: cannot be made: {error.strerror}. Give a folder that can be written.") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    print(f"{project}: a project that finds planets in light curves, for you to change. Try\n")
    print(f"  cd {project}\n  tutti train {name}.yaml -n 2")


@app.command(epilog=examples("tutti show mnist optim.lr=0.02", "tutti show mnist -n 8 --plot-lr lr.png"))
def show(
    recipe: Recipe,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", help="Ranks of the run; none is started.", show_default="1")
    ] = None,
    plot_lr: Annotated[Path | None, typer.Option(help="Draw the learning rate of every step into this file.")] = None,
) -> None:
    """Print the resolved configuration, and where each value came from."""
    world_size = 1 if ranks is None else ranks
    check_ranks(world_size)
    make_importable(recipe)
    resolved = resolve(recipe, overrides or [])
    console = Console(soft_wrap=True, highlight=False)
    _print_values(console, resolved)
    samples = _train_samples(resolved.config, needed=plot_lr is not None)
    plan = make_plan(resolved.config, world_size, MANY_SAMPLES if samples is None else samples)
    schedule = make_schedule(resolved.config, plan)
    warmup = resolved.config.schedule
    grows_by_epochs = bool(warmup.warmup_epochs) and warmup.warmup_from == "zero"
    _print_plan(console, plan, schedule, plan.is_counted or not grows_by_epochs)
    if plot_lr is not None:
        from tutti.report.curves import draw_schedule

        try:
            draw_schedule(schedule, plan.steps_per_epoch, plot_lr)
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise ConfigError(f"--plot-lr {plot_lr}: cannot be written: {reason}.") from error
        console.print(f"learning rate of every step: {plot_lr}")


@app.command("list", epilog=examples("tutti list", "tutti list | grep mnist"))
def list_() -> None:
    """Print the recipes, models, datasets, optimizers, schedules, losses and metrics there are."""
    console = Console(soft_wrap=True, highlight=False)
    groups = {"recipes": list(built_in())}
    for title, section in (("models", "model"), ("datasets", "data"), ("optimizers", "optim"), ("losses", "loss")):
        summaries = (_summary(part) for part in parts.parts_of(section))
        groups[title] = list(zip(parts.names_of(section), summaries, strict=True))
    groups["frameworks (framework; what exists in torch only says so)"] = list(options.FRAMEWORKS.items())
    groups["schedules (schedule.decay)"] = list(parts.DECAYS.items())
    groups["metrics"] = [(name, text) for name, (_, text) in parts.METRICS.items()]
    width = max(len(name) for rows in groups.values() for name, _ in rows)
    for title, rows in groups.items():
        console.print(f"\n[bold]{title}[/]")
        for name, summary in rows:
            console.print(Text(f"  {name:<{width}}  {summary}".rstrip()))
    console.print("\nYour own model, dataset, optimizer, loss or metric: package.module:object")


@app.command(epilog=examples("tutti schema --out recipe.schema.json", "tutti schema | jq '.properties | keys'"))
def schema(
    out: Annotated[Path | None, typer.Option(help="Write the schema into this file.", show_default="screen")] = None,
) -> None:
    """Print the JSON schema of recipes, with which editors complete their keys."""
    from tutti.config.json_schema import header, schema_text

    if out is None:
        print(schema_text(), end="")
        return
    try:
        write_durably(out, schema_text())
    except OSError as error:
        raise ConfigError(
            f"--out {out}: cannot be written: {error.strerror}. Give a file in a folder that exists."
        ) from error
    print(f"{out}: begin a recipe beside it with the line\n{header(out.name)}")


def _summary(part: type[parts.PartOptions]) -> str:
    """The first sentence of a part's docstring, and its framework if it is not for all."""
    where = "" if set(part.frameworks()) == set(options.FRAMEWORKS) else " (torch only)"
    return (part.__doc__ or "").splitlines()[0] + where


def _print_values(console: Console, resolved: Resolved) -> None:
    """Print YAML with sources as comments, which is a valid recipe."""
    before: tuple[str, ...] = ()
    for key, value, source in resolved.entries():
        for depth, group in enumerate(key[:-1]):
            if key[: depth + 1] != before[: depth + 1]:
                console.print(Text(f"{'  ' * depth}{group}:"))
        before = key
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        line = f"{'  ' * (len(key) - 1)}{key[-1]}: {text}"
        console.print(Text(f"{line:<48}"), Text(f"# {source}", style="dim" if source == "default" else "green"))


def _print_plan(console: Console, plan: Plan, schedule: Schedule, is_first_known: bool) -> None:
    """What a run does on its ranks; where samples are not counted, what does not depend on their number."""
    ranks, layout = units.count(plan.world_size, "rank"), plan.layout
    shares = ranks if layout.sharing == 1 else f"{layout.data_ranks} data"
    of = "at most, of" if plan.max_steps else "="
    held = " at the first" if schedule.warmup_holds else ""
    warmup = f", after {units.count(schedule.warmup_steps, 'step')} of warm-up{held}" if schedule.warmup_steps else ""
    first, last = schedule.lr_at(0), schedule.lr_at(max(0, plan.total_steps - 1))
    steps = f"{plan.total_steps:,} {of} {units.count(plan.epochs, 'epoch')} x {plan.steps_per_epoch:,}"
    rates = f"{first:.3g} first, {schedule.peak_lr:.3g} scaled" if is_first_known else f"{schedule.peak_lr:.3g} scaled"
    rows = (
        (
            "global batch",
            f"{plan.global_batch} = {shares} x {plan.per_rank_batch} ({plan.passes} x {plan.micro_batch})",
        ),
        *([] if layout.is_data_parallel else [("layout", layout.line())]),
        ("steps", steps if plan.is_counted else "not known before the data is read"),
        ("learning rate", f"{rates}{warmup}, {last:.3g} last" if plan.is_counted else rates),
    )
    console.print(f"\n[bold]on {ranks}[/]")
    for line in (*units.table(("", ""), rows, left=("",))[1:], *schedule.notes, *layout.notes):
        console.print(Text(line))


def _train_samples(config: RunConfig, needed: bool) -> int | None:
    """The number of training samples; a user's dataset is only opened when a plot needs it."""
    samples = config.data.train_samples()
    if samples is None and needed:
        samples = len(parts.call(config.data.locate(), "data", config.data.options(), split="train"))
    return samples


def _package_name(project: Path) -> str:
    """The name of the package; raises ConfigError for one that cannot be imported, or that hides another module."""
    name = project.absolute().name
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        fitting = re.sub(r"\W", "_", name, flags=re.ASCII).lstrip("_0123456789") or "project"
        fitting += "_project" if keyword.iskeyword(fitting) else ""
        raise ConfigError(
            f"{str(project)!r}: {name!r} is the name of a Python package: expected ASCII letters, digits and "
            f"underscores, not a digit first, and no word of Python. Try {project.with_name(fitting)}."
        )
    taken = {*sys.stdlib_module_names, *metadata.packages_distributions(), "tutti", "runs"}
    if name in taken:
        raise ConfigError(
            f"{str(project)!r}: {name!r} is the name of another module or folder, which would hide the package: "
            f"expected a new name. Try {project.with_name(f'my_{name}')}."
        )
    return name


def _check_folder(project: Path) -> None:
    if project.is_dir() and not any(project.iterdir()):
        return
    if project.exists() or project.is_symlink():
        what = "the folder is not empty" if project.is_dir() else "there is such a file"
        raise FolderError(f"{project}: {what}: expected none, or an empty folder. Choose another name.")


def _write_project(folder: Path, name: str) -> None:
    from tutti.config.json_schema import FILE_NAME, schema_text

    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").touch()
    for file, template in _FILES.items():
        text = (_TEMPLATES / template).read_text().replace(_NAME, name)
        (folder / file.replace(_NAME, name)).write_text(text)
    (folder / FILE_NAME).write_text(schema_text())
    (folder / ".gitignore").write_text("__pycache__/\nruns/\n")
