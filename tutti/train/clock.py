"""Where the seconds of a log window go: waiting for data, and everything else; pauses do not count."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Measures a window from lap to lap."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._waited = 0.0
        self._paused = 0.0

    def wait_began(self) -> float:
        return time.perf_counter()

    def wait_ended(self, began: float) -> None:
        self._waited += time.perf_counter() - began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is not training: validation and checkpoints."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - began

    def lap(self) -> tuple[float, float]:
        """Seconds of training since the last lap, and those of them spent waiting for data."""
        now = time.perf_counter()
        seconds, waited = max(now - self._start - self._paused, 1e-9), self._waited
        self._start, self._waited, self._paused = now, 0.0, 0.0
        return seconds, waited
