"""A share of the cores for each host of one machine: control groups with a CPU quota, of version 1 or 2."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_PERIOD_MICROSECONDS = 10_000  # short beside what is measured: a host that has used its share waits 10 ms at most
_SECONDS_TO_EMPTY = 10.0  # processes of a host that has ended leave their group a moment later
_VERSION_1, _VERSION_2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


def unavailable() -> str | None:
    """Why no share of a core can be given here, or nothing."""
    try:
        with shares(["trial"], 0.5):
            return None
    except OSError as error:
        return (
            f"a CPU quota needs a control group, and {error.filename} cannot be written ({error.strerror}): expected "
            f"root, and the controller `cpu` of version 1 at {_VERSION_1} or of version 2 at {_VERSION_2}"
        )


@contextlib.contextmanager
def shares(names: Sequence[str], cores: float) -> Iterator[dict[str, Path]]:
    """By name a group whose processes have together so many cores; a process enters it by writing 0 to the path."""
    parent = _parent()
    folders = {name: parent / f"tutti-{os.getpid()}-{name}" for name in names}
    with contextlib.ExitStack() as stack:
        for folder in folders.values():
            folder.mkdir()
            stack.callback(_remove, folder)
            _limit(folder, cores)
        yield {name: folder / "cgroup.procs" for name, folder in folders.items()}


def _parent() -> Path:
    if (_VERSION_1 / "cpu.cfs_quota_us").exists():
        return _VERSION_1
    (_VERSION_2 / "cgroup.subtree_control").write_text("+cpu")
    return _VERSION_2


def _limit(folder: Path, cores: float) -> None:
    quota = round(cores * _PERIOD_MICROSECONDS)
    if folder.parent == _VERSION_2:
        (folder / "cpu.max").write_text(f"{quota} {_PERIOD_MICROSECONDS}")
        return
    (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_MICROSECONDS))
    (folder / "cpu.cfs_quota_us").write_text(str(quota))


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + _SECONDS_TO_EMPTY
    while True:
        try:
            return folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
