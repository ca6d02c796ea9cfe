"""The gradient noise scale of a run: the batch at which the noise of the gradient is as large as the gradient."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from tutti import units
from tutti.config.plan import Plan
from tutti.runs.folder import RunFolder
from tutti.runs.journal import Journal
from tutti.runs.metrics import NOISE, Event, is_number, read_events

EVERY_STEPS = 10  # one step in so many is measured
LEAST_STEPS = 20  # measured ones, below which there is no interval
_FEWEST, _MOST = 200, 1000  # of the last measured steps that are averaged
_RESAMPLES = 2000
_INTERVAL = (0.05, 0.95)
_MOST_POINTS, _STEPS_OF_A_POINT = 40, 50  # of a curve


@dataclass(frozen=True)
class NoiseScale:
    """The noise scale in samples with its 90 % interval; `value` and `high` are None if only `low` is known."""

    value: float | None
    low: float
    high: float | None
    batch: int  # the global batch at which it was measured
    steps: int  # measured ones that it is averaged over
    biased: tuple[str, ...]  # what in the model biases it, as "batch norm"


def estimate(small_square: float, whole_square: float, small_batch: float, whole_batch: float) -> tuple[float, float]:
    """The squared norm of the true gradient and the trace of the covariance of one sample's gradient, without bias.

    `small_square` is the mean over the parts of a batch of the squared norm of their gradients, `whole_square` that of
    the whole batch. For parts of unequal sizes `small_batch` is their harmonic mean.
    """
    square = (whole_batch * whole_square - small_batch * small_square) / (whole_batch - small_batch)
    return square, (small_square - whole_square) / (1 / small_batch - 1 / whole_batch)


def read_noise_scale(folder: Path) -> NoiseScale | None:
    """The noise scale at the end of a run, from its folder; None if it was not measured, or in too few steps."""
    events = _read(folder)
    count = min(_MOST, max(_FEWEST, len(events) // 2))  # the last part: it grows while a run trains
    return _average(events[-count:])


def noise_curve(folder: Path, most_points: int = _MOST_POINTS) -> list[tuple[int, NoiseScale]]:
    """The noise scale over training: the last step of each part of a run, and the noise scale in that part."""
    events = _read(folder)
    points = min(most_points, max(len(events) // _STEPS_OF_A_POINT, len(events) >= LEAST_STEPS))
    cuts = [round(place * len(events) / points) for place in range(points + 1)] if points else []
    parts = [events[begin:end] for begin, end in pairwise(cuts)]
    return [(part[-1]["step"], found) for part in parts if (found := _average(part))]


def describe(scale: NoiseScale | None) -> str:
    """The noise scale in one line for people."""
    if scale is None:
        return (
            f"noise scale: too few steps are measured; one in {EVERY_STEPS} is, and {LEAST_STEPS} are needed. "
            f"Train {EVERY_STEPS * LEAST_STEPS} steps or more."
        )
    where = f"at batch {scale.batch:,}, over {scale.steps:,} measured steps"
    if scale.value is None or scale.high is None:
        line = (
            f"noise scale larger than {units.number(scale.low)} samples {where}; the interval of the squared gradient "
            "contains 0: measure more steps, or at a larger batch"
        )
    else:
        value, low, high = map(units.number, (scale.value, scale.low, scale.high))
        line = f"noise scale {value} samples ({low} to {high}) {where}"
    return f"{line}; biased by {' and '.join(scale.biased)}" if scale.biased else line


class NoiseLog:
    """Writes the measured steps of a run as events; the squares are summed over ranks together with the loss."""

    def __init__(self, plan: Plan, folder: RunFolder, journal: Journal, biased: Sequence[str], is_first: bool) -> None:
        self._plan, self._journal = plan, journal
        self._small_batch = plan.per_rank_batch if plan.world_size > 1 else plan.micro_batch
        self._biased = {"biased": list(biased)} if biased else {}
        self._steps: list[int] = []
        earlier = _read(folder.path) if is_first else []  # of a run that is resumed
        self._past = deque((_pair(event) for event in earlier), maxlen=_FEWEST)

    def share(self, squares: Mapping[int, Sequence[float]]) -> list[float]:
        """This rank's share of the means over ranks, of the small batch and of the whole one, by step."""
        self._steps = list(squares)
        return [value / self._plan.world_size for pair in squares.values() for value in pair]

    def write(self, sums: list[float]) -> list[float]:
        """Write an event for each step of `share`, whose means end the sums over ranks; return what is before them.

        Steps whose gradient was not finite are left out.
        """
        first = len(sums) - 2 * len(self._steps)
        means = sums[first:]
        for step, small, whole in zip(self._steps, means[::2], means[1::2], strict=True):
            square, variance = estimate(small, whole, self._small_batch, self._plan.global_batch)
            if not (math.isfinite(square) and math.isfinite(variance)):
                continue
            self._past.append((square, variance))
            squares, variances = (sum(values) for values in zip(*self._past, strict=True))
            known = {"noise_scale": max(0.0, variances / squares)} if squares > 0 else {}
            self._journal.write(
                NOISE,
                step=step,
                epoch=(step - 1) // self._plan.steps_per_epoch + 1,
                gradient_square=square,
                gradient_variance=variance,
                **known,
                batch=self._plan.global_batch,
                **self._biased,
            )
        return sums[:first]


def _pair(event: Event) -> tuple[float, float]:
    return event["gradient_square"], event["gradient_variance"]


def _read(folder: Path) -> list[Event]:
    events = (event for event in read_events(RunFolder(folder).metrics) if event.get("event") == NOISE)
    return [event for event in events if "step" in event and _is_whole(event)]


def _is_whole(event: Event) -> bool:
    values = [event.get(key) for key in ("gradient_square", "gradient_variance", "batch")]
    return all(is_number(value) and math.isfinite(value or 0) for value in values)


def _average(events: Sequence[Event]) -> NoiseScale | None:
    if len(events) < LEAST_STEPS:
        return None
    squares, variances = np.array([_pair(event) for event in events]).T
    batch = int(events[-1]["batch"])
    biased = tuple(map(str, events[-1].get("biased") or ()))
    value, low, high = ratio_interval(squares, variances)
    if value is None and not math.isfinite(low):
        low = float(batch)  # no resample has a gradient above the noise of the batch
    return NoiseScale(value, low, high, batch, len(events), biased)


def ratio_interval(squares: np.ndarray, variances: np.ndarray) -> tuple[float | None, float, float | None]:
    """The ratio of the sums and its 90 % interval by a bootstrap of blocks of consecutive steps.

    Without a value and an upper end if the interval of the squared gradient contains 0.
    """
    count = len(squares)
    length = math.ceil(count ** (1 / 3))
    starts = np.random.default_rng(0).integers(count, size=(_RESAMPLES, -(-count // length)))
    square, variance = (_block_sums(values, length)[starts].sum(axis=1) for values in (squares, variances))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(square > 0, np.maximum(variance, 0) / square, np.inf)
    low, high = (float(end) for end in np.quantile(ratios, _INTERVAL, method="inverted_cdf"))
    if np.quantile(square, _INTERVAL[0]) <= 0 or squares.sum() <= 0:
        return None, low, None
    return float(max(0.0, variances.sum()) / squares.sum()), low, high


def _block_sums(values: np.ndarray, length: int) -> np.ndarray:
    """The sum of the block that begins at each place, the last ones continued at the first value."""
    sums = np.concatenate([[0.0], np.cumsum(np.concatenate([values, values[: length - 1]]))])
    return sums[length:] - sums[:-length]
