"""CPU time of processes: of this one with all below it, as the kernel counts it."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Return the CPU time of this process, of those that it has waited for, and of all that run below it."""
    own = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in own) + sum(map(_used, _below(os.getpid())))


def _used(pid: int) -> float:
    """Return the CPU time of a process and of those that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS


def _below(pid: int) -> Iterator[int]:
    """Yield the processes that a process has started, and those that they have; any of them may end meanwhile."""
    for child in _children(pid):
        yield child
        yield from _below(child)


def _children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [child for thread in threads for child in _started_by(pid, thread)]


def _started_by(pid: int, thread: str) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()]
    except OSError:
        return []
