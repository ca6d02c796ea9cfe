"""Speed, speed-up and efficiency by number of ranks, with bootstrap intervals and fitted laws of scaling."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tutti import units
from tutti.runs.step_parts import SHARES, StepPart
from tutti.study.definition import Definition, Mode
from tutti.study.outcome import PointOutcome, combined_shares

DRAWS = 1000
LEVEL = 0.95
_SEED = 20  # fixed, so that a report has the same intervals each time


@dataclass(frozen=True)
class Estimate:
    """A number and its confidence interval at LEVEL."""

    value: float
    low: float
    high: float

    def percent(self, digits: int = 0) -> str:
        """A share with its interval: `74% (70% to 78%)`."""
        return units.interval(lambda share: units.percent(share, digits), self.value, self.low, self.high)

    def times(self) -> str:
        """A ratio with its interval: `1.93 (1.90 to 1.97) times`."""
        return f"{units.interval(lambda ratio: f'{ratio:.2f}', self.value, self.low, self.high)} times"

    def is_above(self, other: "Estimate | float") -> bool:
        """Returns whether it is larger and the intervals do not overlap."""
        return self.low > (other.high if isinstance(other, Estimate) else other)

    def is_below(self, other: "Estimate | float") -> bool:
        """Returns whether it is smaller and the intervals do not overlap."""
        return self.high < (other.low if isinstance(other, Estimate) else other)


@dataclass(frozen=True)
class SerialFraction:
    """The serial fraction of the work by Amdahl's or Gustafson's law."""

    law: str
    fraction: Estimate
    residual: float  # root mean square of relative deviations


def median_of_runs(runs: Sequence[Sequence[float]]) -> float:
    """The median over runs of the median over their windows."""
    return float(np.median([np.median(windows) for windows in runs]))


def draw_medians(runs: Sequence[Sequence[float]], key: int, draws: int = DRAWS) -> np.ndarray:
    """Bootstrap distribution of `median_of_runs`: runs, and windows within them, are resampled with replacement."""
    generator = np.random.default_rng([_SEED, key])
    chosen = generator.integers(len(runs), size=(len(runs), draws))
    medians = np.empty(chosen.shape)
    for number, windows in enumerate(runs):
        places = chosen == number
        medians[places] = _redrawn_medians(np.sort(np.asarray(windows, float)), generator, int(places.sum()))
    return np.median(medians, axis=0)


def estimate(value: float, draws: np.ndarray) -> Estimate:
    """Returns a value with the central LEVEL of its bootstrap draws as interval."""
    edge = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(draws, [edge, 100 - edge])
    return Estimate(float(value), float(low), float(high))


def fit_amdahl(speeds: Mapping[int, float], draws: Mapping[int, np.ndarray]) -> SerialFraction | None:
    """Fits the time of a fixed amount of work = serial + parallel / ranks to samples/s by ranks."""
    return _fit_serial("Amdahl", speeds, draws, lambda n: 1 / n, lambda speed: 1 / speed)


def fit_gustafson(speeds: Mapping[int, float], draws: Mapping[int, np.ndarray]) -> SerialFraction | None:
    """Fits the work in a fixed time = serial + parallel * ranks to samples/s by ranks."""
    return _fit_serial("Gustafson", speeds, draws, lambda n: n, lambda speed: speed)


def _fit_serial(law, speeds, draws, of_ranks, of_speed) -> SerialFraction | None:
    ranks = sorted(speeds)
    if len(ranks) < 2:
        return None
    along = np.array([of_ranks(n) for n in ranks], float)
    serial, parallel, residual = _fit_line(along, np.array([[of_speed(speeds[n])] for n in ranks]))
    drawn = _fit_line(along, np.stack([of_speed(draws[n]) for n in ranks]))
    fraction = serial[0] / (serial[0] + parallel[0])
    return SerialFraction(law, estimate(fraction, drawn[0] / (drawn[0] + drawn[1])), float(residual[0]))


def _fit_line(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns intercept, slope and relative residual of each column of y, by least squares of relative deviations."""
    weights = 1 / np.maximum(np.abs(y), 1e-300) ** 2
    x = np.broadcast_to(x[:, None], y.shape)
    total = weights.sum(0)
    mean_x, mean_y = (weights * x).sum(0) / total, (weights * y).sum(0) / total
    slope = (weights * (x - mean_x) * (y - mean_y)).sum(0) / (weights * (x - mean_x) ** 2).sum(0)
    intercept = mean_y - slope * mean_x
    residual = np.sqrt(((intercept + slope * x - y) ** 2 * weights).mean(0))
    return intercept, slope, residual


def _redrawn_medians(ordered: np.ndarray, generator: np.random.Generator, draws: int) -> np.ndarray:
    """Returns medians of `draws` samples with replacement, each as large as `ordered`.

    A value drawn with replacement is `ordered[floor(n * u)]` for a uniform u, and the median of n uniform numbers has
    a beta distribution. So a median is drawn directly, without the other n - 1 values.
    """
    n = len(ordered)
    lower = (n + 1) // 2  # counted from 1
    low = generator.beta(lower, n + 1 - lower, draws)
    high = low if n % 2 else low + (1 - low) * generator.beta(1, n - lower, draws)
    places = [np.minimum((n * each).astype(int), n - 1) for each in (low, high)]
    return (ordered[places[0]] + ordered[places[1]]) / 2


@dataclass(frozen=True)
class ScalePoint:
    """The results on a number of ranks, from all finished repeats."""

    ranks: int
    global_batch: int | None
    per_rank_batch: int | None
    runs: int
    windows: int
    speed: Estimate  # samples/s of all ranks
    speedup: Estimate  # against the smallest number of ranks
    efficiency: Estimate  # speed-up divided by the ratio of ranks
    shares: Mapping[StepPart, float]  # by SHARES; empty if phases were not recorded
    share_estimates: Mapping[StepPart, Estimate]  # the same, as medians of windows
    step_seconds: float | None

    def seconds(self, part: StepPart) -> Estimate | None:
        """The time of a part of a step."""
        if self.step_seconds is None or part not in self.share_estimates:
            return None
        share = self.share_estimates[part]
        return Estimate(*(self.step_seconds * each for each in (share.value, share.low, share.high)))


@dataclass(frozen=True)
class Scaling:
    """The results of a scaling study."""

    mode: Mode | None
    points: tuple[ScalePoint, ...]  # by ranks
    serial: SerialFraction | None

    def at(self, ranks: int) -> ScalePoint | None:
        return next((point for point in self.points if point.ranks == ranks), None)


def measure_scaling(definition: Definition, outcomes: Sequence[PointOutcome]) -> Scaling | None:
    """Computes speed-up and efficiency of all numbers of ranks with a finished run; None without any."""
    runs: dict[int, list[PointOutcome]] = {}
    for outcome in outcomes:
        if outcome.is_finished and outcome.windows:
            runs.setdefault(outcome.point.ranks, []).append(outcome)
    if not runs:
        return None
    speeds, draws = _medians(runs)
    base = min(runs)
    points = [_point(runs[n], n / base, (speeds[n], speeds[base]), (draws[n], draws[base])) for n in sorted(runs)]
    fit = fit_amdahl if definition.mode == "strong" else fit_gustafson
    return Scaling(definition.mode, tuple(points), fit(speeds, draws))


def _point(
    runs: Sequence[PointOutcome], more: float, speeds: tuple[float, float], draws: tuple[np.ndarray, np.ndarray]
) -> ScalePoint:
    """Returns the results on a number of ranks that is `more` times the smallest, from the speeds of both."""
    first = runs[0]
    batch = first.plan.get("global_batch")
    speedup, drawn = speeds[0] / speeds[1], draws[0] / draws[1]
    return ScalePoint(
        ranks=first.point.ranks,
        global_batch=batch,
        per_rank_batch=first.plan.get("per_rank_batch"),
        runs=len(runs),
        windows=sum(len(run.windows) for run in runs),
        speed=estimate(speeds[0], draws[0]),
        speedup=estimate(speedup, drawn),
        efficiency=estimate(speedup / more, drawn / more),
        shares=combined_shares(window for run in runs for window in run.windows),
        share_estimates=_share_estimates(runs),
        step_seconds=batch / speeds[0] if batch else None,
    )


def _share_estimates(runs: Sequence[PointOutcome]) -> dict[StepPart, Estimate]:
    known = [[window.shares for window in run.windows if window.shares] for run in runs]
    known = [shares for shares in known if shares]
    values = {part: [[each[part] for each in shares] for shares in known] for part in SHARES} if known else {}
    return {part: estimate(median_of_runs(each), draw_medians(each, 0)) for part, each in values.items()}


def _medians(
    runs: Mapping[int, Sequence[PointOutcome]],
) -> tuple[dict[int, float], dict[int, np.ndarray]]:
    """Returns by ranks the median over runs of samples/s, and its bootstrap draws."""
    values = {n: [[window.samples_per_second for window in run.windows] for run in group] for n, group in runs.items()}
    return {n: median_of_runs(each) for n, each in values.items()}, {n: draw_medians(v, n) for n, v in values.items()}
