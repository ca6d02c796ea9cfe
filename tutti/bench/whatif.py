"""What a step would take if one of its parts were free, from the parts alone and how they overlap; without torch."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tutti import units
from tutti.bench.results import Measurement
from tutti.bench.shares import Figure, Shares, over_ranks
from tutti.runs.step_parts import SHARES, StepPart

_HIDDEN = 0.2  # of the time of data loading alone: from there it overlaps, whatever the recipe says
_OVERLAP = 0.1  # of a step: overlaps below are within what trials differ by
_LEAST_TOLERANCE = 0.05  # of a step, between the model and the measured step
_NOTHING = 0.05  # of a step: a gain below is none
_FIRST_BUCKET, _BUCKET = 1, 25  # torch's choice, in MiB


@dataclass(frozen=True)
class StepModel:
    """The parts of a step in one trial, in seconds; with all parts as they are, the model gives the measured step.

    A loader that works ahead and the rest of a step take the longer of the two. By how much a step takes longer than
    that is interference: two parts that use the same cores slow each other down until one of them is gone.
    """

    reads_ahead: bool
    reading: float  # alone where the loader works ahead, otherwise exposed
    compute: float
    exposed: float  # communication that delays the step
    hidden: float  # communication during the backward pass
    straggler: float
    other: float
    interference: float

    def seconds(self, factors: Mapping[StepPart, float] | None = None) -> float:
        """A step in which every part takes its time multiplied by a factor; 1 where none is given."""
        factor = dict.fromkeys(SHARES, 1.0) | dict(factors or {})
        reading, compute = (factor[each] for each in (StepPart.DATA, StepPart.COMPUTE))
        # A shorter backward pass hides less communication.
        communication = factor[StepPart.COMMUNICATION] * (self.exposed + self.hidden * max(0.0, 1 - compute))
        rest = compute * self.compute + communication + factor[StepPart.OTHER] * self.other
        if self.reads_ahead:
            own = max(reading * self.reading, rest) + reading * compute * self.interference
        else:
            own = reading * self.reading + rest
        return own + factor[StepPart.STRAGGLER] * self.straggler

    @property
    def rest(self) -> float:
        """What a step of the median rank takes besides data loading."""
        return self.compute + self.exposed + self.other

    @property
    def times(self) -> dict[StepPart, float]:
        """What each part takes, whether it delays the step or not."""
        return {
            StepPart.DATA: self.reading,
            StepPart.COMPUTE: self.compute,
            StepPart.COMMUNICATION: self.exposed + self.hidden,
            StepPart.STRAGGLER: self.straggler,
            StepPart.OTHER: self.other,
        }


@dataclass(frozen=True)
class WhatIf:
    """The models of all trials: what a step would take without a part, or with one that is faster."""

    whole: Figure
    models: tuple[StepModel, ...]

    @property
    def reads_ahead(self) -> bool:
        return any(model.reads_ahead for model in self.models)

    @property
    def overlaps(self) -> bool:
        """Whether parts of a step overlap, so that their shares of the step do not tell what limits it."""
        hidden = self.figure(lambda model: model.hidden).median
        return self.reads_ahead or hidden > _OVERLAP * self.whole.median

    def figure(self, value: Callable[[StepModel], float]) -> Figure:
        """A quantity of the models, by trial."""
        return Figure(tuple(map(value, self.models)))

    def seconds(self, part: StepPart, factor: float = 0.0) -> Figure:
        """A step in which a part takes its time multiplied by a factor: 0 if it is free."""
        return self.figure(lambda model: model.seconds({part: factor}))

    def gain(self, part: StepPart) -> Figure:
        """The seconds of a step that are saved if a part is free."""
        return self.whole - self.seconds(part)

    def gains_nothing(self, part: StepPart) -> bool:
        return self.gain(part).median < _NOTHING * self.whole.median

    @property
    def behind_compute(self) -> StepPart:
        """The part that would limit a step without compute."""
        reading = self.time(StepPart.DATA) if self.reads_ahead else 0.0
        return StepPart.DATA if reading >= self.time(StepPart.COMMUNICATION) else StepPart.COMMUNICATION

    @property
    def ranked(self) -> list[StepPart]:
        """The parts, that with the largest gain first; of equal ones that which takes longer."""
        return sorted(SHARES, key=lambda part: (-self.gain(part).median, -self.time(part)))

    @property
    def longest(self) -> list[StepPart]:
        """The parts by what they take, whether they delay the step or not."""
        return sorted(SHARES, key=lambda part: -self.time(part))

    def time(self, part: StepPart) -> float:
        return self.figure(lambda model: model.times[part]).median

    def content(self, names: Mapping[str, str]) -> dict[str, Any]:
        """The answers as they are written to `bench.json`, by the names that parts have there."""
        parts = {
            names[part]: {
                "seconds": self.time(part),
                "step_if_free": self.seconds(part).median,
                "step_if_twice_as_fast": self.seconds(part, 0.5).median,
            }
            for part in SHARES
        }
        interference = self.figure(lambda model: model.interference).median
        return {"reads_ahead": self.reads_ahead, "interference": interference, "parts": parts}


def find_what_if(measurement: Measurement, shares: Shares) -> WhatIf:
    """The model of a step in every trial."""
    ahead = reads_ahead(measurement, shares)
    window = _backward(measurement, shares) if bucket_count(measurement) > 1 else None
    late = excess_alone(measurement, shares)
    models = []
    for trial, whole in enumerate(shares.whole.trials):
        path = {part: figure.trials[trial] for part, figure in shares.path.items()}
        alone = {name: figure.trials[trial] for name, figure in shares.alone.items()}
        exposed, other = path[StepPart.COMMUNICATION], path[StepPart.OTHER]
        hidden = 0.0 if window is None else min(window.trials[trial], alone.get("exchange", 0.0) - exposed)
        if ahead:
            straggler = path[StepPart.STRAGGLER] if late is None else min(late, path[StepPart.STRAGGLER])
            models.append(_overlapping(whole, path | {StepPart.STRAGGLER: straggler}, alone, max(0.0, hidden)))
        else:
            reading, compute, waits = (path[p] for p in (StepPart.DATA, StepPart.COMPUTE, StepPart.STRAGGLER))
            models.append(StepModel(False, reading, compute, exposed, max(0.0, hidden), waits, other, 0.0))
    return WhatIf(shares.whole, tuple(models))


def _overlapping(whole: float, path: Mapping[StepPart, float], alone: Mapping[str, float], hidden: float) -> StepModel:
    """The model of a trial in which the loader works ahead.

    Compute on a batch in memory is what is left of a step if data loading is free: nothing waits, and no loader takes
    cores. What a step did not wait for remains in any case. Batches of ranks that read equally fast arrive at different
    times in a step: that the others wait then is data loading, and no straggler.
    """
    own = whole - path[StepPart.STRAGGLER]
    waited = max(0.0, own - path[StepPart.DATA])
    in_memory = alone.get("compute", waited) + path[StepPart.COMMUNICATION]
    rest = min(alone.get("communicate", in_memory), waited)
    reading = min(alone.get("read", path[StepPart.DATA]), own)
    exposed = min(path[StepPart.COMMUNICATION], rest)
    other = min(path[StepPart.OTHER], rest - exposed)
    interference = own - max(reading, rest)
    return StepModel(
        True, reading, rest - exposed - other, exposed, hidden, path[StepPart.STRAGGLER], other, interference
    )


def reads_ahead(measurement: Measurement, shares: Shares) -> bool:
    """Returns whether the loader makes batches during the step: by the recipe, or because waiting for them shows it."""
    if measurement.batches_are_samples:  # in the process of the rank they are not made ahead
        configured = bool((measurement.settings.get("data") or {}).get("workers"))
    else:
        configured = prefetch_depth(measurement) > 0
    alone = shares.alone.get("read")
    if configured or alone is None:
        return configured and alone is not None
    hidden = shares.hidden(StepPart.DATA) or 0.0
    return hidden > max(_HIDDEN * alone.median, _OVERLAP * shares.whole.median)


def excess_alone(measurement: Measurement, shares: Shares) -> float | None:
    """How much longer the straggler takes than the median rank for data loading and compute alone; None if unknown."""
    tables = [measurement.seconds[name] for name in ("read", "compute") if name in measurement.seconds]
    if "compute" not in measurement.seconds:
        return None
    alone = [sum(Figure(tuple(table[rank])).median for table in tables) for rank in range(len(shares.own))]
    return alone[shares.slowest] - statistics.median_low(alone)


def prefetch_depth(measurement: Measurement) -> int:
    """The batches that a thread makes ahead, as training chooses them where the recipe does not."""
    depth = (measurement.settings.get("data") or {}).get("prefetch")
    return depth if depth is not None else 2 if measurement.device == "cuda" else 0


def _backward(measurement: Measurement, shares: Shares) -> Figure | None:
    """The backward pass, during which communication is hidden."""
    times = measurement.parts.get(StepPart.BACKWARD.key)
    return over_ranks(times, statistics.median_low) if times and "exchange" in shares.alone else None


def bucket_count(measurement: Measurement) -> int:
    """The number of buckets in which the gradients are averaged; the last of them is never hidden."""
    gradients_mb = measurement.gradient_bytes / (1 << 20)
    present = (measurement.settings.get("ddp") or {}).get("bucket_mb")
    if present is not None:
        return math.ceil(gradients_mb / present)
    return 1 + math.ceil((gradients_mb - _FIRST_BUCKET) / _BUCKET) if gradients_mb > _FIRST_BUCKET else 1


def describe_overlap(what_if: WhatIf, shares: Shares) -> Iterator[str]:
    """What a step would take without each part, and whether the model explains the measured step."""
    whole = what_if.whole.median
    if not what_if.overlaps or not whole:
        return
    worth = [part for part in what_if.longest if what_if.time(part) >= _NOTHING * whole]
    answers = ", ".join(f"{units.duration(what_if.seconds(part).median)} without {part}" for part in worth)
    yield f"a step would take {answers}"
    if not what_if.reads_ahead:
        return
    rest = what_if.figure(lambda model: model.rest)
    longer = what_if.figure(lambda model: model.straggler) + _longer(shares.alone["read"], rest)
    ratio = longer.median / whole
    tolerance = max(_LEAST_TOLERANCE, longer.relative_spread + shares.whole.relative_spread)
    reading = units.duration(shares.alone["read"].median)
    words = f"the longer of {reading} of data loading and {units.duration(rest.median)} of the rest"
    if abs(ratio - 1) <= tolerance:
        yield f"{words} explains {units.percent(ratio)} of a step (tolerance {units.percent(tolerance)})"
    elif ratio < 1:
        lost = units.duration(what_if.figure(lambda model: model.interference).median)
        yield f"{words} explains only {units.percent(ratio)} of a step: beside each other they take {lost} longer"
    else:
        yield f"{words} does NOT explain a step: it is {units.percent(ratio)} of it"


def _longer(first: Figure, second: Figure) -> Figure:
    return Figure(tuple(map(max, first.trials, second.trials)))
