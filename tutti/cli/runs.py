"""`tutti runs`: a table of run folders."""

from collections.abc import Callable
from pathlib import Path

from tutti.cli.tables import print_table, show_seconds
from tutti.errors import ConfigError, FolderError, nearest
from tutti.runs.listing import RunSummary, find_runs
from tutti.runs.screen import show_number

_TITLES = ("recipe", "state", "ranks", "epochs", "metrics", "samples/s", "batch", "time", "run folder")
_ORDERS: dict[str, Callable[[RunSummary], str | float | None]] = {
    "recipe": lambda run: run.recipe,
    "ranks": lambda run: run.ranks,
    "epochs": lambda run: run.epochs,
    "batch": lambda run: run.global_batch,
    "time": lambda run: run.training_seconds,
    "samples/s": lambda run: run.samples_per_second,
}


def list_runs(out: Path, recipe: str | None, sort: str = "started") -> None:
    """Print a row for each run, in the order in which they started or in that of a column or metric."""
    if not out.is_dir():
        raise FolderError(f"{out}: no such folder of runs. Train something first, or name the folder with --out.")
    found = find_runs(out, recipe)
    if not found:
        of = f" of {recipe!r}" if recipe else ""
        print(f"no runs{of} in {out}")
        return
    print_table(_TITLES, map(_row, _sorted(found, sort)), numbers=("ranks", "epochs", "samples/s", "batch", "time"))


def _sorted(runs: list[RunSummary], order: str) -> list[RunSummary]:
    """The largest or best last, and first what has no such value; equal ones as they started."""
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
    metrics = "  ".join(f"{name.removeprefix('valid_')} {show_number(name, v)}" for name, v in run.metrics.items())
    rate = "" if run.samples_per_second is None else f"{run.samples_per_second:,.0f}"
    batch = "" if run.global_batch is None else f"{run.global_batch:,}"
    time = "" if run.training_seconds is None else show_seconds(run.training_seconds)
    return run.recipe, run.state, str(run.ranks), str(run.epochs), metrics, rate, batch, time, str(run.folder.path)
