"""Ranks that compute longer than the others: all wait for them in every step."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch

_LEAST_STEPS = 5  # a window of fewer says little
_LEAST_SHARE = 0.1  # of the window: what a slow rank must cost to be worth a word
_MOST_EVENTS = 64  # pairs kept in a window on a GPU


class OwnTime:
    """The time of this rank's forward passes, in which no other rank has a part.

    On a GPU a pass has only been started when the call returns, so that events on its stream are the clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._uncounted = 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count a forward pass."""
        if not self._on_gpu:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
        elif len(self._events) < _MOST_EVENTS:
            start = _event()
            yield
            self._events.append((start, _event()))
        else:
            yield
            self._uncounted += 1

    def lap(self) -> float:
        """Seconds since the last lap; a GPU must have done its work, of which the first passes stand for all."""
        seconds = self._seconds
        if self._events:
            clocked = sum(began.elapsed_time(ended) for began, ended in self._events) / 1000
            seconds += clocked * (1 + self._uncounted / len(self._events))
        self._seconds, self._uncounted = 0.0, 0
        self._events.clear()
        return seconds


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass
class Slow:
    """A slow rank for the record."""

    rank: int
    host: str
    windows: int  # log windows in which it was slow
    worst: float  # its time over the median of the others
    first_step: int
    last_step: int


class Stragglers:
    """Compares ranks window by window."""

    def __init__(self, hosts: Sequence[str], factor: float) -> None:
        self._hosts = hosts
        self._factor = factor
        self.found: dict[int, Slow] = {}

    def compare(self, own_seconds: Sequence[float], steps: int, window_seconds: float, step: int) -> list[str]:
        """What to say about a window that ends at a step: a line for each rank that is slow and was not before."""
        if len(own_seconds) < 2 or steps < _LEAST_STEPS:
            return []
        lines = []
        for rank, seconds in enumerate(own_seconds):
            others = median([*own_seconds[:rank], *own_seconds[rank + 1 :]])
            if seconds < self._factor * others or seconds - others < _LEAST_SHARE * window_seconds:
                continue
            ratio = seconds / max(others, 1e-9)
            slow = self.found.get(rank)
            if slow is None:
                slow = self.found[rank] = Slow(rank, self._hosts[rank], 0, ratio, step, step)
                lines.append(
                    f"slow rank: rank {rank} on host {self._hosts[rank]} takes {seconds / steps * 1e3:.1f} ms a step "
                    f"for its batch and forward pass, the others {others / steps * 1e3:.1f} ms: all wait for it"
                )
            slow.windows += 1
            slow.worst = max(slow.worst, ratio)
            slow.last_step = step
        return lines
