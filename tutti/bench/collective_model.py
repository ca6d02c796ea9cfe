"""The time of a collective on any number of ranks, from lines that were fitted to some; readable without torch.

The latency on n ranks is `base + step * steps(n)` and the time of a byte `(own + shared * n) * volume(n)`: `own`
belongs to the link of each rank, `shared` to what all ranks of a host share, its memory and cores. Both are blended as
in a line (`tutti.bench.fit`). Steps and volume are those of a form, with log2 rounded up:

    all_reduce   ring    2 (n-1) steps      volume 2 (n-1)/n
                 tree    2 log2(n) steps    volume 2 (n-1)/n
    all_gather   ring    n-1 steps          volume (n-1)/n
    broadcast    tree    log2(n) steps      volume log2(n)
                 chain   n-1 steps          volume 1
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tutti.bench.fit import (
    BLENDS,
    BUS_FACTORS,
    UNKNOWN,
    Line,
    Point,
    Residual,
    best_of,
    blended,
    fit_blend,
    residual_of,
)
from tutti.records.json_files import list_in, read_json, to_dataclass

_LEAST_SHARE = 0.01  # of the largest value, to which a smaller one is held


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
    """The time of an operation on any number of ranks, placed on hosts as those that were measured."""

    operation: str
    first_host_ranks: int
    regimes: tuple[Regime, ...]

    def seconds(self, ranks: int, size: float, across_hosts: bool | None = None) -> float:
        """The seconds of a call; hosts are filled in turn, unless it is said whether ranks are on several."""
        return 0.0 if ranks == 1 else self.regime(ranks, across_hosts).seconds(ranks, size)

    def regime(self, ranks: int, across_hosts: bool | None = None) -> Regime:
        """What so many ranks are predicted from: those on as many hosts, or what there is."""
        across = ranks > self.first_host_ranks if across_hosts is None else across_hosts
        return next((each for each in self.regimes if each.across_hosts == across), self.regimes[0])

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Model":
        """The model in plain values; a ValueError where they are none."""
        made = to_dataclass(plain, cls)
        forms = [form.name for form in FORMS.get(made.operation, ())]
        if not made.regimes or not all(each.operation == made.operation for each in made.regimes):
            raise ValueError(f"the model of {made.operation!r:.40} has no regimes, or those of another operation")
        if unknown := [each.form for each in made.regimes if each.form not in forms]:
            raise ValueError(f"the model of {made.operation!r:.40} has the form {unknown[0]!r:.40}")
        return made


def read_models(path: Path) -> dict[str, Model]:
    """The models by operation in a `collectives.json`; a ValueError where it is none."""
    models = [Model.from_plain(each) for each in list_in(read_json(path), "models")]
    return {model.operation: model for model in models}


def fit_model(operation: str, points: Sequence[Point], first_host_ranks: int, pipelined: bool = False) -> Model | None:
    """The model of an operation over numbers of ranks; None where there are fewer than two sizes.

    What pipelines its broadcasts (NCCL) makes a chain where one number of ranks cannot tell it from a tree.
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
class _Lines:
    """Lines of one blend by number of ranks, and how well they fit together."""

    points: Sequence[Point]
    lines: Mapping[int, Line]
    blend: int
    residual: Residual


def _fit_lines(by_ranks: Sequence[Sequence[Point]], blend: int) -> _Lines:
    lines = {points[0].ranks: fit_blend(points, blend) for points in by_ranks}
    points = [point for each in by_ranks for point in each]
    fitted = [lines[point.ranks].seconds(point.bytes) for point in points]
    return _Lines(points, lines, blend, _compare(fitted, points))


def _fit_regime(operation: str, form: Form, lines: _Lines, across: bool) -> Regime:
    """Latencies of the lines as steps, and their times of a byte as volumes.

    One number of ranks cannot tell the base from steps, nor own from shared: then all is steps and own. Ranks on
    several hosts have links of their own.
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


def _compare(fitted: Sequence[float], points: Sequence[Point]) -> Residual:
    return residual_of(np.array(fitted), np.array([point.seconds for point in points]))


def _solve(terms: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Weights of terms, none negative, by least squares of relative residuals: the best of all choices of terms."""
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
