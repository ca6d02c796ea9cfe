"""The forecast of a curve on the numbers of ranks that were asked for, and what it says in words."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tutti import units
from tutti.errors import DataError
from tutti.forecast.curve import MeasuredRun, ScalingCurve, levels_of, make_curve
from tutti.forecast.laws import Array
from tutti.forecast.link import KnownLink, two_node_level
from tutti.forecast.parts import PartsModel, has_parts
from tutti.forecast.population import Fabric, Population, shipped
from tutti.forecast.posterior import TRUST, Level, Likelihood, Predictive, around, likelihood, mix, predict

FAR = 4  # times the measured nodes from which a forecast is called far
SMALL_BATCH_SPREAD = 0.05  # for each halving of the per-rank batch below the smallest measured one
UNUSED = "the link is not used: several nodes were measured, without the parts of their steps"
OUTLIER = 4.0  # deviations from which a measurement is named

OUTCOMES = (0.1, 0.3, 0.5, 0.7, 0.9)  # quantiles of what a measurement may show, each as likely as the others
SURE = 0.84  # from this probability on, efficiency is said to reach a threshold: the 68 % interval excludes it
TITLES = ("ranks", "nodes", "samples/s", "68% interval", "90% interval", "efficiency", "90% interval ", "extrapolation")

Interval = tuple[float, float]
Part = tuple[float, Likelihood, Array, Population]  # of one fabric, with its share


@dataclass(frozen=True)
class Forecast:
    """What is expected on one number of ranks; intervals are of samples per second."""

    ranks: int
    nodes: int
    samples_per_second: float
    efficiency: float
    interval50: Interval
    interval68: Interval
    interval90: Interval
    basis: str
    extrapolation: float  # its nodes over the most measured nodes
    warnings: tuple[str, ...] = ()
    above: float | None = None  # the probability that efficiency reaches the threshold asked for


@dataclass(frozen=True)
class FittedCurve:
    """A curve with the posterior of its fabric, or of both fabrics where it is not known."""

    curve: ScalingCurve
    levels: tuple[Level, ...]
    parts: tuple[Part, ...]
    source: str
    warnings: tuple[str, ...] = field(default=())
    by_parts: PartsModel | None = None  # where several nodes were measured with their parts, and the link is known

    @property
    def best_rate(self) -> float:
        """The most samples per second of one rank: as the best measured rank, with the noise of a measurement."""
        rates = [each.samples_per_second / each.ranks for each in self.curve.measurements]
        return max(rates) * math.exp(2 * max(population.noise for *_, population in self.parts))

    def log_time(self, ranks: int) -> Predictive:
        """The distribution of the log of the step time on a number of ranks."""
        nodes = self.curve.nodes_for(ranks)
        if nodes == 1 and any(each.nodes == 1 for each in self.curve.measurements):
            return self._within_one_node(ranks)
        if self.by_parts and ranks > self.curve.measurements[-1].ranks:
            return self.by_parts.log_time(ranks)
        ratio, spread = self.curve.batch_ratio(ranks), _small_batch(self.curve, ranks)
        predicted = [
            (share, predict(fit, cells, population, nodes, ratio, spread))
            for share, fit, cells, population in self.parts
        ]
        if len(predicted) > 1:
            return mix(predicted)
        # The width was learned from forecasts from two nodes or more.
        return predicted[0][1].with_width(self.parts[0][3].width if self.curve.most_nodes > 1 else 1.0)

    def _within_one_node(self, ranks: int) -> Predictive:
        """Interpolated between the measurements of one node, or continued to the full node."""
        points = [each for each in self.curve.measurements if each.nodes == 1]
        sizes = np.log2([each.ranks for each in points])
        times = np.log([self.curve.time_of(each.ranks, each.samples_per_second) for each in points])
        population = self.parts[0][3]
        gap = float(np.min(np.abs(sizes - math.log2(ranks))))
        beyond = max(math.log2(ranks) - float(sizes[-1]), 0.0)
        growth = population.within_node.mean + (0.0 if self.curve.mode == "weak" else -1.0)
        middle = float(np.interp(math.log2(ranks), sizes, times)) + growth * beyond
        return around(middle, math.hypot(population.noise, population.within_node.deviation * min(gap, 1.0)))


def fit_curve(
    curve: ScalingCurve,
    fabric: Fabric | None,
    link: KnownLink | None = None,
    alone: bool = False,
    populations: Mapping[Fabric, Population] | None = None,
) -> FittedCurve:
    """Fit a curve. One that was measured on one node needs a link, or `alone` for a band that is no forecast."""
    populations = populations or shipped()
    fabrics = [fabric] if fabric else list(Fabric)
    by_parts = PartsModel(curve, link) if link and has_parts(curve) else None
    unused = () if by_parts or not link or curve.most_nodes == 1 else (UNUSED,)
    level = two_node_level(curve, link) if link and curve.most_nodes == 1 else None
    if curve.most_nodes == 1 and level is None and not alone:
        raise DataError(
            f"everything was measured on one node (up to {units.count(curve.measurements[-1].ranks, 'rank')}): "
            "expected at least 2 nodes, since one node does not show the link between nodes. Measure "
            f"{'3 or 4 nodes' if fabric is Fabric.TCP else '2 nodes'} for 100 steps, give --link RATE,LATENCY with "
            "--gradients BYTES, or ask for --band, which is no forecast."
        )
    fits = [_fit(curve, each, populations[each], level) for each in fabrics]
    logs = TRUST * np.array([evidence for *_, evidence in fits])
    shares = np.exp(logs - logs.max()) / np.exp(logs - logs.max()).sum()
    parts = tuple((float(share), *fit[:3]) for share, fit in zip(shares, fits, strict=True))
    levels = tuple(levels_of(curve, populations[fabrics[0]].within_node))
    warnings = unused + (_part_warnings(by_parts) if by_parts else _curve_warnings(curve, fabric, levels, parts))
    used = link if by_parts or level else None
    return FittedCurve(curve, levels, parts, _source(curve, fabric, used), warnings, by_parts)


def fit_with(
    fitted: FittedCurve, fabric: Fabric | None, nodes: int, quantile: float, link: KnownLink | None = None
) -> FittedCurve:
    """The fit with one more measurement on full nodes, if that shows this quantile of what is forecast."""
    curve = fitted.curve
    ranks = nodes * curve.ranks_per_node
    speed = curve.throughput(ranks, fitted.log_time(ranks).quantile(quantile))
    run = MeasuredRun(ranks, nodes, speed, curve.first.per_rank_batch)
    return fit_curve(make_curve([*curve.measurements, run], curve.mode, curve.ranks_per_node), fabric, link)


def forecast(fitted: FittedCurve, ranks: Sequence[int], threshold: float | None = None) -> list[Forecast]:
    """The forecast on each number of ranks; `threshold` is an efficiency to compare with."""
    fewest = fitted.curve.first.ranks
    if below := [each for each in ranks if each < fewest]:
        raise DataError(
            f"{units.count(below[0], 'rank')}: fewer than any measured number of ranks: expected {fewest} or more, "
            f"since efficiency refers to {units.count(fewest, 'rank')}. Measure {below[0]}, or leave it out."
        )
    return [_forecast(fitted, each, threshold) for each in ranks]


def _fit(
    curve: ScalingCurve, fabric: Fabric, population: Population, level: Level | None
) -> tuple[Likelihood, Array, Population, float]:
    levels = levels_of(curve, population.within_node)
    found = likelihood([*levels, level] if level else levels, fabric, population.noise, curve.ranks_per_node)
    weights, evidence = found.posterior(population)
    return found, weights, population, evidence


def _forecast(fitted: FittedCurve, ranks: int, threshold: float | None) -> Forecast:
    curve, predicted = fitted.curve, fitted.log_time(ranks)
    nodes = curve.nodes_for(ranks)
    most = ranks * fitted.best_rate

    def at(probability: float) -> float:
        return min(curve.throughput(ranks, predicted.quantile(probability)), most)

    def between(share: float) -> Interval:
        return at((1 + share) / 2), at((1 - share) / 2)

    middle = at(0.5)
    above = None
    if threshold is not None:
        needed = threshold * ranks * curve.first.samples_per_second / curve.first.ranks
        above = predicted.below(math.log(curve.time_of(ranks, needed)))
    return Forecast(
        ranks,
        nodes,
        middle,
        curve.efficiency(ranks, middle),
        between(0.5),
        between(0.68),
        between(0.9),
        _basis(fitted, ranks),
        nodes / curve.most_nodes,
        (*fitted.warnings, *_point_warnings(curve, ranks)),
        above,
    )


def _basis(fitted: FittedCurve, ranks: int) -> str:
    measured = [each.ranks for each in fitted.curve.measurements]
    inside = min(measured) <= ranks <= max(measured)
    return f"{'interpolated between' if inside else 'from'} {fitted.source}"


def _source(curve: ScalingCurve, fabric: Fabric | None, link: KnownLink | None) -> str:
    counts = sorted({each.nodes for each in curve.measurements})
    nodes = f"{', '.join(map(str, counts))} node{'s' if counts != [1] else ''}"
    name = {Fabric.HPC: "HPC fabric", Fabric.TCP: "TCP"}[fabric] if fabric else "unknown fabric"
    return f"measurements on {nodes}, {name}{f', link {link.source}' if link else ''}"


def _part_warnings(model: PartsModel) -> tuple[str, ...]:
    if model.reading_limits:
        return ("reading limits the step: the file server is taken to give all ranks together no more than measured",)
    return ("the file system is not in the numbers: reading did not limit any measured step",)


def _curve_warnings(
    curve: ScalingCurve, fabric: Fabric | None, levels: Sequence[Level], parts: Sequence[Part]
) -> tuple[str, ...]:
    found = []
    if fabric is not Fabric.HPC and curve.most_nodes == 2:
        found.append("two nodes are often slower than three or four on TCP: measure 3 or 4 nodes")
    if fabric is None:
        found.append("the fabric is not known: give --fabric hpc or tcp")
    if any(each.exposed_seconds is not None and each.per_rank_batch is None for each in curve.measurements):
        found.append("exposed_seconds is not used without per_rank_batch")
    if not any(level.nodes == 1 for level in levels):
        found.append("one node was not measured: the share of the exchange is a guess")
    _, fit, weights, population = max(parts, key=lambda part: part[0])
    for level in levels if len(levels) > 2 else ():
        off = level.log_time - float((weights * fit.log_times(level.nodes, level.batch_ratio)).sum())
        if abs(off) > OUTLIER * math.hypot(population.noise, level.deviation):
            nodes = units.count(level.nodes, "node")
            share = units.percent(math.expm1(off))
            found.append(f"the step on {nodes} is {share} off the other measurements: repeat it")
    return tuple(found)


def _point_warnings(curve: ScalingCurve, ranks: int) -> list[str]:
    found = []
    nodes = curve.nodes_for(ranks)
    if nodes > FAR * curve.most_nodes:
        found.append(
            f"{nodes / curve.most_nodes:g} times the measured nodes: another algorithm of the collectives, other "
            "switches and the file system are not in the numbers"
        )
    if nodes > 1 and ranks % nodes:
        found.append(f"the last node is not full ({curve.ranks_per_node} ranks a node)")
    if _small_batch(curve, ranks):
        found.append("the per-rank batch is smaller than any measured one: kernels may be slower")
    return found


def _small_batch(curve: ScalingCurve, ranks: int) -> float:
    if curve.mode == "weak":
        return 0.0
    most = max(each.ranks for each in curve.measurements)
    return SMALL_BATCH_SPREAD * max(math.log2(ranks / most), 0.0)


def table_rows(curve: ScalingCurve, made: Sequence[Forecast], with_middle: bool = True) -> list[list[str]]:
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
