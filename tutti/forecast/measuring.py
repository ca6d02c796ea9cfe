"""What to measure next: how far each measurement is expected to narrow the hours of a choice, and what it costs.

A measurement that does not exist yet is drawn from the forecast itself: the fit is repeated with several values that it
may have, and the widths of the intervals that follow are averaged.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tutti import units
from tutti.forecast.advice import Learning, RankOption, draw_rates, known_nodes, make_option
from tutti.forecast.batches import StudiedRecipe
from tutti.forecast.epochs import EpochsCurve, EpochsPoint, NoiseBelief, believe, fit_epochs
from tutti.forecast.forecast import OUTCOMES, FittedCurve, fit_with
from tutti.forecast.laws import Array
from tutti.forecast.link import KnownLink
from tutti.forecast.population import Fabric

STEPS = 120  # of a timed run: 100 after a warm-up
NOISE_STEPS = 400  # one in ten is measured
SEEDS = 3
BEYOND = 4  # times the measured ranks whose hours are asked for where larger batches are open
_LEAST = 0.95  # of the width that a measurement must leave at most to be named


@dataclass(frozen=True)
class NextMeasurement:
    """A measurement with the factor between the ends of the 90 % interval of hours, before and after it."""

    action: str
    command: str
    node_minutes: float
    ranks: int  # whose hours it narrows
    before: float
    after: float

    @property
    def gain(self) -> float:
        """The narrowing of the log of the interval for a node-minute."""
        return math.log(self.before / self.after) / max(self.node_minutes, 0.1)


def measure_next(
    fitted: FittedCurve,
    fabric: Fabric | None,
    recipe: StudiedRecipe,
    learning: Learning,
    option: RankOption,
    link: KnownLink | None = None,
) -> list[NextMeasurement]:
    """The measurements that narrow the hours of an option, the most effective for a node-minute first."""
    open_learning = _opened(learning)
    cheap = make_option(fitted, recipe, learning, _cheapest_ranks(fitted))
    larger = option
    if learning.curve is None and fitted.curve.mode == "weak" and known_nodes(fitted) > 1:
        # Nothing beyond the batches of the study was advised: the question is what a larger one takes.
        larger = make_option(fitted, recipe, open_learning, BEYOND * fitted.curve.measurements[-1].ranks)
    found = [
        *_more_nodes(fitted, fabric, recipe, open_learning, option, link),
        *_noise_scale(recipe, open_learning, larger, cheap),
        *_sweep(recipe, open_learning, larger, cheap),
    ]
    return sorted((each for each in found if each.after < _LEAST * each.before), key=lambda each: -each.gain)


def describe_next(found: Sequence[NextMeasurement], knee_ranks: int) -> str:
    """What to measure next in a sentence, and what would narrow the answer more."""
    if not found:
        return "Nothing that could be measured next would narrow the hours of the knee by more than 5 %."
    first = found[0]
    whose = "the knee" if first.ranks == knee_ranks else units.count(first.ranks, "rank")
    said = (
        f"Measure next: {first.action} ({_show_minutes(first)}), which should narrow the 90 % interval of the hours of "
        f"{whose} from a factor of {first.before:.2f} to {first.after:.2f}: {first.command}"
    )
    best = min(found, key=lambda each: each.after)
    if best is not first:
        said += f"\nMore, at a higher cost: {best.action} ({_show_minutes(best)}), to a factor of {best.after:.2f}."
    return said


def _show_minutes(each: NextMeasurement) -> str:
    if each.node_minutes < 1:
        return "less than a node-minute"
    return f"about {units.count(float(f'{each.node_minutes:.2g}'), 'node-minute')}"


def _opened(learning: Learning) -> Learning:
    """Where nothing is known about epochs, they are as open as the critical batches of published networks."""
    if learning.curve is not None:
        return learning
    return replace(learning, curve=fit_epochs([learning.given], NoiseBelief()))


def _more_nodes(
    fitted: FittedCurve,
    fabric: Fabric | None,
    recipe: StudiedRecipe,
    learning: Learning,
    option: RankOption,
    link: KnownLink | None,
) -> Iterator[NextMeasurement]:
    """The recipe for some steps on more nodes than were measured."""
    curve = fitted.curve
    nodes = (4 if fabric is Fabric.TCP else 2) if curve.most_nodes == 1 else 2 * curve.most_nodes
    if 1 < option.nodes < nodes:
        nodes = option.nodes
    ranks = nodes * curve.ranks_per_node
    if any(each.ranks == ranks for each in curve.measurements):
        return
    # On one node nothing is open about the hours: the question is what several nodes would take.
    asked = ranks if known_nodes(fitted) == 1 else option.ranks
    before = make_option(fitted, recipe, learning, asked)

    def after(quantile: float) -> float:
        more = fit_with(fitted, fabric, nodes, quantile, link)
        return _width(before.hours * before.samples_per_second / draw_rates(more, asked))

    batch = recipe.fixed_batch * (ranks if curve.mode == "weak" else 1)
    minutes = STEPS * batch / curve.throughput(ranks, fitted.log_time(ranks).quantile(0.5)) / 60 * nodes
    yield NextMeasurement(
        f"{STEPS} steps on {units.count(nodes, 'node')}",
        f"tutti scale {_words(recipe)} --ranks {ranks} --mode {curve.mode} --on {recipe.on or 'slurm'} "
        f"--ranks-per-node {curve.ranks_per_node}",
        minutes,
        asked,
        _width(before.hours),
        _mean_width(after),
    )


def _noise_scale(
    recipe: StudiedRecipe, learning: Learning, option: RankOption, cheap: RankOption
) -> Iterator[NextMeasurement]:
    """The noise scale of one epoch."""
    if learning.belief is not None or learning.curve is None:
        return
    curve, points = learning.curve, _points(learning)

    def after(quantile: float) -> float:
        value = curve.noise_quantile(quantile)
        return _with_epochs(option, learning, fit_epochs(points, believe(value, value / 1.2, value * 1.2)))

    epochs = max(1, math.ceil(NOISE_STEPS * cheap.global_batch / recipe.train_samples))
    micro = f" batch.micro={max(1, cheap.global_batch // 4)}" if cheap.ranks == 1 and not recipe.micro_batch else ""
    yield NextMeasurement(
        f"the noise scale in {units.count(epochs, 'epoch')}",
        f"tutti train {_words(recipe)} -n {cheap.ranks} epochs={epochs} batch.global={cheap.global_batch}{micro} "
        "log.noise_scale=true",
        _minutes(cheap) * epochs / float(np.median(cheap.epochs)),
        option.ranks,
        _with_epochs(option, learning, curve),
        _mean_width(after),
    )


def _sweep(
    recipe: StudiedRecipe, learning: Learning, option: RankOption, cheap: RankOption
) -> Iterator[NextMeasurement]:
    """Runs to the target at the batch of the option."""
    curve = learning.curve
    if curve is None:
        return
    batch, points = option.global_batch, _points(learning)

    def after(quantile: float) -> float:
        run = EpochsPoint(batch, curve.quantile(batch, quantile), runs=SEEDS)
        return _with_epochs(option, replace(learning, sweep=None), fit_epochs([*points, run], learning.belief), run)

    target = f" --target {learning.sweep.metric}={learning.sweep.target:g}" if learning.sweep else ""
    growth = float(np.median(learning.draws(batch) / cheap.passes))
    yield NextMeasurement(
        f"{SEEDS} runs at a global batch of {units.count(batch)}",
        f"tutti sweep {_words(recipe)} --set batch.global={cheap.global_batch},{batch} --seeds {SEEDS}{target}",
        SEEDS * _minutes(cheap) * growth,
        option.ranks,
        _with_epochs(option, learning, curve),
        _mean_width(after),
    )


def _words(recipe: StudiedRecipe) -> str:
    return " ".join([recipe.name, *recipe.overrides])


def _points(learning: Learning) -> Sequence[EpochsPoint]:
    return learning.sweep.points() if learning.sweep else [learning.given]


def _with_epochs(
    option: RankOption, learning: Learning, curve: EpochsCurve, measured: EpochsPoint | None = None
) -> float:
    """The width of an option's hours with another posterior of epochs."""
    if measured is not None:
        passes = curve.draws(option.global_batch)
    else:
        passes = replace(learning, curve=curve).draws(option.global_batch)
    return _width(option.hours / option.passes * passes)


def _mean_width(after: Callable[[float], float]) -> float:
    return math.exp(float(np.mean([math.log(after(each)) for each in OUTCOMES])))


def _width(draws: Array) -> float:
    """The upper end of the 90 % interval over the lower one."""
    low, high = np.quantile(draws, (0.05, 0.95))
    return float(high / low)


def _minutes(option: RankOption) -> float:
    return float(np.median(option.hours)) * 60 * option.nodes


def _cheapest_ranks(fitted: FittedCurve) -> int:
    """One full node, or the fewest ranks that were measured."""
    return max(fitted.curve.first.ranks, min(fitted.curve.ranks_per_node, fitted.curve.measurements[-1].ranks))
