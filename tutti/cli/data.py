"""`tutti data`: download public datasets, pack datasets, or make data to try a recipe with."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from tutti import units
from tutti.cli.options import examples
from tutti.data.download import get as download
from tutti.errors import ConfigError, DataError
from tutti.ranks.environments import discover

Report = Callable[[str, int, int], None]  # a name, the amount done, the total amount (0: unknown)
_MOST_WORKERS = 64  # or as many as there are cores
SPLIT_TITLES = {"train": "training", "valid": "validation"}

app = typer.Typer(no_args_is_help=True)
make_app = typer.Typer(
    help="Make data to try a recipe with, the same from the same seed.",
    epilog=examples("tutti data make images", "tutti data make nbody --out data/nbody/train.h5"),
    no_args_is_help=True,
)
app.add_typer(make_app, name="make")


@app.callback(
    epilog=examples(
        "tutti data get mnist",
        "tutti data pack /scratch/imagenet /scratch/packed",
        "tutti data make images",
    )
)
def data() -> None:
    """Fetch data, pack it for fast reading, or make some to try a recipe with."""


@app.command(
    epilog=examples(
        "tutti data get mnist",
        "tutti data get cifar10 --out /scratch/me/cifar10",
        "tutti data get nbody --out /scratch/me/nbody",
    )
)
def get(
    name: Annotated[str, typer.Argument(help="The dataset: mnist, cifar10 or nbody (41 GiB).")],
    out: Annotated[Path | None, typer.Option(help="The folder for its files.", show_default="data/NAME")] = None,
    mirror: Annotated[str | None, typer.Option("--from", help="Another address to fetch from.")] = None,
) -> None:
    """Download a public dataset and check its files; an interrupted download of nbody is continued."""
    out = out or Path("data") / name
    with _bars(DownloadColumn()) as report:
        files = download(name, out, mirror, report)
    print(f"{units.count(len(files), 'file')} of {name} in {out}")


@app.command(
    epilog=examples(
        "tutti data pack /scratch/imagenet /scratch/packed",
        "srun -n 16 tutti data pack /scratch/imagenet /scratch/packed",
        "tutti data pack ILSVRC2012_img_train.tar packed --validation ILSVRC2012_img_val.tar --labels classes.txt",
        "tutti data pack my_data:dataset packed",
        "tutti data pack packed --verify",
    )
)
def pack(
    source: Annotated[str, typer.Argument(help="A folder of images, a tar of classes, or a dataset module:object.")],
    folder: Annotated[Path | None, typer.Argument(help="The folder for the shards and their index.")] = None,
    size: Annotated[int, typer.Option(help="Pixels of the shorter side after shrinking; 0: as they are.")] = 256,
    quality: Annotated[int, typer.Option(help="JPEG quality of images that are shrunk.")] = 90,
    shard_mb: Annotated[float, typer.Option(help="Approximate size of a shard in MB.")] = 512,
    workers: Annotated[int | None, typer.Option(help="Processes.", show_default="all cores")] = None,
    validation: Annotated[Path | None, typer.Option(help="A tar of validation images, with --labels.")] = None,
    labels: Annotated[Path | None, typer.Option(help="Their classes: CLASS, or NAME CLASS, in each line.")] = None,
    corrupt: Annotated[str, typer.Option(help="Images that cannot be decoded: refuse or skip.")] = "refuse",
    part: Annotated[
        str | None, typer.Option(help="Only a part of the shards: I/N, I from 0.", show_default="the rank")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every sample with its checksum.")] = False,
) -> None:
    """Pack images or arrays into tar shards with an index; run it again to finish what was interrupted."""
    from tutti.data.packed.encode import PackOptions
    from tutti.data.packed.sources import open_source
    from tutti.data.packed.write import pack as write

    if folder is None and not verify:
        raise ConfigError("FOLDER is missing: expected tutti data pack SOURCE FOLDER, or FOLDER --verify.")
    if corrupt not in ("refuse", "skip"):
        raise ConfigError(f"--corrupt {corrupt}: expected refuse or skip.")
    sys.path.append(os.getcwd())  # for module:object
    workers = _count_workers(workers)
    if folder is not None:
        options, place = PackOptions(size, quality, shard_mb), _find_part(part)
        opened = partial(open_source, source, validation, labels)
        name = source if validation is None else f"{source} --validation {validation} --labels {labels}"
        with _bars(MofNCompleteColumn(), TimeRemainingColumn()) as report:
            found = write(opened, name, folder, options, workers, place, corrupt == "skip", report)
        if found.missing:
            print(f"part {place[0]} of {place[1]} is done; {units.count(found.missing, 'shard')} of others are missing")
            return
        counts = " and ".join(f"{count:,} {SPLIT_TITLES[split]}" for split, count in found.samples.items())
        print(f"{counts} samples in {units.count(found.shards, 'shard')}, {units.size(found.size_bytes)}, in {folder}")
        for name in found.skipped:
            print(f"left out, since it cannot be decoded: {name}")
    if verify:
        _verify(folder or Path(source), workers)


def _verify(folder: Path, workers: int) -> None:
    from tutti.data.packed.verify import verify

    with _bars(MofNCompleteColumn(), TimeRemainingColumn()) as report:
        damaged = verify(folder, workers, report)
    for line in damaged:
        print(f"damaged: {line}")
    if damaged:
        print("Remove the shards that are named, and run tutti data pack again: it writes what is missing.")
        raise typer.Exit(1)
    print(f"every sample in {folder} is as it was packed")


def _find_part(given: str | None) -> tuple[int, int]:
    """The part of the shards that this process packs: as given, or that of its rank."""
    if given is None:
        placement = discover(os.environ)
        return placement.rank, placement.world_size
    words = given.split("/")
    if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[0]) < int(words[1]):
        return int(words[0]), int(words[1])
    raise ConfigError(f"--part {given}: expected I/N with I from 0 to N - 1, such as 0/4.")


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
    size: Annotated[int, typer.Option(help="Approximate number of pixels of a side.")] = 256,
    seed: Annotated[int, typer.Option(help="The images are the same for the same seed.")] = 0,
    workers: Annotated[int | None, typer.Option(help="Processes.", show_default="all cores")] = None,
) -> None:
    """Draw images of striped discs as a tree of JPEG files, like ImageNet's; their classes can be learned."""
    from tutti.data.make_images import make_images

    with _bars(MofNCompleteColumn(), TimeRemainingColumn()) as report:
        make_images(out, classes, train, valid, size, seed, report, _count_workers(workers))
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
    seed: Annotated[int, typer.Option(help="The fields are the same for the same seed.")] = 1,
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


def _count_workers(given: int | None) -> int:
    """The processes that are wanted: by default one for each core that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = max(_MOST_WORKERS, cores)
    if given is not None and not 1 <= given <= most:
        raise ConfigError(f"--workers {given}: expected 1 to {most}. Leave it out for the {cores} cores of this host.")
    return given or cores


@contextmanager
def _bars(*amounts: ProgressColumn) -> Iterator[Report]:
    """Show a progress bar for each name that is reported; nothing without a terminal."""
    console = Console()
    columns = TextColumn("{task.description}"), BarColumn(), *amounts
    progress = Progress(*columns, console=console, disable=not console.is_terminal)
    tasks = {}

    def report(name: str, done: int, total: int) -> None:
        if name not in tasks:
            tasks[name] = progress.add_task(name, total=total or None)
        progress.update(tasks[name], completed=done)

    with progress:
        yield report
