"""How many epochs a target takes at a global batch: `E(B) = E0 (1 + B / B_noise)`, with what a sweep leaves open of it.

The law says that a step with a small batch is limited by the noise of its gradient, and one with a large batch is not:
`B_noise` is the global batch at which a target takes twice the epochs of small batches, and twice the fewest steps. It
is fitted in log space on a grid, with noise that has the tails of Student's t, and given as draws from the posterior.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tutti.forecast.laws import Array, axis_weights, log_normal_density
from tutti.forecast.population import Normal

DRAWS = 4000
DEGREES = 4.0  # of Student's t
# Published critical batches lie between a hundred (small networks) and a hundred thousand samples (ImageNet).
PUBLISHED = Normal(math.log(8000), 1.7)
# Where several batches were measured they speak for themselves; only that the smallest of them is far above the
# critical batch is unlikely, since nobody starts with a batch that wastes most of its samples.
MEASURED = Normal(math.log(8000), 3.0)
_LEAST_CRITICAL = 0.5  # of the smallest batch
FACTOR_OF_TWO = math.log(2)  # deviation of the log of the critical batch from that of a measured noise scale
SCATTER = Normal(math.log(0.05), 0.5)  # of the log of the deviation of one run
DISCREPANCY = 0.03  # deviation of log epochs for each doubling of the batch beyond the measured ones
_QUANTISED = 1 / math.sqrt(12)  # deviation of a whole number of epochs
_NOISES = np.arange(math.log(4), math.log(4e7), 0.12)
_SCATTERS = np.log([0.01, 0.02, 0.035, 0.055, 0.085, 0.13, 0.2])
_AROUND = np.sinh(np.linspace(-3, 3, 41)) / math.sinh(3)  # fine around the middle
_REACH = 1.5


@dataclass(frozen=True)
class EpochsPoint:
    """The epochs to a target in one run, or in the median of several."""

    global_batch: float
    epochs: float
    runs: int = 1
    is_reached: bool = True  # else the target takes more epochs than these


@dataclass(frozen=True)
class NoiseBelief:
    """What is known about the critical batch without a sweep: a normal distribution of its log, above a bound."""

    normal: Normal = PUBLISHED
    low: float | None = None  # the critical batch is larger, up to a factor of about two
    source: str = "critical batches of published networks"

    def log_density(self, log_noise: Array) -> Array:
        """The log of the prior density at the log of a critical batch."""
        logs = log_normal_density(log_noise, self.normal.mean, self.normal.deviation)
        if self.low is not None:
            logs = logs - np.log1p(np.exp(-2 * (log_noise - math.log(self.low)) / FACTOR_OF_TWO))
        return logs


@dataclass(frozen=True)
class EpochsCurve:
    """Draws from the posterior of the law; the draw with one index has one law for all batches."""

    log_first: Array  # of the epochs at a small batch
    log_noise: Array  # of the critical batch
    scatter: Array  # how far a single run lies from the law, in log epochs
    smallest: float  # measured batch
    largest: float

    def draws(self, global_batch: float) -> Array:
        """The epochs that a run with a global batch needs."""
        beyond = max(math.log2(global_batch / self.largest), math.log2(self.smallest / global_batch), 0.0)
        return np.exp(self.log_law(global_batch) + self.scatter + DISCREPANCY * beyond * self._discrepancy)

    def log_law(self, global_batch: float) -> Array:
        """The log of the epochs at a global batch by the law."""
        return self.log_first + np.log1p(global_batch / np.exp(self.log_noise))

    def quantile(self, global_batch: float, probability: float) -> float:
        """The epochs that a run does not exceed with this probability."""
        return float(np.quantile(self.draws(global_batch), probability))

    def noise_quantile(self, probability: float) -> float:
        """The critical batch that is not exceeded with this probability."""
        return math.exp(float(np.quantile(self.log_noise, probability)))

    @cached_property
    def _discrepancy(self) -> Array:
        return np.random.default_rng(7).standard_normal(len(self.log_first))


def fit_epochs(points: Sequence[EpochsPoint], belief: NoiseBelief | None = None) -> EpochsCurve:
    """Fit epochs by global batch. One batch leaves its critical batch to the belief; `points` has a reached one."""
    reached = [each for each in points if each.is_reached]
    if not reached:
        raise ValueError("no point reached the target")
    belief = belief or _believe_batches([each.global_batch for each in points])
    law = np.log1p(np.array([each.global_batch for each in reached])[:, None] / np.exp(_NOISES))
    logs = np.log([each.epochs for each in reached])
    middle = np.median(logs[:, None] - law, axis=0)
    firsts = middle[:, None] + _REACH * _AROUND
    total = np.zeros((len(_NOISES), len(_AROUND), len(_SCATTERS)))
    for each in points:
        total += _log_likelihood(each, firsts)
    total += belief.log_density(_NOISES)[:, None, None]
    total += log_normal_density(_SCATTERS, SCATTER.mean, SCATTER.deviation) + np.log(axis_weights(_SCATTERS))
    total += np.log(axis_weights(_AROUND))[:, None]
    return _draw(np.exp(total - total.max()), firsts, reached)


def believe(value: float | None, low: float, high: float | None, is_biased: bool = False) -> NoiseBelief:
    """The critical batch that a measured noise scale implies, with its 90 % interval; None: larger than `low`.

    Noise scale and critical batch differ by a factor of about two, and by more where something biases the noise scale.
    """
    spread = FACTOR_OF_TWO * (1.5 if is_biased else 1.0)
    low = max(low, 1.0)  # sample
    if value is None:
        return NoiseBelief(low=low, source=f"a measured noise scale above {low:,.0f}")
    measured = math.log(max(high or 0.0, 2 * low if high is None else low) / low) / (2 * 1.645)
    normal = Normal(math.log(max(value, low)), math.hypot(spread, measured))
    return NoiseBelief(normal, source=f"a measured noise scale of {value:,.0f}")


def _believe_batches(batches: Sequence[float]) -> NoiseBelief:
    """What is believed about the critical batch before the epochs of these batches are looked at."""
    if len(set(batches)) == 1:
        return NoiseBelief()
    return NoiseBelief(MEASURED, _LEAST_CRITICAL * min(batches), "a sweep")


def _log_likelihood(point: EpochsPoint, firsts: Array) -> Array:
    """How well every cell describes a point; axes: critical batch, first epochs, scatter."""
    offsets = math.log(point.epochs) - (firsts + np.log1p(point.global_batch / np.exp(_NOISES))[:, None])
    scale = np.hypot(np.exp(_SCATTERS), _QUANTISED / point.epochs) / math.sqrt(point.runs)
    scaled = offsets[:, :, None] / scale
    if not point.is_reached:
        return np.log(np.maximum(1 - _t_below(scaled), 1e-12))
    return -np.log(scale) - (DEGREES + 1) / 2 * np.log1p(scaled**2 / DEGREES)


def _t_below(values: Array) -> Array:
    """The distribution function of Student's t with 4 degrees of freedom."""
    square = 1 + values**2 / 4
    return 0.5 + 0.375 * values / np.sqrt(square) * (1 - values**2 / (12 * square))


def _draw(weights: Array, firsts: Array, reached: Sequence[EpochsPoint]) -> EpochsCurve:
    """Draws in the order of the grid, spread evenly inside its cells."""
    generator = np.random.default_rng(20)
    sums = np.cumsum(weights.ravel())
    places = (np.arange(DRAWS) + generator.random(DRAWS)) / DRAWS * sums[-1]
    noise, first, scatter = np.unravel_index(np.searchsorted(sums, places), weights.shape)
    log_noise = _NOISES[noise] + (generator.random(DRAWS) - 0.5) * (_NOISES[1] - _NOISES[0])
    # The law at the batches that were measured must not move when the critical batch moves inside its cell.
    anchor = math.exp(float(np.mean([math.log(each.global_batch) for each in reached])))
    shift = np.log1p(anchor / np.exp(_NOISES[noise])) - np.log1p(anchor / np.exp(log_noise))
    inside = (generator.random(DRAWS) - 0.5) * _REACH * axis_weights(_AROUND)[first]
    order = generator.permutation(DRAWS)
    batches = [each.global_batch for each in reached]
    return EpochsCurve(
        (firsts[noise, first] + shift + inside)[order],
        log_noise[order],
        (np.exp(_SCATTERS[scatter]) * generator.standard_t(DEGREES, DRAWS))[order],
        min(batches),
        max(batches),
    )
