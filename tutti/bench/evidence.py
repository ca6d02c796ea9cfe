"""The numbers that a verdict stands on, as lines to read.

Light: imports no torch.
"""

from collections.abc import Iterator

from tutti.bench.numbers import percent, show_seconds
from tutti.bench.results import Measurement
from tutti.bench.shares import Figure, Shares, find_fractions

_NOTABLE = 0.05  # of a step


def show_evidence(measurement: Measurement, shares: Shares) -> Iterator[str]:
    """All that is known about a step, the most telling first."""
    if not shares.whole.median:
        return
    trials = len(shares.whole.trials)
    parts = ", ".join(f"{name} {percent(shares.share(name))}" for name in shares.path)
    spread = f"spread {percent(shares.whole.relative_spread)} over {trials} trial{'s' if trials > 1 else ''}"
    yield f"a step takes {show_seconds(shares.whole.median)} ({spread}): {parts}"
    yield from _show_hidden(shares)
    yield from _show_slow_rank(measurement, shares)
    yield from _show_computing(measurement, shares)
    if check := shares.sum_check:
        verb = "add up to" if check.adds_up else "do NOT add up: they are"
        found, tolerance = percent(1 + check.difference), percent(check.tolerance)
        yield f"parts measured apart {verb} {found} of a step (tolerance {tolerance})"


def _show_hidden(shares: Shares) -> Iterator[str]:
    for name, phase, words in (
        ("reading", "read", "a batch"),
        ("communication", "exchange", "averaging gradients"),
    ):
        hidden = shares.hidden(name)
        if hidden is not None:
            alone, exposed = shares.alone[phase].median, shares.path[name].median
            yield (
                f"{words} takes {show_seconds(alone)} alone; "
                f"a step waits {show_seconds(exposed)}, {show_seconds(hidden)} are hidden"
            )


def _show_slow_rank(measurement: Measurement, shares: Shares) -> Iterator[str]:
    if shares.share("slow rank") < _NOTABLE:
        return
    yield f"{name_slowest(measurement, shares)} is the slowest: {'; '.join(_compare_ranks(measurement, shares))}"


def _compare_ranks(measurement: Measurement, shares: Shares) -> Iterator[str]:
    """How much longer the slowest rank takes, in a step and alone, which says with what."""
    typical = sorted(figure.median for figure in shares.own)[(len(shares.own) - 1) // 2]
    if typical:
        yield f"{shares.own[shares.slowest].median / typical:.2f} times the time of the others without waiting"
    for phase, words in (("compute", "computing"), ("read", "reading")):
        times = measurement.seconds.get(phase, ())
        if len(times) == len(shares.own) and shares.alone[phase].median:
            ratio = Figure(tuple(times[shares.slowest])).median / shares.alone[phase].median
            yield f"{ratio:.2f} times for {words} alone"


def _show_computing(measurement: Measurement, shares: Shares) -> Iterator[str]:
    if shares.slowdown is not None:
        alone, beside = shares.alone["compute"].median, shares.path["computing"].median
        yield f"computing takes {show_seconds(alone)} alone and {show_seconds(beside)} in a step"
    fractions = find_fractions(measurement, shares)
    if fractions.flops is not None:
        yield f"arithmetic at the measured ceiling would take {percent(fractions.flops)} of computing"
    if fractions.bytes is not None:
        yield f"moving data at the measured bandwidth would take {percent(fractions.bytes)} of computing"
    fixed, work = fixed_share(shares), measurement.work
    if fixed is not None:
        ratio = shares.alone["double"].median / shares.alone["compute"].median
        yield f"a batch twice as large takes {ratio:.2f} times as long: {percent(fixed)} does not depend on the batch"
    if work and work.host_share is not None:
        yield f"no kernel works in {percent(work.host_share)} of computing, of {work.operators:,} operators a step"
    if work and work.synchronisations:
        lines = "; ".join(work.synchronises_at) or "line not known"
        yield f"the host reads a number from the device {work.synchronisations} times a step: {lines}"


def name_slowest(measurement: Measurement, shares: Shares) -> str:
    """The rank with the longest own time, and its host."""
    if shares.slowest < len(measurement.hosts):
        return f"rank {shares.slowest} on {measurement.hosts[shares.slowest]}"
    return f"rank {shares.slowest}"


def explain_host(measurement: Measurement, shares: Shares) -> str:
    """Why a step is the host's, the strongest reason first."""
    work, fixed, rest = measurement.work, fixed_share(shares) or 0.0, shares.share("rest")
    idle = (work.host_share if work else None) or 0.0
    if rest > shares.share("computing"):
        return f"{percent(rest)} of a step is outside of reading, computing and communication"
    if idle >= fixed:
        reads = work.synchronisations if work else 0
        often = f", which reads {reads} numbers a step from it" if reads else ""
        return f"for {percent(idle)} of computing the device waits for the host{often}"
    return f"{percent(fixed)} of computing does not depend on the batch, which is small"


def fixed_share(shares: Shares) -> float | None:
    """The part of computing that a batch twice as large would not take twice."""
    alone, double = shares.alone.get("compute"), shares.alone.get("double")
    if not alone or not double or not alone.median:
        return None
    return min(1.0, max(0.0, 2 - double.median / alone.median))


def host_share(measurement: Measurement, shares: Shares) -> float:
    """The part of computing that is the host's, as far as it is known."""
    idle = measurement.work.host_share if measurement.work else None
    return min(1.0, max(idle or 0.0, fixed_share(shares) or 0.0))
