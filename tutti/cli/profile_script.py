"""A script that uses Horovod's API, with the timeline of its operations."""

import os
from pathlib import Path

from tutti.bench.trace.horovod import read_tensors, read_timeline, write_horovod_summary
from tutti.cli.ranks import as_rank, finish, is_rank, place
from tutti.errors import ConfigError
from tutti.launch import local
from tutti.ranks.placement import Placement
from tutti.runs.files import write_durably
from tutti.runs.folder import RunFolder, check_writable, create_folder

_OUT = "runs"
_VARIABLE = "HOROVOD_TIMELINE"


def profile_script(script: str, arguments: list[str], ranks: int | None) -> None:
    """Run a script as `tutti run` does, and tell what its timeline shows."""
    from tutti.horovod.script import check_script

    placement = place(ranks)
    check_script(script)
    check_writable(_OUT)
    if is_rank(placement):
        as_rank(placement, lambda: _run_as_rank(script, arguments, placement))
        return
    folder = _open_folder(script, ranks or 1)
    failure = local.start_ranks(ranks or 1, ["-m", "tutti", "run", script, *arguments], folder)
    finish(folder, failure)
    _tell(script, folder, ranks or 1)


def _run_as_rank(script: str, arguments: list[str], placement: Placement) -> None:
    """As one of the ranks that mpirun or srun has started; rank 0 has the timeline."""
    from tutti.horovod.script import run_script

    folder = _open_folder(script, placement.world_size) if placement.rank == 0 else None
    run_script(script, arguments, placement, folder)
    if folder:
        _tell(script, folder, placement.world_size)


def _open_folder(script: str, ranks: int) -> RunFolder:
    """A folder for the timeline, which rank 0 finds in its environment."""
    folder = create_folder(_OUT, f"profile/{Path(script).stem}", ranks)
    folder.checkpoints.rmdir()
    os.environ[_VARIABLE] = str(_timeline(folder).absolute())
    return folder


def _timeline(folder: RunFolder) -> Path:
    return folder.path / "timeline.json"


def _tell(script: str, folder: RunFolder, ranks: int) -> None:
    path = _timeline(folder)
    tensors = read_tensors(read_timeline(path)) if path.exists() else []
    if not tensors:
        raise ConfigError(
            f"{script} left no operation in a timeline: expected a script that calls hvd.init() and operations of "
            f"horovod or tutti.horovod. What it printed is in {folder.logs}."
        )
    text = write_horovod_summary(f"{script} on {ranks} rank(s)", tensors)
    write_durably(folder.path / "summary.txt", text)
    print(f"\n{text}\ntimeline:   {path} (open it at https://ui.perfetto.dev)\nrun folder: {folder.path}", flush=True)
