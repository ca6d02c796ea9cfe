"""The command line: one function a command; what a command needs is imported when it is called."""

import sys
from pathlib import Path
from typing import Annotated

import typer

import tutti
from tutti.errors import TuttiError

app = typer.Typer(
    name="tutti",
    help="From solo to tutti: train one recipe on any number of ranks, and resume it exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Fetch data, or make some to try a recipe with.", no_args_is_help=True)
make_app = typer.Typer(help="Make data to try a recipe with, the same from the same seed.", no_args_is_help=True)
app.add_typer(data_app, name="data")
data_app.add_typer(make_app, name="make")

Recipe = Annotated[str, typer.Argument(help="A recipe's name (mnist, mnist/large_batch) or the path of a YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, for example optim.lr=3e-4 epochs=2.")]
Ranks = Annotated[int | None, typer.Option("-n", "--ranks", help="Ranks to start on this machine.", show_default="1")]


@app.command(
    epilog="Examples:\n\n"
    "    tutti train digits -n 2\n\n"
    "    tutti train mnist -n 4 optim.lr=0.02 epochs=3\n\n"
    "    mpirun -np 4 tutti train digits\n\n"
    "    tutti train digits -n 4 --resume"
)
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    ranks: Ranks = None,
    resume: Annotated[
        str | None,
        typer.Option(help="Go on from the newest run (latest), a run folder or a checkpoint.", metavar="[latest|PATH]"),
    ] = None,
) -> None:
    """Train a recipe, on ranks started here or as one of those that mpirun or srun has started."""
    from tutti.cli import train as command

    command.train(recipe, overrides or [], ranks, resume)


@app.command(
    epilog="Examples:\n\n    tutti run -n 4 script.py --epochs 3\n\n    mpirun -np 4 tutti run script.py",
    context_settings={"allow_interspersed_args": False},
)
def run(
    script: Annotated[str, typer.Argument(help="A Python script.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    ranks: Ranks = None,
    out: Annotated[str, typer.Option(help="Where the run folder with the logs is made.")] = "runs",
) -> None:
    """Start any script on several ranks, with the variables of torchrun; `import horovod` finds tutti's."""
    from tutti.cli import train as command

    command.run(script, arguments or [], ranks, out)


@app.command(epilog="Examples:\n\n    tutti show mnist optim.lr=0.02\n\n    tutti show mnist -n 8 --plot-lr lr.png")
def show(
    recipe: Recipe,
    overrides: Overrides = None,
    ranks: Ranks = None,
    plot_lr: Annotated[Path | None, typer.Option(help="Draw the learning rate of every step into this file.")] = None,
) -> None:
    """Print the resolved configuration, and where each value came from."""
    from tutti.cli import show as command

    command.show(recipe, overrides or [], ranks or 1, plot_lr)


@app.command("list")
def list_parts() -> None:
    """Print the recipes, models, datasets, optimizers, schedules, losses and metrics there are."""
    from tutti.cli import show as command

    command.list_parts()


@app.command(epilog="Examples:\n\n    tutti runs\n\n    tutti runs mnist --out /scratch/runs")
def runs(
    recipe: Annotated[str | None, typer.Argument(help="Only the runs of this recipe.")] = None,
    out: Annotated[Path, typer.Option(help="The folder of run folders.")] = Path("runs"),
) -> None:
    """List run folders with their ranks, epochs, metrics and speed."""
    from tutti.cli import runs as command

    command.list_runs(out, recipe)


@data_app.command(
    epilog="Examples:\n\n    tutti data get mnist\n\n    tutti data get cifar10 --out /scratch/me/cifar10"
)
def get(
    name: Annotated[str, typer.Argument(help="The dataset: mnist or cifar10.")],
    out: Annotated[Path | None, typer.Option(help="The folder for its files.", show_default="data/NAME")] = None,
    mirror: Annotated[str | None, typer.Option("--from", help="Another address to fetch from.")] = None,
) -> None:
    """Download a public dataset, with checksums."""
    from tutti.cli import data as command

    command.get_data(name, out or Path("data") / name, mirror)


@make_app.command(
    epilog="Examples:\n\n"
    "    tutti data make images\n\n"
    "    tutti data make images --out data/small --classes 4 --train 16 --valid 4 --size 64"
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
    from tutti.cli import data as command

    command.make_images(out, classes, train, valid, size, seed)


@make_app.command(
    epilog="Examples:\n\n"
    "    tutti data make nbody --out data/nbody/train.h5 --box 256 --seed 1\n\n"
    "    tutti data make nbody --out data/nbody/valid.h5 --box 128 --seed 2\n\n"
    "    tutti data make nbody --out /scratch/me/train.h5 --box 1024 --memory-gib 64 --device cuda"
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
    from tutti.cli import data as command

    command.make_nbody(out, box, cell, seed, memory_gib, device, overwrite)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if show:
        print(f"tutti {tutti.__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command; a user's mistake is one message and exit code 2."""
    try:
        app(args=fill_resume(sys.argv[1:]), prog_name="tutti")
    except TuttiError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def fill_resume(arguments: list[str]) -> list[str]:
    """`--resume` alone means `--resume latest`."""
    filled = []
    for word, following in zip(arguments, [*arguments[1:], "-"], strict=True):
        filled.append(word)
        if word == "--resume" and (following.startswith("-") or "=" in following):
            filled.append("latest")
    return filled
