"""`tutti run`: any script on several ranks."""

from pathlib import Path
from typing import Annotated

import typer

from tutti.cli.options import Ranks, examples
from tutti.cli.ranks import as_rank, finish, given_folder, is_rank, place, print_folders
from tutti.horovod.script import check_script, run_script
from tutti.launch import local
from tutti.runs.folder import check_writable, create_folder

app = typer.Typer()


@app.command(
    epilog=examples("tutti run -n 4 script.py --epochs 3", "mpirun -np 4 tutti run script.py"),
    context_settings={"allow_interspersed_args": False},
)
def run(
    script: Annotated[str, typer.Argument(help="A Python script.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    ranks: Ranks = None,
    out: Annotated[str, typer.Option(help="The folder in which the run folder with the logs is created.")] = "runs",
) -> None:
    """Start any script on several ranks, with the variables of torchrun; `import horovod` finds tutti's."""
    arguments = arguments or []
    placement = place(ranks)
    check_script(script)
    if is_rank(placement) or ranks in (None, 1):
        folder = given_folder()
        as_rank(placement, lambda: run_script(script, arguments, placement, folder))
        return
    check_writable(out, "--out FOLDER")
    folder = create_folder(out, Path(script).stem, ranks)
    failure = local.start_ranks(ranks or 1, ["-m", "tutti", "run", script, *arguments], folder)
    if failure is None:
        print_folders(folder)
    finish(folder, failure)
