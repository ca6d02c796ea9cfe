"""`tutti data`: bring public data here, or make some to try a recipe with."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn

from tutti.data.download import get
from tutti.errors import DataError

Report = Callable[[str, int, int], None]  # what is worked on, how much of it is done, how much there is (0: unknown)


def get_data(name: str, out: Path, mirror: str | None) -> None:
    """Fetch a dataset with a bar for each file."""
    with _bars(DownloadColumn()) as report:
        files = get(name, out, mirror, report)
    print(f"{len(files)} file{'s' if len(files) > 1 else ''} of {name} in {out}")


def make_images(out: Path, classes: int, train: int, valid: int, size: int, seed: int) -> None:
    """Draw pictures with a bar for each split."""
    from tutti.data.make_images import make_images as make

    with _bars(MofNCompleteColumn()) as report:
        make(out, classes, train, valid, size, seed, report)
    print(f"{classes * train:,} training and {classes * valid:,} validation images of {classes:,} classes in {out}")


def make_nbody(
    out: Path, box: int, cell: float | None, seed: int, memory_gib: float, device: str, overwrite: bool
) -> None:
    """Make a box with a bar for each stage."""
    from tutti.data.nbody.make import make_nbody as make

    with _bars(MofNCompleteColumn()) as report:
        try:
            make(out, box, cell, seed, memory_gib, device, report, overwrite)
        except OSError as error:  # a full disk, a folder in the way
            reason = error.strerror or error
            raise DataError(f"{out} cannot be written: {reason}. Choose another file with --out.") from error
    print(f"a box of {box}^3 cells in {out}, a picture of its slices in {out.with_suffix('.png')}")


@contextmanager
def _bars(amount: ProgressColumn) -> Iterator[Report]:
    """A bar for everything that is reported on; nothing where there is no terminal."""
    console = Console()
    columns = TextColumn("{task.description}"), BarColumn(), amount
    progress = Progress(*columns, console=console, disable=not console.is_terminal)
    tasks = {}

    def report(name: str, done: int, total: int) -> None:
        if name not in tasks:
            tasks[name] = progress.add_task(name, total=total or None)
        progress.update(tasks[name], completed=done)

    with progress:
        yield report
