"""The measured numbers of a step as sentences; computed without torch."""

from collections.abc import Iterator

from tutti import units
from tutti.bench.results import Measurement
from tutti.bench.shares import Figure, Shares, StageTimes, find_fractions, find_stages
from tutti.bench.whatif import describe_overlap, find_what_if
from tutti.runs.step_parts import StepPart

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
