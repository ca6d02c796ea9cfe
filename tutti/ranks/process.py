"""What a process tells the kernel about itself."""

import ctypes
import signal
import sys

_SET_DEATH_SIGNAL, _SET_NAME = 1, 15  # PR_SET_PDEATHSIG, PR_SET_NAME


def end_with_parent() -> None:
    """Have the kernel end this process when the one that started it is gone, however that ended."""
    _tell(_SET_DEATH_SIGNAL, signal.SIGKILL)


def name_process(name: str) -> None:
    """The name that top shows; 15 letters of it."""
    _tell(_SET_NAME, ctypes.c_char_p(name.encode()))


def _tell(what: int, value: object) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(what, value)
