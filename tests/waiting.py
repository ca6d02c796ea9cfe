"""Waiting in tests: for an event, as long as what should bring it about is alive and at work.

No wait ends because the machine is slow. One ends in failure when the process that it depends on has ended, or when
nothing that this test has started has used the processor for HUNG_SECONDS: then it hangs.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from cost import cpu_seconds

HUNG_SECONDS = 300.0
_LOOK_SECONDS = 0.02
_BUSY = 0.005  # the share of a core that ranks which only wait for each other stay below
T = TypeVar("T")


class Process(Protocol):
    """What can be asked whether it has ended: a `subprocess.Popen`, or a program of tests/prepared.py."""

    def poll(self) -> int | None: ...


class Hung(AssertionError):
    """Nothing has happened for so long that nothing will."""


class HangDetector:
    """Measures for how long the processes of this test have done nothing."""

    def __init__(self) -> None:
        self._since, self._used = time.monotonic(), cpu_seconds()

    def check(self, otherwise: Callable[[], str]) -> None:
        """Raise `Hung` with what `otherwise` says when nothing has been done for HUNG_SECONDS."""
        elapsed = time.monotonic() - self._since
        if elapsed < HUNG_SECONDS:
            return
        used = cpu_seconds()
        if used - self._used < _BUSY * elapsed:
            raise Hung(f"nothing has happened for {elapsed:.0f} s: {otherwise()}")
        self._since, self._used = time.monotonic(), used


def wait_until(ready: Callable[[], T | None], otherwise: Callable[[], str], process: Process | None = None) -> T:
    """Return what `ready` returns once that is true; fail where `process` ends without it, or all hangs."""
    hang = HangDetector()
    while not (found := ready()):
        ended = process is not None and process.poll() is not None
        if ended and not (found := ready()):
            raise AssertionError(f"the process ended with {process.poll()}: {otherwise()}")  # pyright: ignore
        if ended:
            break
        hang.check(otherwise)
        time.sleep(_LOOK_SECONDS)
    return found  # pyright: ignore[reportReturnType]


def wait_for_end(process: Any, otherwise: Callable[[], str]) -> int:
    """Return the exit code of a process once it has ended."""
    return wait_until(lambda: (process.poll(),) if process.poll() is not None else None, otherwise)[0]
