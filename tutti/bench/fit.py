"""Times of collectives as latency + bytes / bandwidth, for one number of ranks; for any there is `collective_model`.

Where bytes travel while ranks still wait for each other, a message takes less than the sum. A line therefore has a
blend p, t^p = latency^p + (bytes / bandwidth)^p: 1 is the plain sum, and it is kept unless another is clearly better; a
large p is the larger of the two.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np

BUS_FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "all_gather": lambda n: (n - 1) / n,
}
# A frame of Ethernet with IPv4 and TCP timestamps at MTU 1500; its preamble, checksum and gap are not counted.
FRAME_BYTES, FRAME_PAYLOAD_BYTES = 1514, 1448
BLENDS = (1, 2, 4, 8)
_CLEARLY = 0.8  # another form or blend is taken when its residual is this part of the first one's, or less
_GOOD_ENOUGH = 0.02  # a residual with which no other is looked for


@dataclass(frozen=True)
class Point:
    """A message and the time of a call."""

    ranks: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Residual:
    """How far a fit is from what was measured, as parts of it."""

    rms: float
    worst: float
    mean_log: float  # of |log(fitted / measured)|, which an outlier changes little
    points: int


UNKNOWN = Residual(0.0, 0.0, 0.0, 0)


@dataclass(frozen=True)
class Line:
    """The time of an operation on one number of ranks."""

    latency_seconds: float
    seconds_per_byte: float
    blend: int
    residual: Residual
    sum_residual: Residual  # of latency + bytes / bandwidth, with the same two numbers

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth of very large messages; infinite where size makes no difference."""
        return 1 / self.seconds_per_byte if self.seconds_per_byte else math.inf

    def seconds(self, size: float) -> float:
        return blended(self.latency_seconds, size * self.seconds_per_byte, self.blend)


def blended(latency_seconds: float, transfer_seconds: float, blend: int) -> float:
    """Latency and transfer together: their sum, or less."""
    return (latency_seconds**blend + transfer_seconds**blend) ** (1 / blend)


def fit_line(points: Sequence[Point]) -> Line | None:
    """The line through messages of one number of ranks; None where there are fewer than two sizes."""
    if len({point.bytes for point in points}) < 2:
        return None
    return best_of([fit_blend(points, blend) for blend in BLENDS])


def wire_bits_per_second(payload_bytes_per_second: float) -> float:
    """What a link carries, headers included, to move so much payload over TCP."""
    return 8 * payload_bytes_per_second * FRAME_BYTES / FRAME_PAYLOAD_BYTES


def fit_blend(points: Sequence[Point], blend: int) -> Line:
    """The line with the least sum of |log(fitted / measured)|: all sizes count alike, and an outlier for little.

    Such a line goes through two of the points, or through one with the latency or the time of a byte at zero.
    """
    sizes, seconds = np.array([[point.bytes, point.seconds] for point in points], dtype=float).T
    x, y = sizes**blend, seconds**blend
    pairs = [(i, j) for i, j in itertools.combinations(range(len(x)), 2) if x[i] != x[j]]
    rises = [(y[j] - y[i]) / (x[j] - x[i]) for i, j in pairs]
    through_two = [(y[i] - rise * x[i], rise) for (i, _), rise in zip(pairs, rises, strict=True)]
    through_one = [(0.0, slope) for slope in y / x] + [(fixed, 0.0) for fixed in y]
    lines = np.array([each for each in through_one + through_two if min(each) >= 0])
    off = np.abs(np.log((lines[:, :1] + lines[:, 1:] * x) / y)).sum(axis=1)
    latency, slope = map(float, lines[np.argmin(off)] ** (1 / blend))
    line = Line(latency, slope, blend, UNKNOWN, residual_of(latency + sizes * slope, seconds))
    return replace(line, residual=residual_of(np.array([line.seconds(size) for size in sizes]), seconds))


def residual_of(fitted: np.ndarray, seconds: np.ndarray) -> Residual:
    """How far fitted times are from measured ones."""
    off = np.abs(fitted / seconds - 1)
    mean_log = float(np.abs(np.log(fitted / seconds)).mean())
    return Residual(float(np.sqrt(np.mean(off**2))), float(off.max()), mean_log, len(seconds))


class Fitted(Protocol):
    """What knows how well it fits."""

    @property
    def residual(self) -> Residual: ...


_Fitted = TypeVar("_Fitted", bound=Fitted)


def best_of(candidates: Sequence[_Fitted]) -> _Fitted:
    """The first, unless it is poor and another clearly better."""
    first, best = candidates[0], min(candidates, key=lambda each: each.residual.mean_log)
    is_better = best.residual.mean_log < _CLEARLY * first.residual.mean_log
    return best if is_better and first.residual.mean_log > _GOOD_ENOUGH else first
