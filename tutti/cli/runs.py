"""`tutti runs`: a table of run folders."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from tutti.errors import FolderError
from tutti.records.runs import RunSummary, find_runs
from tutti.records.screen import show_number


def list_runs(out: Path, recipe: str | None) -> None:
    """Print a row for each run, in the order in which they started."""
    if not out.is_dir():
        raise FolderError(f"{out}: no such folder of runs. Train something first, or name the folder with --out.")
    found = find_runs(out, recipe)
    if not found:
        of = f" of {recipe!r}" if recipe else ""
        print(f"no runs{of} in {out}")
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("recipe", "state", "ranks", "epochs", "metrics", "samples/s", "run folder"):
        right = title in ("ranks", "epochs", "samples/s")
        table.add_column(title, justify="right" if right else "left", no_wrap=True)
    for run in found:
        table.add_row(*_row(run))
    width = Console(width=1000).measure(table).maximum
    Console(width=width, highlight=False).print(table, soft_wrap=True)  # a long line beats a cut one


def _row(run: RunSummary) -> tuple[str, ...]:
    metrics = "  ".join(f"{name.removeprefix('valid_')} {show_number(name, v)}" for name, v in run.metrics.items())
    rate = "" if run.samples_per_second is None else f"{run.samples_per_second:,.0f}"
    return run.recipe, run.state, str(run.ranks), str(run.epochs), metrics, rate, str(run.folder.path)
