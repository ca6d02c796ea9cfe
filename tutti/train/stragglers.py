"""Ranks that compute longer than the others: all wait for them in every step."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_LEAST_STEPS = 5  # a window of fewer says little
_LEAST_SHARE = 0.1  # of the window: what a slow rank must cost to be worth a word


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
