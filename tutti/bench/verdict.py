"""What limits the throughput of a recipe: one sentence with a suggestion, and the numbers behind it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tutti import units
from tutti.bench.results import Measurement
from tutti.bench.shares import (
    Figure,
    Shares,
    StageTimes,
    device_seconds,
    find_fractions,
    find_shares,
    find_stages,
    fixed_share,
    host_share,
)
from tutti.bench.suggestions import Suggestion, name_part, suggest
from tutti.bench.whatif import WhatIf, describe_overlap, excess_alone, find_what_if
from tutti.runs.step_parts import SHARES, StepPart

_NOTABLE = 0.05  # of a step


def describe_step(measurement: Measurement, shares: Shares) -> Iterator[str]:
    """The measured numbers of a step as sentences, the most important first."""
    if not shares.whole.median:
        return
    trials = len(shares.whole.trials)
    parts = ", ".join(f"{name} {units.percent(shares.share(name))}" for name in shares.path)
    spread = f"spread {units.percent(shares.whole.relative_spread)} over {units.count(trials, 'trial')}"
    yield f"a step takes {units.duration(shares.whole.median)} ({spread}): {parts}"
    yield from _describe_hidden(shares)
    yield from describe_overlap(find_what_if(measurement, shares), shares)
    if stages := find_stages(measurement):
        yield from _describe_stages(stages)
    else:
        yield from _describe_straggler(measurement, shares)
    yield from _describe_compute(measurement, shares)
    if check := shares.sum_check:
        verb = "add up to" if check.adds_up else "do NOT add up: they are"
        found, tolerance = units.percent(1 + check.difference), units.percent(check.tolerance)
        yield f"phases measured apart {verb} {found} of a step (tolerance {tolerance})"


def _describe_hidden(shares: Shares) -> Iterator[str]:
    for name, phase, words in (
        (StepPart.DATA, "read", "loading a batch"),
        (StepPart.COMMUNICATION, "exchange", "averaging the gradients"),
    ):
        hidden = shares.hidden(name)
        if hidden is not None:
            alone, exposed = shares.alone[phase].median, shares.path[name].median
            yield (
                f"{words} takes {units.duration(alone)} alone; "
                f"{units.duration(exposed)} are exposed in a step, {units.duration(hidden)} are hidden"
            )


def _describe_straggler(measurement: Measurement, shares: Shares) -> Iterator[str]:
    if shares.share(StepPart.STRAGGLER) < _NOTABLE:
        return
    yield f"{name_slowest(measurement, shares)} is the straggler: {'; '.join(_compare_ranks(measurement, shares))}"


def _describe_stages(stages: StageTimes) -> Iterator[str]:
    for stage, (layers, compute, idle) in enumerate(zip(stages.layers, stages.compute, stages.idle, strict=True)):
        waits = f"waits {units.duration(idle.median)} for other stages"
        yield f"stage {stage} ({layers}) computes {units.duration(compute.median)} of a step, and {waits}"
    found, ideal = units.percent(stages.bubble), units.percent(stages.ideal_bubble)
    yield f"the bubble, in which a stage waits, is {found} of a step; with stages of equal speed it would be {ideal}"


def _compare_ranks(measurement: Measurement, shares: Shares) -> Iterator[str]:
    """How much longer the slowest rank takes in a step, and for compute and data loading alone."""
    typical = sorted(figure.median for figure in shares.own)[(len(shares.own) - 1) // 2]
    if typical:
        yield f"{shares.own[shares.slowest].median / typical:.2f} times the time of the others without waiting"
    for phase, words in (("compute", StepPart.COMPUTE), ("read", StepPart.DATA)):
        times = measurement.seconds.get(phase, ())
        if len(times) == len(shares.own) and shares.alone[phase].median:
            ratio = Figure(tuple(times[shares.slowest])).median / shares.alone[phase].median
            yield f"{ratio:.2f} times for {words} alone"


def _describe_compute(measurement: Measurement, shares: Shares) -> Iterator[str]:
    if shares.slowdown is not None:
        alone, beside = shares.alone["compute"].median, shares.path[StepPart.COMPUTE].median
        yield f"compute takes {units.duration(alone)} alone and {units.duration(beside)} in a step"
    fractions = find_fractions(measurement, shares)
    if fractions.flops is not None:
        yield f"arithmetic at the measured peak would take {units.percent(fractions.flops)} of the compute time"
    if fractions.bytes is not None:
        moved = units.percent(fractions.bytes)
        yield f"memory traffic at the measured bandwidth would take {moved} of the compute time"
    fixed, work = fixed_share(shares), measurement.work
    if fixed is not None:
        ratio = shares.alone["double"].median / shares.alone["compute"].median
        yield (
            f"a batch twice as large takes {ratio:.2f} times as long: {units.percent(fixed)} of the compute time does "
            "not depend on the batch"
        )
    if work and work.host_share is not None:
        idle = f"the device is idle for {units.percent(work.host_share)} of the compute time"
        yield f"{idle}, with {units.count(work.operators, 'operator')} a step"
    if work and work.synchronisations:
        lines = "; ".join(work.synchronises_at) or "line not known"
        yield f"the host synchronizes with the device {work.synchronisations} times a step: {lines}"


def name_slowest(measurement: Measurement, shares: Shares) -> str:
    """The rank with the longest own time, and its host."""
    if shares.slowest < len(measurement.hosts):
        return f"rank {shares.slowest} on {measurement.hosts[shares.slowest]}"
    return f"rank {shares.slowest}"


def explain_host(measurement: Measurement, shares: Shares) -> str:
    """Why the host limits a step, the strongest reason first."""
    work, fixed, rest = measurement.work, fixed_share(shares) or 0.0, shares.share(StepPart.OTHER)
    idle = (work.host_share if work else None) or 0.0
    if rest > shares.share(StepPart.COMPUTE):
        return f"{units.percent(rest)} of a step is outside of data loading, compute and communication"
    if idle >= fixed:
        reads = work.synchronisations if work else 0
        often = f"; the host synchronizes with it {reads} times a step" if reads else ""
        return f"the device is idle for {units.percent(idle)} of the compute time{often}"
    return f"{units.percent(fixed)} of the compute time does not depend on the batch, which is small"


Bound = Literal[
    "data loading",
    "compute",
    "communication",
    "straggler",
    "host",
    "memory",
    "balanced",
    "unclear",
    "load imbalance",  # of stages
    "bubble",
]
_STORED = {part.value: part.share_key for part in SHARES} | {StepPart.STRAGGLER.value: "slow rank"}  # in bench.json
_LEAD = 0.1  # of a step: parts that differ by less are balanced
_NOISE = 0.4  # of a step: no conclusion from trials that differ by more
_MOST_DIFFERING = 0.25  # of the trials may have another largest part, by more than the lead
_SLOW_ALONE = 0.3  # of the time that others wait for a straggler: what it takes longer alone, at least
_FIXED = 0.2  # of the compute time: less than that does not depend on the batch where operators are long
_LONG_OPERATOR = 2e-4  # seconds: a call takes a tenth of it
_HALF = 0.5
_MANY_SYNCHRONISATIONS = {"cuda": 1, "cpu": 10}  # each drains the queue of a GPU; on a CPU they are work of the host
_HIGH_HOST_SHARE = 0.3
# Of the compute time: memory traffic at the bandwidth of large copies, which other operators do not reach.
_MOVED = 0.4
_IMBALANCE = 1.2  # the slowest stage over the mean, from which it is what limits a step
_MOVED_ANYWAY = 0.2  # where most of a step does not depend on the batch: weights are what is moved


@dataclass(frozen=True)
class Verdict:
    """What limits a step, how much faster it could be at most, and what to try."""

    bound: Bound
    sentence: str
    measurements: tuple[str, ...]  # the measured numbers as sentences
    gain: float | None  # at most, as a factor of speed
    suggestions: tuple[Suggestion, ...]
    shares: Shares
    what_if: WhatIf
    stages: StageTimes | None = None

    def content(self) -> dict[str, Any]:
        """The verdict as it is written to `bench.json`."""
        return {
            "bound": _STORED.get(self.bound, self.bound),
            "sentence": self.sentence,
            "evidence": list(self.measurements),
            "gain": self.gain,
            "suggestions": [vars(each) for each in self.suggestions],
            "shares": {_STORED[name]: self.shares.share(name) for name in self.shares.path},
            "what_if": self.what_if.content(_STORED),
            **(self.stages.content() if self.stages else {}),
        }


def judge(measurement: Measurement) -> Verdict:
    """The verdict on a measurement."""
    shares = find_shares(measurement)
    what_if = find_what_if(measurement, shares)
    bound, doubt = _find_bound(measurement, shares, what_if)
    stages = find_stages(measurement)
    if stages and bound not in ("unclear", "data loading"):
        bound = _find_stage_bound(stages)
    refined: Bound = refine(measurement, shares) if bound == "compute" else bound
    suggestions = suggest(measurement, refined, shares)
    gain = _gain(measurement, shares, what_if, refined)
    sentence = "; ".join(_clauses(measurement, shares, what_if, refined, doubt, gain, suggestions))
    measurements = tuple(describe_step(measurement, shares))
    return Verdict(refined, sentence, measurements, gain, tuple(suggestions), shares, what_if, stages)


def _find_bound(measurement: Measurement, shares: Shares, what_if: WhatIf) -> tuple[Bound, str]:
    """The part whose removal gains most, if that is clearly so, and otherwise why that is not known."""
    whole = shares.whole
    if not whole.median:
        return "unclear", "no whole step was measured"
    if whole.relative_spread > _NOISE:
        spread = f"{units.percent(whole.relative_spread)} of the median"
        return "unclear", f"the interquartile range of {len(whole.trials)} trials is {spread}"
    parts = what_if.ranked
    first, second, *others = (what_if.gain(part) for part in parts)
    if _trials_differ(whole, first, [second, *others]):
        return "unclear", "the largest part of a step changes from trial to trial"
    lead = first - second
    if lead.median < _LEAD * whole.median:
        return "balanced", ""
    names = [name_part(part) for part in parts]
    if lead.median <= lead.spread:
        return "unclear", f"{names[0]} exceeds {names[1]} by less than the spread of the trials"
    if parts[0] is StepPart.STRAGGLER and not _always_the_same(shares):
        return "unclear", "the straggler changes from trial to trial"
    if parts[0] is StepPart.STRAGGLER and not _is_slow_alone(measurement, shares):
        return "unclear", f"rank {shares.slowest} is late in a step, but takes no longer than others alone"
    return names[0], ""  # pyright: ignore[reportReturnType]


def _find_stage_bound(stages: StageTimes) -> Bound:
    """What limits a step of stages: one that is slower than the others, waiting, or what all of them compute."""
    if stages.imbalance >= _IMBALANCE:
        return "load imbalance"
    if stages.bubble * stages.whole.median <= stages.compute[stages.slowest].median:
        return "compute"
    return "bubble" if stages.ideal_bubble >= _HALF * stages.bubble else "communication"


def _trials_differ(whole: Figure, first: Figure, others: Sequence[Figure]) -> bool:
    """Returns whether another part gains most in too many trials, by more than the lead of balanced parts."""
    least = _LEAD * whole.median
    found = [max(parts) - ours > least for ours, *parts in zip(first.trials, *(o.trials for o in others), strict=True)]
    return sum(found) > _MOST_DIFFERING * len(found)


def _always_the_same(shares: Shares) -> bool:
    return shares.slowest_in.count(shares.slowest) >= (1 - _MOST_DIFFERING) * len(shares.slowest_in)


def _is_slow_alone(measurement: Measurement, shares: Shares) -> bool:
    """Returns whether the straggler also takes longer alone; a rank that other processes delay for a while does not."""
    more = excess_alone(measurement, shares)
    return more is None or more >= _SLOW_ALONE * shares.path[StepPart.STRAGGLER].median


def refine(measurement: Measurement, shares: Shares) -> Bound:
    """What limits compute: the arithmetic of the device, its memory bandwidth, or the host that launches its work."""
    flops, moved = (seconds or 0.0 for seconds in device_seconds(measurement))
    work, fixed = measurement.work, fixed_share(shares) or 0.0
    idle = work.host_share if work else None
    least = _MOVED_ANYWAY if fixed >= _HALF else _MOVED
    if (idle or 0) < _HALF and moved > 2 * flops and moved >= least * shares.path[StepPart.COMPUTE].median:
        return "memory"
    many = work is not None and work.synchronisations >= _MANY_SYNCHRONISATIONS.get(measurement.device, 1)
    if (idle or 0) >= _HALF and (many or not _is_long_work(measurement, shares)):
        return "host"
    if fixed >= _HALF and (idle is None or idle >= _HIGH_HOST_SHARE):
        return "host"
    return "host" if many and (idle or 0) >= _HIGH_HOST_SHARE else "compute"


def _is_long_work(measurement: Measurement, shares: Shares) -> bool:
    """Returns whether operators are long, and grow with the batch: a device seems idle then on a busy machine alone."""
    fixed, operators = fixed_share(shares), measurement.work.operators if measurement.work else 0
    if fixed is None or not operators:
        return False
    return fixed < _FIXED and shares.alone["compute"].median / operators > _LONG_OPERATOR


def _gain(measurement: Measurement, shares: Shares, what_if: WhatIf, bound: Bound) -> float | None:
    """How many times as fast a step could be if what limits it took the least possible time."""
    if bound == "unclear":
        return None
    if (stages := find_stages(measurement)) and bound in ("load imbalance", "bubble", "communication"):
        waited = stages.bubble - (stages.ideal_bubble if bound == "communication" else 0)
        return stages.imbalance if bound == "load imbalance" else 1 / (1 - waited)
    if bound not in ("compute", "memory", "host"):
        won = what_if.gain(what_if.ranked[0]).median
    elif _is_limited(measurement, shares, what_if, bound):
        won = _most_of_compute(what_if, bound)
    elif (possible := _possible(measurement, shares, bound)) is not None:
        won = possible
    else:
        return None
    left = shares.whole.median - max(0.0, won)
    return shares.whole.median / left if left > 0 else None


def _possible(measurement: Measurement, shares: Shares, bound: Bound) -> float | None:
    """The seconds of compute that are not needed at the measured peaks, or without the host; None if unknown."""
    compute = shares.path[StepPart.COMPUTE].median
    if bound == "host":
        return max(0.0, shares.path[StepPart.OTHER].median) + compute * host_share(measurement, shares)
    flops, moved = device_seconds(measurement, fused=True)
    return None if flops is None or moved is None else compute - max(flops, moved)


def _is_limited(measurement: Measurement, shares: Shares, what_if: WhatIf, bound: Bound) -> bool:
    """Returns whether a part that compute hides would limit a step before compute has taken its least time."""
    if bound not in ("compute", "memory", "host") or not what_if.overlaps:
        return False
    possible, most = _possible(measurement, shares, bound), _most_of_compute(what_if, bound)
    if possible is None:  # without a measured peak: if a part of some size is hidden
        return most < (1 - _LEAD) * shares.path[StepPart.COMPUTE].median
    return possible > most


def _most_of_compute(what_if: WhatIf, bound: Bound) -> float:
    """The seconds that compute without any time would save, as other parts would limit a step then."""
    other = what_if.gain(StepPart.OTHER).median if bound == "host" else 0.0
    return what_if.gain(StepPart.COMPUTE).median + max(0.0, other)


def _clauses(
    measurement: Measurement,
    shares: Shares,
    what_if: WhatIf,
    bound: Bound,
    doubt: str,
    gain: float | None,
    suggestions: Sequence[Suggestion],
) -> Iterator[str]:
    """The sentence: what limits a step, how much faster it could be, what to try."""
    if bound == "unclear":
        yield f"inconclusive: {doubt}"
        yield "try --trials 9 or a quiet machine"
        return
    yield _reason(measurement, shares, what_if, bound)
    if gain is not None:
        yield from _gains(measurement, shares, what_if, bound, gain)
    harmless = [each for each in suggestions if each.changes is None]
    for chosen in (harmless or suggestions)[:1]:
        changes = f" (changes the {chosen.changes})" if chosen.changes else ""
        yield f"try {chosen.text}{changes}" if chosen.overrides else chosen.text


def _gains(measurement: Measurement, shares: Shares, what_if: WhatIf, bound: Bound, gain: float) -> Iterator[str]:
    """How much faster a step could be, and what would not make it so."""
    if bound == "data loading" and what_if.reads_ahead:
        free = units.duration(what_if.seconds(StepPart.DATA).median)
        yield f"with free reading a step would take {free}, {gain:.1f} times as fast"
        if what_if.gains_nothing(StepPart.COMPUTE):
            yield "faster compute would gain nothing"
    elif _is_limited(measurement, shares, what_if, bound):
        behind = what_if.behind_compute
        yield f"at most {gain:.1f} times as fast, as {behind} takes {units.duration(what_if.time(behind))}"
    elif bound == "balanced" and what_if.gains_nothing(what_if.ranked[0]):
        yield "they overlap: neither alone gains anything, only both together"
    else:
        yield f"at most {gain:.1f} times as fast" + (" by either alone" if bound == "balanced" else "")


def _reason(measurement: Measurement, shares: Shares, what_if: WhatIf, bound: Bound) -> str:
    """What limits a step, in words and a number."""
    if bound == "balanced":
        shown = units.duration if what_if.overlaps else (lambda time: units.percent(time / shares.whole.median))
        first, second = (f"{name_part(part)} ({shown(what_if.time(part))})" for part in what_if.longest[:2])
        return f"balanced: {first} and {second} take about as long"
    if bound == "data loading" and what_if.reads_ahead:
        alone, rest = shares.alone["read"].median, what_if.figure(lambda model: model.rest).median
        makes = f"the loader makes a batch in {units.duration(alone)}"
        return f"bound by data loading: {makes}, the rest of a step takes {units.duration(rest)}"
    if bound == "data loading":
        return f"bound by data loading: {units.percent(shares.share(StepPart.DATA))} of a step waits for batches"
    stages = find_stages(measurement)
    if stages and bound == "communication":
        waits = f"stages wait for each other in {units.percent(stages.bubble)} of a step"
        return f"bound by communication between stages: {waits}, {units.percent(stages.ideal_bubble)} without it"
    if bound == "communication":
        exposed = units.percent(shares.share(StepPart.COMMUNICATION))
        return f"bound by communication: {exposed} of a step is exposed communication"
    if bound == "straggler":
        waits = f"{units.percent(shares.share(StepPart.STRAGGLER))} of a step waits"
        return f"bound by a straggler: {waits} for {name_slowest(measurement, shares)}"
    if stages and bound == "load imbalance":
        time = units.duration(stages.compute[stages.slowest].median)
        mean = f"{stages.imbalance:.2f} times the mean of {len(stages.layers)} stages"
        where = f"stage {stages.slowest} ({stages.layers[stages.slowest]})"
        return f"bound by load imbalance: {where} computes {time} of a step, {mean}"
    if stages and bound == "bubble":
        ideal = f"{units.percent(stages.ideal_bubble)} at best with {measurement.passes} micro-batches"
        return f"bound by the bubble: stages wait for each other in {units.percent(stages.bubble)} of a step, {ideal}"
    compute = f"{units.percent(shares.share(StepPart.COMPUTE))} of a step is compute"
    if bound == "memory":
        moved = (device_seconds(measurement)[1] or 0.0) / shares.path[StepPart.COMPUTE].median
        return f"bound by memory bandwidth: {compute}, and {units.percent(moved)} of that is memory traffic"
    if bound == "host":
        return f"bound by the host: {explain_host(measurement, shares)}"
    return f"bound by compute: {compute}"
