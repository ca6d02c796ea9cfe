"""A process that imports what ranks need while their launcher still reads its input, and from which ranks are forked.

Importing torch takes longer than many a short run. Done once, aside, it costs a run of two ranks half the time to its
first step, and one of eight ranks far more.
"""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from typing import Any

from tutti.ranks.process import end_with_parent, name_process

_VARIABLE = "TUTTI_NURSERY"
_kept: list[Any] = []  # what a forked rank may not free: its end would wait for threads
_is_forked = False


def open_nursery(modules: Sequence[str], threads: int) -> None:
    """Start the process, with the modules to import and the number of threads that libraries fix when they are."""
    os.environ |= {"OMP_NUM_THREADS": str(threads), _VARIABLE: "1"}
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__, *modules])
    forkserver.ensure_running()
    del os.environ[_VARIABLE]


def be_rank(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """What a forked process does: `python -m MODULE WORDS`, told as ["-m", MODULE, *WORDS]."""
    global _is_forked
    _is_forked = True
    end_with_parent()
    os.environ |= environment
    name_process(f"tutti rank {os.environ['RANK']}")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv = list(arguments[1:])
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)


def keep(outcome: Any) -> bool:
    """Hold an object until a forked rank is gone; whether this is one."""
    if _is_forked:
        _kept.append(outcome)
    return _is_forked


if os.environ.pop(_VARIABLE, None):  # this is the process itself, at its first import
    end_with_parent()
