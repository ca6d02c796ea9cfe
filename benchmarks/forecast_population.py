"""Learns the population tables of `tutti forecast` from published scaling curves: tutti/forecast/population.json.

Every number is the mean of what the families of curves say and of a value fixed beforehand, which counts as much as
PRIOR_CURVES curves. However many curves a family has, it counts as FAMILY_CURVES at most, since its curves share one
machine and one way of measuring.

- Structures, friction and the factor of two nodes: expectation-maximisation over whole curves.
- Noise and discrepancy: the likelihood of what was predicted for the rest of each curve from its first nodes.
- The width of intervals: how much of that rest they contain.

    python benchmarks/forecast_population.py --curves curves.json --write
"""

import argparse
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tutti.forecast.curve import MeasuredRun, ScalingCurve, levels_of, make_curve
from tutti.forecast.forecast import fit_curve
from tutti.forecast.laws import STRUCTURES
from tutti.forecast.population import TABLE, Fabric, Normal, Population
from tutti.forecast.posterior import Level, Likelihood, Predictive, likelihood, predict

PRIOR_CURVES = 24.0
FAMILY_CURVES = 6.0
FIRST_NODES = (2, 4)  # the rest of a curve is predicted from these
FIXED = {
    Fabric.HPC: Population(
        structures=(0.3, 0.5, 0.2),
        first_jump=Normal(math.log(0.07), 1.3),
        friction=Normal(0.015, 0.025),
        two_nodes=Normal(0.0, 0.0),
        within_node=Normal(0.04, 0.1),
        noise=0.02,
        discrepancy=0.02,
    ),
    Fabric.TCP: Population(
        structures=(0.2, 0.45, 0.35),
        first_jump=Normal(math.log(0.4), 1.2),
        friction=Normal(0.07, 0.07),
        two_nodes=Normal(0.4, 0.4),
        within_node=Normal(0.04, 0.1),
        noise=0.07,
        discrepancy=0.05,
    ),
}
COVERED = 0.93  # of what was measured later, by intervals of 90 %
FACTORS = (0.6, 0.8, 1.0, 1.25, 1.6)  # tried for the noise and for the discrepancy
FACTOR_DEVIATION = 0.25  # of the log of a factor, beforehand


@dataclass(frozen=True)
class Published:
    """A published curve."""

    name: str
    family: str
    fabric: Fabric | None
    curve: ScalingCurve


def read_curves(path: Path) -> list[Published]:
    """All curves of the file; the family is the first word of the name."""
    return [_published(each) for each in json.loads(path.read_text())]


def _published(each: dict[str, Any]) -> Published:
    tags = each["tags"]
    fabric = Fabric.TCP if "tcp-ethernet" in tags else Fabric.HPC if "hpc-fabric" in tags else None
    points = [
        MeasuredRun(
            point["ranks"],
            point.get("nodes") or math.ceil(point["ranks"] / point["gpus_per_node"]),
            point["samples_per_second"],
            each["per_rank_batch"],
            point.get("exposed_sync_seconds"),
        )
        for point in each["points"]
    ]
    return Published(each["id"], each["id"].split("-")[0], fabric, make_curve(points, each["mode"]))


def up_to(curve: ScalingCurve, nodes: int) -> ScalingCurve:
    """The part of a curve that was measured on at most so many nodes."""
    return make_curve([each for each in curve.measurements if each.nodes <= nodes], curve.mode)


def beyond(curve: ScalingCurve, nodes: int) -> list[MeasuredRun]:
    """The part of a curve that is to be predicted."""
    return [each for each in curve.measurements if each.nodes > nodes]


def learn(curves: Sequence[Published], fabric: Fabric, fixed_curves: float = PRIOR_CURVES) -> Population:
    """The population of one fabric from the curves that are given; the fixed values count as so many curves."""
    fixed = FIXED[fabric]
    chosen = [each for each in curves if each.fabric is fabric]
    found = replace(fixed, within_node=_within_node(curves, fixed, fixed_curves))
    found = replace(found, first_jump=_first_jump(chosen, fixed, fixed_curves))
    found = replace(found, noise=_best(found.noise, lambda noise: _score(chosen, replace(found, noise=noise))))
    found = _maximise(chosen, fabric, found, fixed_curves)
    return replace(
        found, discrepancy=_best(found.discrepancy, lambda scale: _score(chosen, replace(found, discrepancy=scale)))
    )


def learn_all(curves: Sequence[Published], fixed_curves: float = PRIOR_CURVES) -> dict[Fabric, Population]:
    """The populations of all fabrics, with intervals as wide as the curves need."""
    found = {fabric: learn(curves, fabric, fixed_curves) for fabric in Fabric}
    width = _width(curves, found)
    return {fabric: replace(population, width=width) for fabric, population in found.items()}


def _width(curves: Sequence[Published], populations: dict[Fabric, Population]) -> float:
    """The factor by which intervals of 90 % contain COVERED of what was measured later.

    Every family counts alike on every fabric. A new family differs from all of these: hence more than 90 %.
    """
    needed: dict[tuple[str, Fabric, int], list[float]] = defaultdict(list)
    for each in curves:
        for nodes in FIRST_NODES:
            part = up_to(each.curve, nodes)
            if each.fabric and part.most_nodes > 1:
                fitted = fit_curve(part, each.fabric, populations=populations)
                needed[each.family, each.fabric, nodes] += [
                    _needed_width(fitted.log_time(point.ranks), _log_time(part, point))
                    for point in beyond(each.curve, nodes)
                ]
    groups = [group for group in needed.values() if group]
    widths = np.concatenate(groups)
    weights = np.concatenate([np.full(len(group), 1 / len(group) / len(groups)) for group in groups])
    order = np.argsort(widths)
    return float(np.interp(COVERED, np.cumsum(weights[order]), widths[order]))


def _needed_width(predicted: Predictive, log_time: float) -> float:
    """The factor that brings a measured value to the edge of the interval of 90 %."""
    middle = predicted.quantile(0.5)
    edge = predicted.quantile(0.95 if log_time > middle else 0.05)
    return (log_time - middle) / (edge - middle)


def _weights(curves: Sequence[Published]) -> list[float]:
    sizes = Counter(each.family for each in curves)
    return [min(1.0, FAMILY_CURVES / sizes[each.family]) for each in curves]


def _shrunk(values: Sequence[float], weights: Sequence[float], fixed: Normal, fixed_curves: float) -> Normal:
    """Mean and deviation of values together with those that were fixed beforehand."""
    total = sum(weights) + fixed_curves
    mean = (float(np.dot(weights, values)) + fixed_curves * fixed.mean) / total
    squares = float(np.dot(weights, (np.asarray(values) - mean) ** 2)) if len(values) else 0.0
    return Normal(mean, math.sqrt((squares + fixed_curves * fixed.deviation**2) / total))


def _within_node(curves: Sequence[Published], fixed: Population, fixed_curves: float) -> Normal:
    """The growth of a step for a doubling of the ranks of one node; single outliers count for little."""
    rises, weights = [], []
    for each, weight in zip(curves, _weights(curves), strict=True):
        points = [point for point in each.curve.measurements if point.nodes == 1]
        if len(points) > 1:
            times = [math.log(each.curve.time_of(point.ranks, point.samples_per_second)) for point in points]
            rises.append((times[-1] - times[0]) / math.log2(points[-1].ranks / points[0].ranks))
            weights.append(weight)
    return _shrunk(np.clip(rises, -0.1, 0.3).tolist(), weights, fixed.within_node, fixed_curves)


def _first_jump(curves: Sequence[Published], fixed: Population, fixed_curves: float) -> Normal:
    jumps, weights = [], []
    for each, weight in zip(curves, _weights(curves), strict=True):
        levels = {level.nodes: level.log_time for level in levels_of(each.curve, fixed.within_node)}
        if 1 in levels and 2 in levels:
            jumps.append(math.log(max(levels[2] - levels[1], 0.004)))
            weights.append(weight)
    return _shrunk(jumps, weights, fixed.first_jump, fixed_curves)


@cache
def _fitted(levels: tuple[Level, ...], fabric: Fabric, noise: float, ranks_per_node: int) -> Likelihood:
    return likelihood(levels, fabric, noise, ranks_per_node)


def _fits(curves: Sequence[Published], fabric: Fabric, found: Population) -> list[tuple[float, Likelihood]]:
    """The likelihood of every curve of at least three numbers of nodes, with the weight of the curve."""
    return [
        (weight, _fitted(tuple(levels), fabric, found.noise, each.curve.ranks_per_node))
        for each, weight in zip(curves, _weights(curves), strict=True)
        if len(levels := levels_of(each.curve, found.within_node)) > 2
    ]


def _maximise(curves: Sequence[Published], fabric: Fabric, found: Population, fixed_curves: float) -> Population:
    """Structures, friction and the factor of two nodes by expectation-maximisation."""
    fits = _fits(curves, fabric, found)
    fixed = FIXED[fabric]
    for _ in range(4):
        posteriors = [(weight, fit, fit.posterior(found)[0]) for weight, fit in fits]
        shares = sum((weight * cells.sum((1, 2, 3, 4)) for weight, _, cells in posteriors), np.zeros(len(STRUCTURES)))
        shares = shares + fixed_curves * np.array(fixed.structures)
        frictions = [(weight, fit.grid.frictions, cells.sum((0, 1, 3, 4))) for weight, fit, cells in posteriors]
        factors = [(weight, fit.grid.two_nodes, cells.sum((0, 1, 2, 4))) for weight, fit, cells in posteriors]
        found = replace(
            found,
            structures=tuple((shares / shares.sum()).tolist()),
            friction=_moments(frictions, fixed.friction, fixed_curves),
            two_nodes=_moments(factors, fixed.two_nodes, fixed_curves),
        )
    return found


def _moments(marginals: Sequence[tuple[float, Any, Any]], fixed: Normal, fixed_curves: float) -> Normal:
    if fixed.deviation == 0 or not marginals:
        return fixed
    values = np.concatenate([axis for _, axis, _ in marginals])
    weights = np.concatenate([weight * cells for weight, _, cells in marginals])
    return _shrunk(values.tolist(), weights.tolist(), fixed, fixed_curves)


def _score(curves: Sequence[Published], found: Population) -> float:
    """The log density of what was measured on more nodes than the forecast was made from."""
    total = 0.0
    for each, weight in zip(curves, _weights(curves), strict=True):
        for nodes in FIRST_NODES:
            measured = beyond(each.curve, nodes)
            if measured and (part := up_to(each.curve, nodes)).most_nodes > 1:
                levels = tuple(levels_of(part, found.within_node))
                fit = _fitted(levels, each.fabric or Fabric.TCP, found.noise, part.ranks_per_node)
                cells, _ = fit.posterior(found)
                logs = [
                    math.log(predict(fit, cells, found, point.nodes).density_at(_log_time(part, point)) + 1e-9)
                    for point in measured
                ]
                total += weight * float(np.mean(logs))
    return total


def _log_time(curve: ScalingCurve, point: MeasuredRun) -> float:
    return math.log(curve.time_of(point.ranks, point.samples_per_second))


def _best(fixed: float, score: Callable[[float], float]) -> float:
    """The multiple of a value that scores best, with the distance from the value counted against it."""
    penalty = {factor: 0.5 * (math.log(factor) / FACTOR_DEVIATION) ** 2 for factor in FACTORS}
    return fixed * max(FACTORS, key=lambda factor: score(fixed * factor) - penalty[factor])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", type=Path, required=True, help="the file of published curves")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name} of the package")
    given = parser.parse_args()
    curves = read_curves(given.curves)
    families = dict(sorted(Counter(each.family for each in curves).items()))
    table = {"families": families, "fabrics": {fabric: found.as_json() for fabric, found in learn_all(curves).items()}}
    text = json.dumps(_rounded(table), indent=2) + "\n"
    if given.write:
        TABLE.write_text(text)
    print(text, end="")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
