"""What a forecast of a study says in its conclusions, and what one more measurement would do to an interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tutti import units
from tutti.forecast.curve import MeasuredRun
from tutti.forecast.forecast import SURE, FittedCurve, Forecast, fit_curve
from tutti.forecast.population import Fabric

MOST_WIDTH = 0.4  # of a 90 % interval of efficiency that a conclusion rests on
LEAST_GAIN = 0.15  # of the width of an interval: a measurement that narrows it by less is not proposed
_OUTCOMES = (0.1, 0.3, 0.5, 0.7, 0.9)  # quantiles of what a measurement may show, each as likely as the others
_ENDS = (0.05, 0.95)


@dataclass(frozen=True)
class FurtherMeasurement:
    """A run that has not been made, and what it is expected to do to the interval of a forecast."""

    nodes: int
    ranks: int
    width_ratio: float  # expected width of the 90 % interval of throughput, over the width without the run
    step_seconds: float | None  # where the batch is known

    @property
    def gain(self) -> float:
        """The share of the width that it takes away."""
        return 1 - self.width_ratio


def expect_measurement(fitted: FittedCurve, fabric: Fabric | None, ranks: int, nodes: int) -> FurtherMeasurement:
    """What measuring full nodes would do to the interval on a number of ranks: the mean over its likely outcomes."""
    curve = fitted.curve
    more = nodes * curve.ranks_per_node
    predicted = fitted.log_time(more)
    speeds = [curve.throughput(more, predicted.quantile(probability)) for probability in _OUTCOMES]
    widths = []
    for speed in speeds:
        runs = (*curve.measurements, MeasuredRun(more, nodes, speed))
        widths.append(_width(fit_curve(replace(curve, measurements=runs), fabric), ranks))
    batch = curve.measurements[-1].per_rank_batch
    total = batch * (more if curve.mode == "weak" else curve.measurements[-1].ranks) if batch else None
    seconds = total / speeds[len(speeds) // 2] if total else None
    return FurtherMeasurement(nodes, more, sum(widths) / len(widths) / _width(fitted, ranks), seconds)


def propose_measurement(fitted: FittedCurve, fabric: Fabric | None, ranks: int) -> FurtherMeasurement | None:
    """The measurement below a number of ranks that narrows its interval most for a node; None if none is worth it."""
    most, asked = fitted.curve.most_nodes, fitted.curve.nodes_for(ranks)
    between = sorted({most + 1 if most == 2 and fabric is not Fabric.HPC else 2 * most, 2 * most, 4 * most})
    found = [expect_measurement(fitted, fabric, ranks, nodes) for nodes in between if nodes < asked]
    worth = [each for each in found if each.gain >= LEAST_GAIN]
    return max(worth, key=lambda each: each.gain / each.nodes, default=None)


def conclude_forecast(
    fitted: FittedCurve, made: Sequence[Forecast], threshold: float, fabric: Fabric | None, measured_steps: int
) -> list[str]:
    """State efficiency on more nodes as far as intervals bear it, and what measurement would decide an open case."""
    said: list[str] = []
    open_case: Forecast | None = None
    for each in made:
        low, high = (fitted.curve.efficiency(each.ranks, end) for end in each.interval90)
        if high - low > MOST_WIDTH:
            break
        is_sure = each.above is not None and not 1 - SURE < each.above < SURE
        words = f"on {units.count(each.nodes, 'node')} {units.interval(units.percent, each.efficiency, low, high)}"
        if is_sure:
            said.append(words)
        elif open_case is None:
            said.append(f"{words}, too close to {units.percent(threshold)} to tell")
            open_case = each
        if is_sure and (each.above or 0.0) < 0.5:  # so are all beyond
            break
    if not said:
        return []
    sentence = f"Forecast of efficiency {made[0].basis}, with 90% intervals: {'; '.join(said)}"
    by_link = fitted.by_parts is not None  # its interval is that of the link, which more nodes do not show
    further = propose_measurement(fitted, fabric, open_case.ranks) if open_case and not by_link else None
    return [f"{sentence}{_further(further, open_case, measured_steps) if further and open_case else ''}."]


def _further(further: FurtherMeasurement, asked: Forecast, measured_steps: int) -> str:
    lasts = ""
    if further.step_seconds:
        lasts = f" for about {math.ceil(measured_steps * further.step_seconds / 60)} min"
    does = "halve" if 0.4 <= further.gain <= 0.6 else f"take {units.percent(further.gain)} off"
    return (
        f"; measuring {units.count(further.nodes, 'node')}{lasts} is expected to {does} the interval of "
        f"{units.count(asked.nodes, 'node')}"
    )


def _width(fitted: FittedCurve, ranks: int) -> float:
    predicted = fitted.log_time(ranks)
    slow, fast = (fitted.curve.throughput(ranks, predicted.quantile(end)) for end in reversed(_ENDS))
    return min(fast, ranks * fitted.best_rate) - slow
