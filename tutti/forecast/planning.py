"""What a forecast says in conclusions, what one more measurement would do to it, and what a campaign of runs costs."""

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tutti import units
from tutti.errors import ConfigError
from tutti.forecast.advice import draw_rates
from tutti.forecast.batches import MeasuredSweep
from tutti.forecast.epochs import fit_epochs
from tutti.forecast.forecast import FAR, OUTCOMES, SURE, FittedCurve, Forecast, fit_with, forecast
from tutti.forecast.laws import Array
from tutti.forecast.population import Fabric
from tutti.study.outcome import PointOutcome

MOST_WIDTH = 0.4  # of a 90 % interval of efficiency that a conclusion rests on
LEAST_GAIN = 0.15  # of the width of an interval: a measurement that narrows it by less is not proposed
MOST_FILES = 100_000  # that are counted for the size of a data set
_STATES = {"sgd": 1, "lars": 1, "muon": 1}  # values that an optimizer keeps for a parameter; others keep 2
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
    widths = [_width(fit_with(fitted, fabric, nodes, each), ranks) for each in OUTCOMES]
    batch = curve.measurements[-1].per_rank_batch
    total = batch * (more if curve.mode == "weak" else curve.measurements[-1].ranks) if batch else None
    seconds = total / curve.throughput(more, fitted.log_time(more).quantile(0.5)) if total else None
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


@dataclass(frozen=True)
class NodeChoice:
    """The number of nodes that is asked for, and why."""

    chosen: Forecast
    reason: str


def choose_nodes(fitted: FittedCurve, threshold: float, nodes: int | None = None) -> NodeChoice:
    """The most nodes with an even chance of an efficiency, up to FAR times the measured ones; or the given number."""
    curve = fitted.curve
    if nodes is not None:
        [made] = forecast(fitted, [nodes * curve.ranks_per_node], threshold)
        return NodeChoice(made, f"{units.count(nodes, 'node')} were given. {_chances([made], threshold)}")
    counts = {run.nodes for run in curve.measurements} | {curve.most_nodes * times for times in (2, FAR)}
    ranks = [max(count * curve.ranks_per_node, curve.first.ranks) for count in sorted(counts)]
    made = forecast(fitted, sorted(set(ranks)), threshold)
    good = list(itertools.takewhile(lambda each: (each.above or 0.0) >= 0.5, made))
    chances = _chances(made, threshold)
    if not good:
        words = f"No number of nodes has an even chance of an efficiency of {units.percent(threshold)}; the fewest cost"
        return NodeChoice(made[0], f"{words} least. {chances}")
    considered = units.names([units.count(each.nodes) for each in made])
    return NodeChoice(
        good[-1],
        f"{units.count(good[-1].nodes, 'node')}: the most among {considered} nodes with at least an even chance of an "
        f"efficiency of {units.percent(threshold)}. {chances} More than {FAR} times the measured nodes are not "
        "considered.",
    )


def _chances(made: Sequence[Forecast], threshold: float) -> str:
    chances = [f"{chance(each.above or 0.0)} on {units.count(each.nodes, 'node')}" for each in made]
    return f"The chance of {units.percent(threshold)} is {', '.join(chances)}."


def chance(probability: float) -> str:
    """A probability in percent that is never certain."""
    return (
        "more than 99%" if probability > 0.99 else "less than 1%" if probability < 0.01 else units.percent(probability)
    )


@dataclass(frozen=True)
class Campaign:
    """Runs of the same length on a number of nodes; hours come as the quantiles 5, 50 and 95 %."""

    made: Forecast
    runs: int
    steps: int
    global_batch: int
    contingency: float  # as a share
    hours: tuple[float, ...]  # of one run
    is_covered: float  # the probability that the request is enough

    @property
    def node_hours(self) -> tuple[float, ...]:
        """Of all runs, without the contingency."""
        return tuple(self.runs * self.made.nodes * each for each in self.hours)

    @property
    def request(self) -> float:
        """The median of the node-hours of all runs, with the contingency."""
        return self.node_hours[1] * (1 + self.contingency)


def batch_on(fitted: FittedCurve, made: Forecast) -> int:
    """The global batch on the ranks of a forecast; 0 where the records do not hold it."""
    curve = fitted.curve
    last = curve.measurements[-1]
    batch = last.per_rank_batch or 0
    total = round(batch * (made.ranks if curve.mode == "weak" else last.ranks))
    if 0 < total < made.ranks:
        raise ConfigError(
            f"a global batch of {units.count(total)} does not split over {units.count(made.ranks, 'rank')}: expected "
            "fewer --nodes."
        )
    return total


def plan_campaign(fitted: FittedCurve, made: Forecast, runs: int, steps: int | Array, contingency: float) -> Campaign:
    """What runs on a number of nodes cost, and the probability that the contingency covers what is uncertain.

    Draws of steps stand for a length of runs that is uncertain itself.
    """
    batch = batch_on(fitted, made)
    hours = steps * batch / draw_rates(fitted, made.ranks) / 3600
    low, middle, high = (float(each) for each in np.quantile(hours, (0.05, 0.5, 0.95)))
    covered = float(np.mean(hours <= (1 + contingency) * middle))
    whole = math.ceil(float(np.median(steps)))
    return Campaign(made, runs, whole, batch, contingency, (low, middle, high), covered)


def count_steps(nodes: int, global_batch: int, epochs: float, train_samples: int) -> int:
    """The steps of a number of epochs with a global batch, which the training set must hold."""
    if train_samples < global_batch:
        raise ConfigError(
            f"a global batch of {units.count(global_batch)} on {units.count(nodes, 'node')} is larger than the "
            f"{units.count(train_samples)} training samples: expected fewer --nodes, or the --steps of a run."
        )
    return math.ceil(epochs * (train_samples // global_batch))


def sweep_steps(sweep: MeasuredSweep, global_batch: int, train_samples: int) -> tuple[str, Array]:
    """The epochs to the target of a sweep in words, and draws of the steps that they take with a global batch."""
    epochs = fit_epochs(sweep.points()).draws(global_batch)
    low, middle, high = (float(each) for each in np.quantile(epochs, (0.05, 0.5, 0.95)))
    words = f"{units.interval(units.number, middle, low, high)} epochs to {sweep.metric}={sweep.target:g}, by a sweep"
    return words, epochs * train_samples / global_batch


def checkpoint_size(outcomes: Sequence[PointOutcome], optimizer: str) -> tuple[float, str]:
    """The bytes of a checkpoint, and whether they were measured or estimated."""
    for run in outcomes:
        saved = sorted((Path(run.folder) / "checkpoints").glob("step-*"))
        if saved:
            return float(sum(each.stat().st_size for each in saved[-1].rglob("*") if each.is_file())), "measured"
    parameters = outcomes[0].plan.get("parameters") or 0
    return 4.0 * parameters * (1 + _STATES.get(optimizer, 2)), "estimated from parameters and optimizer"


def log_bytes_a_step(run: PointOutcome) -> float:
    """The bytes of metrics and logs of a run, for each of its steps."""
    folder = Path(run.folder)
    files = [folder / "metrics.jsonl", *(folder / "logs").glob("*")]
    return sum(each.stat().st_size for each in files if each.is_file()) / max(run.losses[-1][0] if run.losses else 1, 1)


def data_size(data: Mapping[str, Any]) -> tuple[str, str]:
    """The size of the data set of a recipe, and where it is."""
    paths = [Path(str(data[key])) for key in ("path", "train", "valid") if isinstance(data.get(key), str)]
    if not paths:
        return "0 B", "made in memory, or part of the software"
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        return "unknown", f"{', '.join(missing)}: not on this machine"
    size = count = 0
    for path in paths:
        size += path.stat().st_size if path.is_file() else 0
        for folder, _, names in os.walk(path):
            size += sum(os.stat(os.path.join(folder, name)).st_size for name in names)
            count += len(names)
            if count > MOST_FILES:
                return f"more than {units.size(size)}", f"{path}: {units.count(count)} of its files were counted"
    return units.size(size), ", ".join(map(str, paths))


def _width(fitted: FittedCurve, ranks: int) -> float:
    predicted = fitted.log_time(ranks)
    slow, fast = (fitted.curve.throughput(ranks, predicted.quantile(end)) for end in reversed(_ENDS))
    return min(fast, ranks * fitted.best_rate) - slow
