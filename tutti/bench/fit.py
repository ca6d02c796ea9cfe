"""Times of collectives as latency + bytes / bandwidth: a line for one number of ranks, and a model for any number.

The model of an operation is `base + step * steps(n) + (own + shared * n) * volume(n) * bytes`: `own` belongs to the link
of each rank, `shared` to what all ranks of a host share, its memory and cores. Steps and volume are those of a form:

    all_reduce   ring          2 (n-1) steps      volume 2 (n-1)/n
                 tree          2 log2(n) steps    volume 2 (n-1)/n
    all_gather   ring          n-1 steps          volume (n-1)/n
    broadcast    tree          log2(n) steps      volume log2(n)
                 crowded tree  log2(n) steps      volume d (d+1)/2 with d = log2(n): a rank serves its branches at once
                 chain         n-1 steps          volume 1

with log2 rounded up. The form that fits best is taken, the first where there is no difference to see.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

BUS_FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "all_gather": lambda n: (n - 1) / n,
}
# A frame of Ethernet with IPv4 and TCP timestamps at MTU 1500; its preamble, checksum and gap are not counted.
FRAME_BYTES, FRAME_PAYLOAD_BYTES = 1514, 1448
_ROUNDS = 200
_SHARPNESS = 8  # a message counts for what it is nearly all of
_LEAST_SHARE = 0.01  # keeps a latency or slope of zero from being final
_CLEARLY = 0.8  # another form is taken when its residual is this part of the first one's, or less


@dataclass(frozen=True)
class Point:
    """A message and the time of a call."""

    ranks: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Residual:
    """How far a fit is from what was measured, as parts of it: root mean square and worst."""

    rms: float
    worst: float
    points: int


@dataclass(frozen=True)
class Line:
    """t = latency + bytes / bandwidth, for one operation on one number of ranks."""

    latency_seconds: float
    seconds_per_byte: float
    residual: Residual

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth of very large messages; infinite where size makes no difference."""
        return 1 / self.seconds_per_byte if self.seconds_per_byte else math.inf

    def seconds(self, size: float) -> float:
        return self.latency_seconds + size * self.seconds_per_byte


def fit_line(points: Sequence[Point]) -> Line | None:
    """The line through messages of one number of ranks; None where there are fewer than two sizes.

    Real times are below the sum of latency and bytes / bandwidth where both are alike, so a plain least-squares line misses
    both ends. Here the latency is the weighted median of what bytes leave over, and a byte's time that of what latency
    leaves over; a message counts for each by its share of it, so that small ones give the latency and large ones the
    bandwidth, and an outlier neither.
    """
    if len({point.bytes for point in points}) < 2:
        return None
    sizes, seconds = np.array([[point.bytes, point.seconds] for point in sorted(points, key=lambda p: p.bytes)]).T
    latency, slope = seconds[0], seconds[-1] / sizes[-1]
    for _ in range(_ROUNDS):
        fixed = max(latency, _LEAST_SHARE * seconds.min())
        share = fixed / (fixed + sizes * max(slope, _LEAST_SHARE * seconds[-1] / sizes[-1]))
        latency = max(0.0, _weighted_median(seconds - sizes * slope, share**_SHARPNESS))
        slope = max(0.0, _weighted_median((seconds - latency) / sizes, (1 - share) ** _SHARPNESS))
    return Line(float(latency), float(slope), _residual(latency + sizes * slope, seconds))


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])


def _residual(fitted: np.ndarray, seconds: np.ndarray) -> Residual:
    off = np.abs(fitted / seconds - 1)
    return Residual(float(np.sqrt(np.mean(off**2))), float(off.max()), len(seconds))


def wire_bits_per_second(payload_bytes_per_second: float) -> float:
    """What a link carries, headers included, to move so much payload over TCP."""
    return 8 * payload_bytes_per_second * FRAME_BYTES / FRAME_PAYLOAD_BYTES


@dataclass(frozen=True)
class Form:
    """How an operation is made: rounds of messages, and the part of its bytes that the busiest link carries."""

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
    "broadcast": (
        Form("tree", _depth, _depth),
        Form("crowded tree", _depth, lambda n: _depth(n) * (_depth(n) + 1) / 2),
        Form("chain", lambda n: n - 1, lambda n: 1.0),
    ),
}


@dataclass(frozen=True)
class Regime:
    """The model of ranks on one host, or of ranks on several."""

    operation: str
    across_hosts: bool
    form: str
    measured_ranks: tuple[int, ...]
    base_seconds: float
    step_seconds: float
    own_seconds_per_byte: float
    shared_seconds_per_byte: float
    residual: Residual

    def seconds(self, ranks: int, size: float) -> float:
        form = next(each for each in FORMS[self.operation] if each.name == self.form)
        slope = self.own_seconds_per_byte + self.shared_seconds_per_byte * ranks
        return self.base_seconds + self.step_seconds * form.steps(ranks) + slope * form.volume(ranks) * size


@dataclass(frozen=True)
class Model:
    """The time of an operation on any number of ranks, placed on hosts as those that were measured."""

    operation: str
    first_host_ranks: int
    regimes: tuple[Regime, ...]

    def seconds(self, ranks: int, size: float, across_hosts: bool | None = None) -> float:
        """The seconds of a call; hosts are filled in turn, unless it is said whether ranks are on several."""
        if ranks == 1:
            return 0.0
        across = ranks > self.first_host_ranks if across_hosts is None else across_hosts
        known = [regime for regime in self.regimes if regime.across_hosts == across]
        return (known or self.regimes)[0].seconds(ranks, size)

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Model":
        regimes = [
            Regime(**each | {"residual": Residual(**each["residual"]), "measured_ranks": tuple(each["measured_ranks"])})
            for each in plain["regimes"]
        ]
        return cls(plain["operation"], plain["first_host_ranks"], tuple(regimes))


def read_models(path: Path) -> dict[str, Model]:
    """The models by operation in a `collectives.json`."""
    return {each["operation"]: Model.from_plain(each) for each in json.loads(path.read_text())["models"]}


def fit_model(operation: str, points: Sequence[Point], first_host_ranks: int, pipelined: bool = False) -> Model | None:
    """The model of an operation over numbers of ranks; None where there are fewer than two sizes.

    What pipelines its broadcasts (NCCL) makes a chain where one number of ranks cannot tell it from a tree.
    """
    forms = FORMS[operation][:: -1 if pipelined and operation == "broadcast" else 1]
    regimes = []
    for across in (False, True):
        chosen = [point for point in points if (point.ranks > first_host_ranks) == across]
        found = [_fit_form(operation, form, chosen, across) for form in forms]
        if candidates := [regime for regime in found if regime]:
            regimes.append(_best(candidates))
    return Model(operation, first_host_ranks, tuple(regimes)) if regimes else None


def _best(regimes: Sequence[Regime]) -> Regime:
    best = min(regimes, key=lambda regime: regime.residual.rms)
    return best if best.residual.rms < _CLEARLY * regimes[0].residual.rms else regimes[0]


def _fit_form(operation: str, form: Form, points: Sequence[Point], across: bool) -> Regime | None:
    """Latencies of the lines as steps, and their times of a byte as volumes; None where no number of ranks has a line.

    One number of ranks cannot tell the base from steps, nor own from shared: then all is steps and own. Ranks on several
    hosts have links of their own.
    """
    found = {n: fit_line([point for point in points if point.ranks == n]) for n in sorted({p.ranks for p in points})}
    lines = {n: line for n, line in found.items() if line}
    if not lines:
        return None
    several = len(lines) > 1
    steps = [[form.steps(n), 1.0][: 1 + several] for n in lines]
    volumes = [[form.volume(n), n * form.volume(n)][: 1 + (several and not across)] for n in lines]
    step, base, *_ = [*_solve(steps, [line.latency_seconds for line in lines.values()]), 0.0]
    own, shared, *_ = [*_solve(volumes, [line.seconds_per_byte for line in lines.values()]), 0.0]
    regime = Regime(operation, across, form.name, tuple(lines), base, step, own, shared, Residual(0.0, 0.0, 0))
    fitted = np.array([regime.seconds(point.ranks, point.bytes) for point in points])
    return replace(regime, residual=_residual(fitted, np.array([point.seconds for point in points])))


def _solve(terms: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Weights of terms, none negative, by least squares of relative residuals.

    It is the best of all choices of terms, of which there are few.
    """
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
