"""A forecast in words: the rows of its table and the sentences that its intervals support."""

from collections.abc import Sequence

from tutti import units
from tutti.forecast.curve import ScalingCurve
from tutti.forecast.forecast import Forecast, Interval

SURE = 0.84  # from this probability on, efficiency is said to reach a threshold: the 68 % interval excludes it
TITLES = ("ranks", "nodes", "samples/s", "68% interval", "90% interval", "efficiency", "90% interval ", "extrapolation")


def rows(curve: ScalingCurve, made: Sequence[Forecast], with_middle: bool = True) -> list[list[str]]:
    """A line for each number of ranks; a band has no middle."""
    return [
        [
            units.count(each.ranks),
            units.count(each.nodes),
            units.number(each.samples_per_second) if with_middle else "-",
            _range(each.interval68),
            _range(each.interval90),
            units.percent(each.efficiency) if with_middle else "-",
            " to ".join(units.percent(curve.efficiency(each.ranks, end)) for end in each.interval90),
            f"x{each.extrapolation:.3g}",
        ]
        for each in made
    ]


def sentences(curve: ScalingCurve, made: Sequence[Forecast], threshold: float | None) -> list[str]:
    """What the forecast says, what it rests on, and what to know about it."""
    last = made[-1]
    low, high = (curve.efficiency(last.ranks, end) for end in last.interval90)
    said = [
        f"{units.count(last.ranks, 'rank')} on {units.count(last.nodes, 'node')}: "
        f"{units.interval(units.number, last.samples_per_second, *last.interval90)} samples/s, an efficiency of "
        f"{units.interval(units.percent, last.efficiency, low, high)} at 90 %, {last.basis}."
    ]
    if threshold is not None:
        said.append(_judge(made, threshold))
    warnings = dict.fromkeys(warning for each in made for warning in each.warnings)
    return said + [f"Note: {warning}." for warning in warnings]


def _judge(made: Sequence[Forecast], threshold: float) -> str:
    """On which numbers of ranks efficiency reaches the threshold, does not, and where that cannot be told."""
    reach = [each.ranks for each in made if (each.above or 0.0) >= SURE]
    fail = [each.ranks for each in made if (each.above or 0.0) <= 1 - SURE]
    open_ = [each.ranks for each in made if 1 - SURE < (each.above or 0.0) < SURE]
    parts = [
        f"{verdict} on {', '.join(units.count(each) for each in found)} ranks"
        for verdict, found in (("reached", reach), ("too close to tell", open_), ("not reached", fail))
        if found
    ]
    return f"An efficiency of {units.percent(threshold)} is {', '.join(parts)}."


def _range(interval: Interval) -> str:
    return f"{units.number(interval[0])} to {units.number(interval[1])}"
