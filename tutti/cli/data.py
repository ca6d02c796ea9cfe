"""`tutti data`: download public datasets, or make data to try a recipe with."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn

from tutti import units
from tutti.cli.options import examples
from tutti.data.download import get as download
from tutti.errors import DataError

Report = Callable[[str, int, int], None]  # a name, the amount done, the total amount (0: unknown)


app = typer.Typer(no_args_is_help=True)
make_app = typer.Typer(help="Make data to try a recipe with, the same from the same seed.", no_args_is_help=True)
app.add_typer(make_app, name="make")


@app.callback()
def data() -> None:
    """Fetch data, or make some to try a recipe with."""


@app.command(epilog=examples("tutti data get mnist", "tutti data get cifar10 --out /scratch/me/cifar10"))
def get(
    name: Annotated[str, typer.Argument(help="The dataset: mnist or cifar10.")],
    out: Annotated[Path | None, typer.Option(help="The folder for its files.", show_default="data/NAME")] = None,
    mirror: Annotated[str | None, typer.Option("--from", help="Another address to fetch from.")] = None,
) -> None:
    """Download a public dataset, with checksums."""
    out = out or Path("data") / name
    with _bars(DownloadColumn()) as report:
        files = download(name, out, mirror, report)
    print(f"{units.count(len(files), 'file')} of {name} in {out}")


@make_app.command(
    epilog=examples(
        "tutti data make images",
        "tutti data make images --out data/small --classes 4 --train 16 --valid 4 --size 64",
    )
)
def images(
    out: Annotated[Path, typer.Option(help="The folder for train/ and validation/.")] = Path("data/imagenet"),
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 10,
    train: Annotated[int, typer.Option(help="Training images of each class.")] = 32,
    valid: Annotated[int, typer.Option(help="Validation images of each class.")] = 8,
    size: Annotated[int, typer.Option(help="Pixels of a side, about.")] = 256,
    seed: Annotated[int, typer.Option(help="Another seed, other images.")] = 0,
) -> None:
    """Draw images of striped discs as a tree of JPEG files, like ImageNet's; their classes can be learned."""
    from tutti.data.make_images import make_images

    with _bars(MofNCompleteColumn()) as report:
        make_images(out, classes, train, valid, size, seed, report)
    print(f"{classes * train:,} training and {classes * valid:,} validation images of {classes:,} classes in {out}")


@make_app.command(
    epilog=examples(
        "tutti data make nbody --out data/nbody/train.h5 --box 256 --seed 1",
        "tutti data make nbody --out data/nbody/valid.h5 --box 128 --seed 2",
        "tutti data make nbody --out /scratch/me/train.h5 --box 1024 --memory-gib 64 --device cuda",
    )
)
def nbody(
    out: Annotated[Path, typer.Option(help="The HDF5 file; a picture is put beside it.")] = Path("data/nbody/train.h5"),
    box: Annotated[int, typer.Option(help="Cells along a side, an even number.")] = 256,
    seed: Annotated[int, typer.Option(help="Another seed, another universe.")] = 1,
    cell: Annotated[float | None, typer.Option(help="Length of a cell in Mpc/h.", show_default="0.1")] = None,
    memory_gib: Annotated[float, typer.Option(help="Memory to use; what does not fit goes to disk.")] = 2.0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file of that name.")] = False,
) -> None:
    """Make a box of matched N-body and hydro fields, with a picture of its slices."""
    from tutti.data.nbody.make import make_nbody

    with _bars(MofNCompleteColumn()) as report:
        try:
            make_nbody(out, box, cell, seed, memory_gib, device, report, overwrite)
        except OSError as error:  # a full disk, a folder in the way
            reason = error.strerror or error
            raise DataError(f"{out} cannot be written: {reason}. Choose another file with --out.") from error
    print(f"a box of {box}^3 cells in {out}, a picture of its slices in {out.with_suffix('.png')}")


@contextmanager
def _bars(amount: ProgressColumn) -> Iterator[Report]:
    """Show a progress bar for each name that is reported; nothing without a terminal."""
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
