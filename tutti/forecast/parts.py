"""The step as the sum of its measured parts, where the link between nodes is known:

    step(n) = max(own(n) + exposed(n), reading(n))

`own` is compute, waiting for slow ranks and the rest; `exposed` is the part of the all-reduce over the known link that
the backward pass does not hide; `reading` is the time in which all ranks get their samples from one file server.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np

from tutti.forecast.curve import MeasuredRun, ScalingCurve
from tutti.forecast.laws import Array
from tutti.forecast.link import BACKWARD, KnownLink
from tutti.forecast.posterior import Predictive, log_t, smoothed

NOISE = 0.015  # of a measured step
DISCREPANCY = 0.02  # for each doubling beyond the measured nodes
READING_SHARE = 0.03  # of a step: from here on, reading is what limits it
_BUCKETS = np.array([1, 2, 3, 4, 6, 10, 20])  # sent one after the other while backward computes the next
_RATES = np.linspace(-2.5, 2.5, 21)  # deviations of the link's time
_FRICTIONS = np.array([0.0, 0.01, 0.02, 0.04])  # for each doubling beyond the measured nodes
_FRICTION_WEIGHTS = np.array([0.4, 0.3, 0.2, 0.1])
_LASTING = 0.6  # the probability that waiting is for one slow rank, and does not grow with the ranks
_LASTING_IF_STEADY = 0.97
_READERS = 9  # values of what is unknown about reading
_FIXED_SHARE = 0.1  # of compute, in strong mode with one measurement


def has_parts(curve: ScalingCurve) -> bool:
    """Whether several nodes were measured, with the parts of their steps."""
    runs = _full_runs(curve)
    return runs[-1].nodes > 1 and all(each.exposed_seconds is not None and each.per_rank_batch for each in runs)


@dataclass(frozen=True)
class PartsModel:
    """The parts of the measured steps, and the link that the exchange takes."""

    curve: ScalingCurve
    link: KnownLink

    def log_time(self, ranks: int) -> Predictive:
        """The distribution of the log of the step time on a number of ranks, in the units of the curve."""
        batch = self._last_batch * self.curve.batch_ratio(ranks) / self.curve.batch_ratio(self._last.ranks)
        doublings = max(math.log2(ranks / self._last.ranks), 0.0)
        busy = self._own(ranks, batch)[None, None, :] + self._exposed(ranks, batch)[:, :, None]
        friction = np.exp(_FRICTIONS * doublings)
        sigmas, readings = self._reading
        reading = batch * (readings + sigmas * ranks)
        steps = np.maximum(busy[..., None, None] * friction[:, None], reading)
        lasting = self._lasting
        weights = self._exchange_weights[:, :, None] * np.array([lasting, 1 - lasting])
        weights = weights[..., None, None] * _FRICTION_WEIGHTS[:, None] * np.full(len(sigmas), 1 / len(sigmas))
        unit = batch if self.curve.mode == "weak" else batch * ranks
        scale = math.hypot(NOISE, DISCREPANCY * doublings)
        return smoothed(np.log(steps / unit).ravel(), weights.ravel(), scale)

    @cached_property
    def reading_limits(self) -> bool:
        """Whether any measured step waited for its samples."""
        return any(_reading_share(each) > READING_SHARE for each in self._runs)

    @cached_property
    def _runs(self) -> tuple[MeasuredRun, ...]:
        return _full_runs(self.curve)

    @property
    def _last(self) -> MeasuredRun:
        return self._runs[-1]

    @property
    def _last_batch(self) -> float:
        assert self._last.per_rank_batch is not None
        return float(self._last.per_rank_batch)

    @property
    def _lasting(self) -> float:
        return _LASTING_IF_STEADY if any(each.waits_steadily for each in self._runs) else _LASTING

    def _own(self, ranks: int, batch: float) -> Array:
        """Compute, waiting and the rest: with waiting that stays, and with waiting that grows with the ranks."""
        last = _own_seconds(self._last)
        if self.curve.mode == "strong":
            fixed, slope = _line(self._runs)
            return np.full(2, fixed + slope * batch)
        added = max(last - _own_seconds(self._runs[0]), 0.0) if len(self._runs) > 1 else 0.0
        growth = _largest_of(ranks) / _largest_of(self._last.ranks)
        return np.array([last, last + added * (growth - 1)])

    def _exposed(self, ranks: int, batch: float) -> Array:
        """Exposed seconds by number of buckets and rate of the link."""
        return self._hidden(self.link.seconds(ranks), BACKWARD * float(self._own(ranks, batch)[0]))

    def _hidden(self, seconds: float, backward: float) -> Array:
        """What a queue of equal buckets leaves of an all-reduce: at least the last, which is ready at the end."""
        exchange = seconds * np.exp(_RATES * self.link.deviation)
        buckets = _BUCKETS[:, None]
        return np.maximum(exchange / buckets, exchange - backward * (buckets - 1) / buckets)

    @cached_property
    def _exchange_weights(self) -> Array:
        """The posterior of buckets and rate, from the exposed seconds that were measured."""
        logs = np.tile(-0.5 * _RATES**2, (len(_BUCKETS), 1))
        for each in self._runs:
            if each.nodes > 1 and each.exposed_seconds is not None:
                expected = self._hidden(self.link.seconds(each.ranks), BACKWARD * _own_seconds(each))
                logs = logs + log_t(expected - each.exposed_seconds, np.array(NOISE * _step_seconds(each)))
        weights = np.exp(logs - logs.max())
        return weights / weights.sum()

    @cached_property
    def _reading(self) -> tuple[Array, Array]:
        """Seconds for a sample of a rank that grow with the ranks, and that do not: what the measurements allow."""
        bound = [each for each in self._runs if _reading_share(each) > READING_SHARE]
        if not bound:
            return np.zeros(1), np.zeros(1)
        times = {each.ranks: _step_seconds(each) / float(each.per_rank_batch or 1) for each in self._runs}
        last = bound[-1].ranks
        if len(bound) > 1:
            slope = (times[last] - times[bound[0].ranks]) / (last - bound[0].ranks)
            low = high = min(max(slope, 0.0), times[last] / last)
        else:
            least = [(times[last] - each) / (last - ranks) for ranks, each in times.items() if ranks < last]
            high = times[last] / last
            low = min(max([0.0, *least]), high)
        sigmas = high - (high - low) * np.linspace(0, 1, _READERS) ** 2  # one rank alone rarely reads slowly
        return sigmas, times[last] - sigmas * last


def _full_runs(curve: ScalingCurve) -> tuple[MeasuredRun, ...]:
    """One run for each number of nodes, on as many ranks a node as the last has."""
    last = curve.measurements[-1]
    return tuple(each for each in curve.measurements if each.per_node == last.per_node)


def _step_seconds(run: MeasuredRun) -> float:
    return float(run.per_rank_batch or 0) * run.ranks / run.samples_per_second


def _reading_share(run: MeasuredRun) -> float:
    return (run.reading_seconds or 0.0) / _step_seconds(run)


def _own_seconds(run: MeasuredRun) -> float:
    return max(_step_seconds(run) - (run.exposed_seconds or 0.0) - (run.reading_seconds or 0.0), 1e-9)


def _line(runs: Sequence[MeasuredRun]) -> tuple[float, float]:
    """Compute of a step by its per-rank batch: what does not shrink with it, and seconds a sample."""
    batches = np.array([float(each.per_rank_batch or 0) for each in runs])
    times = np.array([_own_seconds(each) for each in runs])
    if len(runs) == 1:
        return _FIXED_SHARE * times[0], (1 - _FIXED_SHARE) * times[0] / batches[0]
    slope, fixed = np.polyfit(batches, times, 1)
    if fixed < 0:
        return 0.0, float((batches * times).sum() / (batches**2).sum())
    return float(fixed), float(max(slope, 0.0))


def _largest_of(ranks: int) -> float:
    """The expected largest of some normal values, in deviations, by Blom's formula."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0
