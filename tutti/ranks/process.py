"""A process and the kernel: its end with its parent, its name, and its exit code in words."""

import ctypes
import signal
import sys

_SET_DEATH_SIGNAL, _SET_NAME = 1, 15  # PR_SET_PDEATHSIG, PR_SET_NAME


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however the parent ends."""
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def name_process(name: str) -> None:
    """Set the name that `top` shows; the kernel keeps 15 letters."""
    _prctl(_SET_NAME, ctypes.c_char_p(name.encode()))


def _prctl(option: int, value: object) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def describe_exit(code: int) -> str:
    """Describe an exit code; a negative one is a signal."""
    return f"ended by signal {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
