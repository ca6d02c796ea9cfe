"""A process of a run: its end with its parent, its name, signals, exit codes in words, and its command."""

import contextlib
import ctypes
import os
import shlex
import signal
import sys
from collections.abc import Iterable

FOLDER_VARIABLE = "TUTTI_RUN_FOLDER"  # tells a rank that tutti started it, and where its run folder is
LINE_VARIABLE = "TUTTI_LAUNCH_LINE"

_SET_DEATH_SIGNAL, _SET_NAME = 1, 15  # PR_SET_PDEATHSIG, PR_SET_NAME


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however the parent ends."""
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def name_process(name: str) -> None:
    """Set the name that `top` shows; the kernel keeps 15 letters."""
    _prctl(_SET_NAME, ctypes.c_char_p(name.encode()))


def send_signal(process_ids: Iterable[int], number: int) -> None:
    """Forward a signal to processes, of which some may have ended."""
    for process_id in process_ids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, number)


def _prctl(option: int, value: object) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def launch_line() -> str:
    """The command that started this run, as a user would type it."""
    if line := os.environ.get(LINE_VARIABLE):
        return line
    program = os.path.basename(sys.argv[0])
    return shlex.join(["tutti" if program == "__main__.py" else program, *sys.argv[1:]])


def describe_exit(code: int) -> str:
    """Describe an exit code; a negative one is a signal."""
    return f"ended by signal {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
