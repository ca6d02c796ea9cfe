"""`tutti runs`: a table of run folders."""

from pathlib import Path

from tutti.cli.tables import print_table
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
    titles = ("recipe", "state", "ranks", "epochs", "metrics", "samples/s", "run folder")
    print_table(titles, map(_row, found), numbers=("ranks", "epochs", "samples/s"))


def _row(run: RunSummary) -> tuple[str, ...]:
    metrics = "  ".join(f"{name.removeprefix('valid_')} {show_number(name, v)}" for name, v in run.metrics.items())
    rate = "" if run.samples_per_second is None else f"{run.samples_per_second:,.0f}"
    return run.recipe, run.state, str(run.ranks), str(run.epochs), metrics, rate, str(run.folder.path)
