"""`tutti doctor`: check this machine or all hosts of an allocation, on ranks started here or as one rank."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tutti.cli.options import Overrides, complete_recipe, examples
from tutti.cli.ranks import as_rank, leave, place
from tutti.config.load import resolve
from tutti.config.recipes import make_importable
from tutti.config.run import RunConfig
from tutti.errors import ConfigError
from tutti.launch import local
from tutti.launch.local import keep_until_exit, start_fork_server
from tutti.ranks.cores import threads_per_rank
from tutti.ranks.placement import Placement
from tutti.ranks.process import end_with_parent
from tutti.runs.folder import RunFolder, check_writable

_RECORD = "doctor.json"


app = typer.Typer()


@app.command(
    epilog=examples(
        "tutti doctor",
        "tutti doctor mnist -n 4 --json doctor.json",
        "srun -N4 tutti doctor imagenet --out /scratch/me/runs",
    )
)
def doctor(
    recipe: Annotated[
        str | None,
        typer.Argument(help="A recipe or run folder, for its data and code.", autocompletion=complete_recipe),
    ] = None,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", help="Ranks to start on this machine.", show_default="2")
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="The folder that all hosts should share.", show_default="runs")
    ] = None,
    record: Annotated[Path | None, typer.Option("--json", help="Write all measurements to this file.")] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for ranks that do not connect.")] = 60.0,
) -> None:
    """Check ranks, hosts and links before a run: versions that differ, folders that are not shared, slow links."""
    placement = place(ranks)
    if wait <= 0:
        raise ConfigError(f"--wait {wait:g}: expected a number of seconds above 0.")
    config, folder = _read(recipe, overrides or [])
    if record is not None and not record.absolute().parent.is_dir():
        raise ConfigError(
            f"--json {record}: there is no folder {record.absolute().parent}. Create it, or choose another."
        )
    if record is not None and placement.rank == 0:
        check_writable(str(record.absolute().parent), "--json FILE")
    if placement.world_size > 1 or local.FOLDER_VARIABLE in os.environ or ranks == 1:
        _as_rank(placement, config, Path(out) if out else folder, record, wait)
    else:
        _start(ranks or 2)


def _read(recipe: str | None, overrides: list[str]) -> tuple[RunConfig | None, Path]:
    """Read the configuration of a recipe or run folder, and the folder that all hosts should share."""
    if recipe is None:
        return None, Path("runs")
    make_importable(recipe)
    folder = RunFolder(Path(recipe))
    if folder.config.is_file():
        return resolve(str(folder.config), overrides).config, folder.path
    config = resolve(recipe, overrides).config
    return config, Path(config.out)


def _start(ranks: int) -> None:
    """Start local ranks; they print the report, and their logs are temporary."""
    start_fork_server(["tutti.doctor.run"], threads_per_rank(ranks, os.environ))
    with tempfile.TemporaryDirectory(prefix="tutti-doctor-") as path:
        folder = RunFolder(Path(path))
        folder.logs.mkdir()
        failure = local.start_ranks(ranks, ["-m", "tutti", *sys.argv[1:]], folder, forked=True)
        if failure is None:
            return
        if not (folder.path / _RECORD).exists():
            print(failure.message(folder), file=sys.stderr)
    sys.exit(failure.exit_code)


def _as_rank(placement: Placement, config: RunConfig | None, folder: Path, record: Path | None, wait: float) -> None:
    """Run as one rank; end at once, as threads of torch may wait for ranks that have ended."""
    if local.FOLDER_VARIABLE in os.environ:
        end_with_parent()

    def work() -> None:
        code = _examine(placement, config, folder, record, wait)
        if code or not keep_until_exit(None):  # a forked rank returns to its fork server
            leave(code)

    as_rank(placement, work)


def _examine(placement: Placement, config: RunConfig | None, folder: Path, record: Path | None, wait: float) -> int:
    from tutti.doctor.report import print_report, write_record
    from tutti.doctor.run import examine

    report = examine(placement, config, folder, wait)
    if report is None:
        return 0
    print_report(report)
    if record is not None:
        write_record(report, record)
        print(f"record: {record}")
    elif RunFolder(folder).config.is_file():
        write_record(report, folder / _RECORD)
    if given := os.environ.get(local.FOLDER_VARIABLE):
        write_record(report, Path(given) / _RECORD)
    return 1 if report.faults else 0
