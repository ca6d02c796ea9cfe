"""Where the seconds of a log window go: waiting for data, and everything else; pauses do not count."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Measures a window from lap to lap, and sums up the seconds of the whole run by what they went to."""

    def __init__(self) -> None:
        self.totals = {"training": 0.0, "waiting_for_data": 0.0, "validation": 0.0, "checkpoints": 0.0}
        self._start = time.perf_counter()
        self._waited = 0.0
        self._paused = 0.0

    def start(self) -> None:
        """Begin the first window here."""
        self._start = time.perf_counter()

    def wait_began(self) -> float:
        return time.perf_counter()

    def wait_ended(self, began: float) -> None:
        self._waited += time.perf_counter() - began

    @property
    def waited(self) -> float:
        """Seconds of this window spent waiting for data so far."""
        return self._waited

    @contextmanager
    def paused(self, what: str) -> Iterator[None]:
        """Leave out what is not training, and add it up by its name."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - began
            self.totals[what] += time.perf_counter() - began

    def lap(self) -> tuple[float, float]:
        """Seconds of training since the last lap, and those of them spent waiting for data."""
        now = time.perf_counter()
        seconds, waited = max(now - self._start - self._paused, 1e-9), self._waited
        self._start, self._waited, self._paused = now, 0.0, 0.0
        self.totals["training"] += seconds
        self.totals["waiting_for_data"] += waited
        return seconds, waited
