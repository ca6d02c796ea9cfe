"""The critical path of a step: its exposed parts, and what is hidden behind compute; computed without torch."""

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tutti.bench.results import Measurement
from tutti.runs.step_parts import COMPUTE, StepPart

_LEAST_TOLERANCE = 0.05  # of a step, between the sum of phases measured apart and the whole step


@dataclass(frozen=True)
class Figure:
    """A quantity over trials: its median, and the interquartile range as its spread."""

    trials: tuple[float, ...]

    @functools.cached_property
    def median(self) -> float:
        return statistics.median(self.trials) if self.trials else 0.0

    @functools.cached_property
    def quartiles(self) -> tuple[float, float]:
        if len(self.trials) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.trials, n=4, method="inclusive")
        return low, high

    @property
    def spread(self) -> float:
        return self.quartiles[1] - self.quartiles[0]

    @property
    def relative_spread(self) -> float:
        return self.spread / self.median if self.median else 0.0

    def map(self, change: Callable[[float], float]) -> "Figure":
        """A function applied to every trial."""
        return Figure(tuple(map(change, self.trials)))

    def __add__(self, other: "Figure") -> "Figure":
        return Figure(tuple(a + b for a, b in zip(self.trials, other.trials, strict=True)))

    def __sub__(self, other: "Figure") -> "Figure":
        return self + other.map(lambda value: -value)


@dataclass(frozen=True)
class SumCheck:
    """Whether compute alone and the other exposed parts of a step add up to the step."""

    expected: Figure
    whole: Figure

    @property
    def difference(self) -> float:
        """The difference between the sum and the step, as a share of the step."""
        return (self.expected - self.whole).median / self.whole.median if self.whole.median else 0.0

    @property
    def tolerance(self) -> float:
        """The spread of the trials as a share of a step, but not less than a twentieth."""
        return max(_LEAST_TOLERANCE, self.expected.relative_spread + self.whole.relative_spread)

    @property
    def adds_up(self) -> bool:
        return abs(self.difference) <= self.tolerance


@dataclass(frozen=True)
class Shares:
    """Seconds per step on the critical path, by part."""

    whole: Figure
    path: Mapping[StepPart, Figure]  # by SHARES
    own: tuple[Figure, ...]  # by rank: data loading and compute, which involve no other rank
    alone: Mapping[str, Figure]  # the phases measured one by one
    slowest: int  # the rank with the longest own time
    slowest_in: tuple[int, ...]  # the same in every trial
    samples_per_second: Figure  # of all ranks
    samples_per_second_by_rank: tuple[Figure, ...]

    def share(self, name: StepPart) -> float:
        """A part of a step, from 0 to 1."""
        return self.path[name].median / self.whole.median if self.whole.median else 0.0

    def hidden(self, name: StepPart) -> float | None:
        """Seconds of data loading or communication that compute hides; None if it was not measured alone."""
        alone = self.alone.get({StepPart.DATA: "read", StepPart.COMMUNICATION: "exchange"}[name])
        return max(0.0, (alone - self.path[name]).median) if alone else None

    @property
    def slowdown(self) -> float | None:
        """How much longer compute takes in a step than alone, as a share of the time alone."""
        alone = self.alone.get("compute")
        return self.path[StepPart.COMPUTE].median / alone.median - 1 if alone and alone.median else None

    @property
    def sum_check(self) -> SumCheck | None:
        if "compute" not in self.alone:
            return None
        others = self.path[StepPart.DATA] + self.path[StepPart.COMMUNICATION] + self.path[StepPart.STRAGGLER]
        return SumCheck(self.alone["compute"] + others, self.whole)


@dataclass(frozen=True)
class StageTimes:
    """Seconds per step by stage: what it computes, and how long it waits for other stages."""

    layers: tuple[str, ...]
    compute: tuple[Figure, ...]  # forward and backward
    idle: tuple[Figure, ...]  # with the time in which activations and gradients are sent
    whole: Figure
    ideal_bubble: float  # the share of a step in which stages of equal speed wait

    @property
    def slowest(self) -> int:
        return max(range(len(self.layers)), key=lambda stage: self.compute[stage].median)

    @property
    def imbalance(self) -> float:
        """The time of the slowest stage over the mean of all."""
        mean = statistics.fmean(each.median for each in self.compute)
        return self.compute[self.slowest].median / mean if mean else 1.0

    @property
    def bubble(self) -> float:
        """The share of a step in which a stage waits, on average over stages."""
        waits = statistics.fmean(each.median for each in self.idle)
        return waits / self.whole.median if self.whole.median else 0.0

    def content(self) -> dict[str, Any]:
        """The stages as they are written to `bench.json`."""
        rows = zip(self.layers, self.compute, self.idle, strict=True)
        stages = [{"layers": a, "compute_seconds": b.median, "idle_seconds": c.median} for a, b, c in rows]
        return {"stages": stages, "bubble": self.bubble, "ideal_bubble": self.ideal_bubble}


_INTERLEAVED = ("interleaved", "zero_bubble")  # schedules with two parts of the model on each rank


def find_stages(measurement: Measurement) -> StageTimes | None:
    """The times of the stages of a model; None if it is not in stages."""
    count = len(measurement.stages)
    if not count:
        return None

    def by_stage(*parts: StepPart) -> tuple[Figure, ...]:
        tables = [measurement.parts[each.key] for each in parts]
        sums = [[sum(trial) for trial in zip(*rows, strict=True)] for rows in zip(*tables, strict=True)]
        return tuple(over_ranks(sums[stage::count], statistics.median) for stage in range(count))

    schedule = (measurement.settings.get("parallel") or {}).get("schedule")
    chunks = measurement.passes * (2 if schedule in _INTERLEAVED else 1)
    return StageTimes(
        layers=measurement.stages,
        compute=by_stage(StepPart.FORWARD, StepPart.BACKWARD),
        idle=by_stage(StepPart.COMMUNICATION),
        whole=over_ranks(measurement.seconds["whole"], statistics.median),
        ideal_bubble=(count - 1) / (chunks + count - 1),
    )


@dataclass(frozen=True)
class Fractions:
    """The fraction of the compute time that the work would take at the measured peaks; None if unknown."""

    flops: float | None
    bytes: float | None


def find_shares(measurement: Measurement) -> Shares:
    """The parts of a step in every trial; parts that were not measured count as 0."""
    seconds = measurement.seconds
    ranks = len(seconds.get("whole", ()))
    trials = len(seconds["whole"][0]) if ranks else 0

    def part(*parts: StepPart) -> list[list[float]]:
        tables = [measurement.parts[each.key] for each in parts if each.key in measurement.parts]
        return [[sum(table[rank][trial] for table in tables) for trial in range(trials)] for rank in range(ranks)]

    whole = over_ranks(seconds.get("whole", ()), statistics.median)
    own = part(StepPart.DATA, *COMPUTE)
    path = {
        StepPart.DATA: over_ranks(part(StepPart.DATA), statistics.median_low),
        StepPart.COMPUTE: over_ranks(part(*COMPUTE), statistics.median_low),
        # The last rank to arrive does not wait: its time is the time of the communication itself.
        StepPart.COMMUNICATION: over_ranks(part(StepPart.COMMUNICATION), min),
        StepPart.STRAGGLER: over_ranks(own, lambda times: max(times) - statistics.median_low(times)),
    }
    path[StepPart.OTHER] = functools.reduce(Figure.__sub__, path.values(), whole)
    figures = [Figure(tuple(times)) for times in own]
    speeds = [Figure(tuple(times)).map(_rate(measurement.per_rank_batch)) for times in seconds.get("whole", ())]
    return Shares(
        whole=whole,
        path=path,
        own=tuple(figures),
        alone={name: over_ranks(seconds[name], _across(name)) for name in seconds if name != "whole"},
        slowest=max(range(ranks), key=lambda rank: figures[rank].median, default=0),
        slowest_in=tuple(max(range(ranks), key=lambda rank: own[rank][trial]) for trial in range(trials)),
        samples_per_second=whole.map(_rate(measurement.global_batch)),
        samples_per_second_by_rank=tuple(speeds),
    )


def find_fractions(measurement: Measurement, shares: Shares) -> Fractions:
    """The fraction of the measured peaks at which a rank computes."""
    flops, moved = device_seconds(measurement)
    computing = shares.path[StepPart.COMPUTE].median
    if not computing:
        return Fractions(None, None)
    return Fractions(flops and flops / computing, moved and moved / computing)


def device_seconds(measurement: Measurement, fused: bool | None = None) -> tuple[float | None, float | None]:
    """Seconds that a step's operations, and its bytes, take at the measured peaks of a rank."""
    work, ceilings = measurement.work, measurement.ceilings
    if work is None or not ceilings:
        return None, None
    flops = statistics.median_low([each.flops_per_second for each in ceilings])
    transfer = statistics.median_low([each.bytes_per_second for each in ceilings])
    moved = work.least_bytes if (compiles(measurement) if fused is None else fused) else work.bytes_moved
    return work.flops / flops if flops else None, moved / transfer if transfer else None


def fixed_share(shares: Shares) -> float | None:
    """The share of the compute time that does not depend on the size of the batch."""
    alone, double = shares.alone.get("compute"), shares.alone.get("double")
    if not alone or not double or not alone.median:
        return None
    return min(1.0, max(0.0, 2 - double.median / alone.median))


def host_share(measurement: Measurement, shares: Shares) -> float:
    """The share of the compute time that is overhead of the host, as far as it is known."""
    idle = measurement.work.host_share if measurement.work else None
    return min(1.0, max(idle or 0.0, fixed_share(shares) or 0.0))


def compiles(measurement: Measurement) -> bool:
    """Returns whether the step is compiled, so that operators are fused and move fewer bytes."""
    return is_on(measurement, measurement.settings.get("speed", {}).get("compile", False))


def is_on(measurement: Measurement, switch: object) -> bool:
    """Returns whether a switch of the recipe is on for the device."""
    return measurement.device == "cuda" if switch == "gpu" else bool(switch)


def over_ranks(times: Sequence[Sequence[float]], combine: Callable[[Sequence[float]], float]) -> Figure:
    """Combine the times of all ranks into one for each trial."""
    return Figure(tuple(combine(trial) for trial in zip(*times, strict=True)))


def _across(phase: str) -> Callable[[Sequence[float]], float]:
    return {"exchange": min, "communicate": statistics.median}.get(phase, statistics.median_low)


def _rate(samples: int) -> Callable[[float], float]:
    return lambda seconds: samples / seconds if seconds else 0.0
