"""The time of a collective: a line in the message size for one number of ranks, and a model for any number.

Where transfer overlaps latency, a message takes less than the sum of the two. A line therefore has a blend p,
t^p = latency^p + (bytes / bandwidth)^p: p = 1 is the plain sum, which is used unless another is clearly better; for a
large p the time is the larger of the two.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from tutti.runs.files import list_in, read_json, to_dataclass

BUS_FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "all_gather": lambda n: (n - 1) / n,
}
# A frame of Ethernet with IPv4 and TCP timestamps at MTU 1500; its preamble, checksum and gap are not counted.
FRAME_BYTES, FRAME_PAYLOAD_BYTES = 1514, 1448
BLENDS = (1, 2, 4, 8)
_CLEARLY = 0.8  # another form or blend is used if its residual is at most this fraction of the first one's
_GOOD_ENOUGH = 0.02  # with this residual no other form or blend is tried


@dataclass(frozen=True)
class MessageTime:
    """A message and the time of a call."""

    ranks: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Residual:
    """The relative difference between a fit and the measurements."""

    rms: float
    worst: float
    mean_log: float  # of |log(fitted / measured)|, which is robust to outliers
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
        """The bandwidth of very large messages; infinite if the time does not depend on the size."""
        return 1 / self.seconds_per_byte if self.seconds_per_byte else math.inf

    def seconds(self, size: float) -> float:
        return blended(self.latency_seconds, size * self.seconds_per_byte, self.blend)


def blended(latency_seconds: float, transfer_seconds: float, blend: int) -> float:
    """The time of latency and transfer together: their sum, or less if they overlap."""
    return (latency_seconds**blend + transfer_seconds**blend) ** (1 / blend)


def fit_line(points: Sequence[MessageTime]) -> Line | None:
    """Fit a line to messages of one number of ranks; None if there are fewer than two sizes."""
    if len({point.bytes for point in points}) < 2:
        return None
    return best_of([fit_blend(points, blend) for blend in BLENDS])


def wire_bits_per_second(payload_bytes_per_second: float) -> float:
    """Bits per second on a link, headers included, for this payload over TCP."""
    return 8 * payload_bytes_per_second * FRAME_BYTES / FRAME_PAYLOAD_BYTES


def fit_blend(points: Sequence[MessageTime], blend: int) -> Line:
    """The line with the least sum of |log(fitted / measured)|: all sizes have equal weight, and outliers little.

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
    """The residual of fitted times."""
    off = np.abs(fitted / seconds - 1)
    mean_log = float(np.abs(np.log(fitted / seconds)).mean())
    return Residual(float(np.sqrt(np.mean(off**2))), float(off.max()), mean_log, len(seconds))


class Fitted(Protocol):
    """A fit with its residual."""

    @property
    def residual(self) -> Residual: ...


_Fitted = TypeVar("_Fitted", bound=Fitted)


def best_of(candidates: Sequence[_Fitted]) -> _Fitted:
    """The first candidate, unless its residual is large and another is clearly better."""
    first, best = candidates[0], min(candidates, key=lambda each: each.residual.mean_log)
    is_better = best.residual.mean_log < _CLEARLY * first.residual.mean_log
    return best if is_better and first.residual.mean_log > _GOOD_ENOUGH else first


_LEAST_SHARE = 0.01  # of the largest value: the least scale of a relative residual


@dataclass(frozen=True)
class Form:
    """An algorithm of an operation: its number of message rounds, and the fraction of bytes on the busiest link."""

    name: str
    steps: Callable[[int], float]
    volume: Callable[[int], float]


def _depth(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


FORMS: Mapping[str, tuple[Form, ...]] = {
    "all_reduce": (
        Form("ring", lambda n: 2 * (n - 1), BUS_FACTORS["all_reduce"]),
        Form("tree", lambda n: 2 * _depth(n), BUS_FACTORS["all_reduce"]),
    ),
    "all_gather": (Form("ring", lambda n: n - 1, BUS_FACTORS["all_gather"]),),
    "broadcast": (Form("tree", _depth, _depth), Form("chain", lambda n: n - 1, lambda n: 1.0)),
}


@dataclass(frozen=True)
class Regime:
    """The model of ranks on one host, or of ranks on several."""

    operation: str
    across_hosts: bool
    form: str
    blend: int
    measured_ranks: tuple[int, ...]
    base_seconds: float
    step_seconds: float
    own_seconds_per_byte: float
    shared_seconds_per_byte: float
    residual: Residual

    def seconds(self, ranks: int, size: float) -> float:
        form = next(each for each in FORMS[self.operation] if each.name == self.form)
        slope = (self.own_seconds_per_byte + self.shared_seconds_per_byte * ranks) * form.volume(ranks)
        return blended(self.base_seconds + self.step_seconds * form.steps(ranks), slope * size, self.blend)


@dataclass(frozen=True)
class Model:
    """The time of an operation on any number of ranks, placed on hosts as in the measurement."""

    operation: str
    first_host_ranks: int
    regimes: tuple[Regime, ...]

    def __post_init__(self) -> None:
        forms = [form.name for form in FORMS.get(self.operation, ())]
        if not self.regimes or not all(each.operation == self.operation for each in self.regimes):
            raise ValueError(f"the model of {self.operation!r:.40} has no regimes, or those of another operation")
        if unknown := [each.form for each in self.regimes if each.form not in forms]:
            raise ValueError(f"the model of {self.operation!r:.40} has the form {unknown[0]!r:.40}")

    def seconds(self, ranks: int, size: float, across_hosts: bool | None = None) -> float:
        """The seconds of a call; hosts are filled one after the other, unless `across_hosts` is given."""
        return 0.0 if ranks == 1 else self.regime(ranks, across_hosts).seconds(ranks, size)

    def regime(self, ranks: int, across_hosts: bool | None = None) -> Regime:
        """The regime for a number of ranks: on one host or on several; the other one if only that was measured."""
        across = ranks > self.first_host_ranks if across_hosts is None else across_hosts
        return next((each for each in self.regimes if each.across_hosts == across), self.regimes[0])


def read_models(path: Path) -> dict[str, Model]:
    """The models by operation in a `collectives.json`; raises ValueError for another file."""
    models = [to_dataclass(each, Model) for each in list_in(read_json(path), "models")]
    return {model.operation: model for model in models}


def fit_model(
    operation: str, points: Sequence[MessageTime], first_host_ranks: int, pipelined: bool = False
) -> Model | None:
    """Fit the model of an operation over numbers of ranks; None if there are fewer than two sizes.

    NCCL pipelines broadcasts (`pipelined`): if one number of ranks cannot tell a chain from a tree, it is a chain.
    """
    forms = FORMS[operation][:: -1 if pipelined and operation == "broadcast" else 1]
    regimes = []
    for across in (False, True):
        chosen = [point for point in points if (point.ranks > first_host_ranks) == across]
        by_ranks = [[point for point in chosen if point.ranks == n] for n in sorted({point.ranks for point in chosen})]
        usable = [points for points in by_ranks if len({point.bytes for point in points}) > 1]
        if usable:
            lines = best_of([_fit_lines(usable, blend) for blend in BLENDS])
            regimes.append(best_of([_fit_regime(operation, form, lines, across) for form in forms]))
    return Model(operation, first_host_ranks, tuple(regimes)) if regimes else None


@dataclass(frozen=True)
class _LineFits:
    """Lines of one blend by number of ranks, and how well they fit together."""

    points: Sequence[MessageTime]
    lines: Mapping[int, Line]
    blend: int
    residual: Residual


def _fit_lines(by_ranks: Sequence[Sequence[MessageTime]], blend: int) -> _LineFits:
    lines = {points[0].ranks: fit_blend(points, blend) for points in by_ranks}
    points = [point for each in by_ranks for point in each]
    fitted = [lines[point.ranks].seconds(point.bytes) for point in points]
    return _LineFits(points, lines, blend, _compare(fitted, points))


def _fit_regime(operation: str, form: Form, lines: _LineFits, across: bool) -> Regime:
    """Fit the latencies of lines by message rounds, and their times per byte by volumes.

    One number of ranks cannot separate the base from the rounds, nor own from shared bandwidth: then there are only
    rounds and own bandwidth. Ranks on several hosts do not share links.
    """
    ranks = tuple(lines.lines)
    several = len(ranks) > 1
    steps = [[form.steps(n), 1.0][: 1 + several] for n in ranks]
    volumes = [[form.volume(n), n * form.volume(n)][: 1 + (several and not across)] for n in ranks]
    step, base, *_ = [*_solve(steps, [line.latency_seconds for line in lines.lines.values()]), 0.0]
    own, shared, *_ = [*_solve(volumes, [line.seconds_per_byte for line in lines.lines.values()]), 0.0]
    regime = Regime(operation, across, form.name, lines.blend, ranks, base, step, own, shared, UNKNOWN)
    fitted = [regime.seconds(point.ranks, point.bytes) for point in lines.points]
    return replace(regime, residual=_compare(fitted, lines.points))


def _compare(fitted: Sequence[float], points: Sequence[MessageTime]) -> Residual:
    return residual_of(np.array(fitted), np.array([point.seconds for point in points]))


def _solve(terms: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Non-negative weights of terms by least squares of relative residuals, over all subsets of terms."""
    scale = np.maximum(values, _LEAST_SHARE * max(*values, 1e-30))
    relative, target = np.array(terms) / scale[:, None], np.array(values) / scale
    count = relative.shape[1]
    best, least = np.zeros(count), float(target @ target)
    for choice in range(1, 2**count):
        columns = [column for column in range(count) if choice >> column & 1]
        found = np.linalg.lstsq(relative[:, columns], target, rcond=None)[0]
        rest = relative[:, columns] @ found - target
        if found.min() >= 0 and (left := float(rest @ rest)) < least:
            best, least = np.zeros(count), left
            best[columns] = found
    return best.tolist()
