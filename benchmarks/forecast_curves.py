"""How well `tutti forecast` predicts published scaling curves, beside four other models.

Goals: on HPC fabrics the throughput beyond 2 measured nodes is predicted within 3 % in the median and 10 % at the 90th
percentile of curves, beyond 4 nodes within 2.5 % and 8 %; on TCP beyond 4 nodes within 8 % and 18 %; intervals of 90 %
hold 85 to 95 % of the points of every family. docs/forecast.md says which are reached.

- Every curve is fitted on at most 2 nodes, and on at most 4; the rest of it is predicted. Curves without a rest, or
  without a second node in what is fitted, are left out.
- What is learned from a population is learned without the family of the curve.
- The error of a curve is the mean over its predicted points of |forecast / measured - 1| of throughput.
- Bias: the mean of log(forecast / measured); positive is optimistic.
- The question: is efficiency at the largest number of ranks at least 80 %? "Cannot tell" where the 68 % interval holds
  80 %.
- Beside it: the ring law a + c 2(n-1)/n, Gustafson's law, the universal scalability law, and the model of AdaptDL
  (Pollux), each fitted by least squares of log time.

    python benchmarks/forecast_curves.py --curves curves.json
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from forecast_population import PRIOR_CURVES, Published, beyond, learn_all, read_curves, up_to

from tutti import units
from tutti.forecast.curve import MeasuredRun, ScalingCurve
from tutti.forecast.forecast import fit_curve, forecast
from tutti.forecast.laws import Array
from tutti.forecast.population import Fabric, Population

THRESHOLD = 0.8
MOST_NODES = (2, 4)
Law = Callable[[ScalingCurve, Sequence[MeasuredRun]], Array]


@dataclass(frozen=True)
class Result:
    """One model on the rest of one curve: log(forecast / measured) of each point, and where the points fell."""

    published: Published
    model: str
    nodes: int
    errors: Array
    inside: tuple[Array, Array, Array] | None
    says: bool | None  # efficiency at the largest n reaches the threshold; None: cannot tell
    truth: bool

    @property
    def error(self) -> float:
        return float(np.mean(np.abs(np.expm1(self.errors))))


def of_tutti(populations: dict[str, dict[Fabric, Population]]) -> Callable[[Published, int], Result]:
    """Our forecast with the populations learned without a family."""

    def result(each: Published, nodes: int) -> Result:
        part, rest = up_to(each.curve, nodes), beyond(each.curve, nodes)
        fitted = fit_curve(part, each.fabric, populations=populations[each.family])
        made = forecast(fitted, [point.ranks for point in rest], THRESHOLD)
        measured = np.array([point.samples_per_second for point in rest])
        errors = np.log([one.samples_per_second for one in made]) - np.log(measured)
        bounds = [[getattr(one, name) for one in made] for name in ("interval50", "interval68", "interval90")]
        inside = [np.array([low <= m <= high for (low, high), m in zip(b, measured, strict=True)]) for b in bounds]
        above = made[-1].above or 0.0
        says = None if 0.16 < above < 0.84 else above > 0.5
        return Result(each, "tutti", nodes, errors, (inside[0], inside[1], inside[2]), says, _truth(each))

    return result


def of_law(name: str, law: Law) -> Callable[[Published, int], Result]:
    """Another model, which has no intervals."""

    def result(each: Published, nodes: int) -> Result:
        part, rest = up_to(each.curve, nodes), beyond(each.curve, nodes)
        log_times = law(part, rest)
        ranks = np.array([point.ranks for point in rest])
        speed = np.log(ranks) - log_times
        says = part.efficiency(rest[-1].ranks, math.exp(speed[-1])) >= THRESHOLD
        measured = np.log([point.samples_per_second for point in rest])
        return Result(each, name, nodes, speed - measured, None, bool(says), _truth(each))

    return result


def _truth(each: Published) -> bool:
    last = each.curve.measurements[-1]
    return each.curve.efficiency(last.ranks, last.samples_per_second) >= THRESHOLD


def _columns(points: Sequence[MeasuredRun]) -> tuple[Array, Array]:
    return np.array([float(each.ranks) for each in points]), np.array([float(each.nodes) for each in points])


def _times(curve: ScalingCurve) -> Array:
    return np.array([curve.time_of(each.ranks, each.samples_per_second) for each in curve.measurements])


def _not_negative(columns: Array, target: Array) -> Array:
    """Least squares of relative error with coefficients that are not negative: the best subset of columns."""
    best, least = np.zeros(columns.shape[1]), math.inf
    scaled = columns / target[:, None]
    for subset in range(1, 2 ** columns.shape[1]):
        chosen = [index for index in range(columns.shape[1]) if subset >> index & 1]
        found = np.linalg.lstsq(scaled[:, chosen], np.ones(len(target)), rcond=None)[0]
        loss = float(np.sum((scaled[:, chosen] @ found - 1) ** 2))
        if (found >= 0).all() and loss < least - 1e-12:
            least, best = loss, np.zeros(columns.shape[1])
            best[chosen] = found
    return best


def ring(curve: ScalingCurve, rest: Sequence[MeasuredRun]) -> Array:
    """Step time a + c 2(n-1)/n."""

    def columns(ranks: Array) -> Array:
        return np.stack([np.ones_like(ranks), 2 * (ranks - 1) / ranks], axis=1)

    found = _not_negative(columns(_columns(curve.measurements)[0]), _times(curve))
    return np.log(columns(_columns(rest)[0]) @ found)


def gustafson(curve: ScalingCurve, rest: Sequence[MeasuredRun]) -> Array:
    """Speed-up n - s (n-1): throughput is linear in ranks."""
    ranks, _ = _columns(curve.measurements)
    speed = ranks / _times(curve)
    base = speed[0] / ranks[0]
    over = (ranks - 1) / ranks
    serial = float(np.clip(np.dot(over, 1 - speed / base / ranks) / max(np.dot(over, over), 1e-12), 0, 0.99))
    asked, _ = _columns(rest)
    return np.log(asked / (base * (asked - serial * (asked - 1))))


def usl(curve: ScalingCurve, rest: Sequence[MeasuredRun]) -> Array:
    """The universal scalability law: n / throughput = a + b (n-1) + c n (n-1)."""

    def columns(ranks: Array) -> Array:
        return np.stack([np.ones_like(ranks), ranks - 1, ranks * (ranks - 1)], axis=1)

    found = _not_negative(columns(_columns(curve.measurements)[0]), _times(curve))
    return np.log(columns(_columns(rest)[0]) @ found)


def adaptdl(curve: ScalingCurve, rest: Sequence[MeasuredRun]) -> Array:
    """Pollux: (grad^g + sync^g)^(1/g); sync is linear in ranks - 2, otherwise inside a node than between nodes."""
    target = np.log(_times(curve))
    scale = math.exp(float(target.min()))
    best, least = np.zeros(6), math.inf
    for gamma in (1.0, 1.5, 2.0, 3.0, 5.0, 10.0):
        start = np.log(np.array([scale, 0.1 * scale, 0.01 * scale, 0.3 * scale, 0.01 * scale]))
        found = _levenberg(lambda logs, gamma=gamma: _adaptdl_time(logs, gamma, curve.measurements) - target, start)
        loss = float(np.sum((_adaptdl_time(found, gamma, curve.measurements) - target) ** 2))
        if loss < least:
            least, best = loss, np.append(found, gamma)
    return _adaptdl_time(best[:5], float(best[5]), rest)


def _adaptdl_time(logs: Array, gamma: float, points: Sequence[MeasuredRun]) -> Array:
    compute, local, local_slope, node, node_slope = np.exp(np.clip(logs, -40, 40))
    ranks, nodes = _columns(points)
    more = np.maximum(ranks - 2, 0)
    sync = np.where(nodes > 1, node + node_slope * more, np.where(ranks > 1, local + local_slope * more, 0.0))
    return np.log(compute**gamma + sync**gamma) / gamma


def _levenberg(residuals: Callable[[Array], Array], start: Array) -> Array:
    """Least squares by the method of Levenberg and Marquardt with numerical derivatives."""
    here, damping = start, 1e-2
    now = residuals(here)
    for _ in range(60):
        slopes = np.stack([(residuals(here + step) - now) / 1e-5 for step in 1e-5 * np.eye(len(here))], axis=1)
        pull = slopes.T @ now
        move = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(here)), -pull)
        tried = here + np.clip(move, -2, 2)
        after = residuals(tried)
        if after @ after < now @ now:
            here, now, damping = tried, after, max(damping / 3, 1e-9)
        else:
            damping *= 4
            if damping > 1e6:
                break
    return here


MODELS: dict[str, Law] = {"ring": ring, "Gustafson": gustafson, "USL": usl, "AdaptDL": adaptdl}
TITLES = ("fabric", "family", "nodes", "model", "curves", "median", "p90", "bias", "in 50%", "in 68%", "in 90%", "80%?")


def judge(curves: Sequence[Published], fixed_curves: float, names: Sequence[str]) -> list[Result]:
    """Every model on every curve that has something to predict."""
    families = sorted({each.family for each in curves})
    without = {family: learn_all([c for c in curves if c.family != family], fixed_curves) for family in families}
    models = [of_tutti(without), *(of_law(name, MODELS[name]) for name in names)]
    return [
        model(each, nodes)
        for nodes in MOST_NODES
        for each in curves
        if beyond(each.curve, nodes) and up_to(each.curve, nodes).most_nodes > 1
        for model in models
    ]


def rows(results: Sequence[Result], details: bool = True) -> Iterator[list[str]]:
    """The lines of the table: for each fabric all families together, then each family; ours first."""
    groups: dict[tuple[str, str, int, str], list[Result]] = defaultdict(list)
    for each in results:
        fabric = str(each.published.fabric or "unknown")
        for family in ("all", each.published.family):
            groups[fabric, family, each.nodes, each.model].append(each)
    order = ["tutti", *MODELS]
    for key in sorted(groups, key=lambda key: (key[0], key[2], key[1], order.index(key[3]))):
        if details or key[1] == "all" or key[3] == "tutti":
            yield _row(key, groups[key])


def _row(key: tuple[str, str, int, str], group: Sequence[Result]) -> list[str]:
    errors = [each.error for each in group]
    bias = float(np.mean([each.errors.mean() for each in group]))
    inside = ["", "", ""]
    if group[0].inside:
        held = [np.concatenate([each.inside[index] for each in group if each.inside]) for index in range(3)]
        inside = [units.percent(float(np.mean(each))) for each in held]
    right = sum(each.says is each.truth for each in group)
    unknown = sum(each.says is None for each in group)
    answers = f"{right} / {len(group) - right - unknown} / {unknown}"
    fabric, family, nodes, model = key
    shown = (units.percent(float(np.median(errors)), 1), units.percent(float(np.quantile(errors, 0.9)), 1))
    return [fabric, family, f"<= {nodes}", model, str(len(group)), *shown, f"{bias:+.1%}", *inside, answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", type=Path, required=True, help="the file of published curves")
    parser.add_argument("--brief", action="store_true", help="other models over all families only")
    parser.add_argument("--alone", action="store_true", help="without other models")
    parser.add_argument("--fixed-curves", type=float, default=PRIOR_CURVES, help="what fixed values count as")
    given = parser.parse_args()
    results = judge(read_curves(given.curves), given.fixed_curves, [] if given.alone else list(MODELS))
    units.print_table(TITLES, rows(results, not given.brief), left=TITLES[:4])
    print("80%?: right / wrong / cannot tell whether efficiency at the largest number of ranks is at least 80 %")


if __name__ == "__main__":
    main()
