"""The search for a learning rate: short runs at rates a factor of about 3 apart, and what their losses recommend.

Light: imports no torch.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tutti import units
from tutti.config.load import resolve
from tutti.errors import ConfigError
from tutti.study.analysis import Analysis, Setting
from tutti.study.definition import Goal
from tutti.study.differences import difference, seeds_needed, seeds_words
from tutti.study.outcome import TRAIN_LOSS, summarise
from tutti.study.sweep import SweepAxis

RATE = "optim.lr"
STEPS = 100  # of each run
_LEAST_STEPS = 10  # whose last tenth is a step
_SIDES = 2  # smaller and larger rates than the best one
_FACTORS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # of the recipe's rate


def rate_goal(steps: int | None) -> Goal:
    """The goal of runs that search for a rate."""
    wanted = STEPS if steps is None else steps
    if wanted < _LEAST_STEPS:
        raise ConfigError(f"--steps {wanted}: expected {_LEAST_STEPS} or more, of which the last tenth is compared.")
    return Goal("rate", wanted)


def add_rates(recipe: str, overrides: Sequence[str], axes: Sequence[SweepAxis]) -> tuple[SweepAxis, ...]:
    """The axes of a search for a rate: those that are given, and rates around that of the recipe if none are."""
    for axis in axes:
        if axis.key == "optim":
            raise ConfigError(
                "--find-rate with --set optim=...: expected optimizers without their rates. Use --set optim.name=..., "
                "or search for the rate of each optimizer in a sweep of its own."
            )
        if axis.key == RATE:
            return tuple(axes)
    lr = resolve(recipe, overrides).config.optim.lr
    return (*axes, SweepAxis(RATE, tuple(f"{lr * factor:.3g}" for factor in _FACTORS)))


@dataclass(frozen=True)
class RateResult:
    """The runs of one rate: the losses of those that trained, and how many did not."""

    rate: float
    losses: tuple[float, ...]
    collapsed: int = 0

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses)


@dataclass(frozen=True)
class RateAdvice:
    """What the runs of all rates say; `rate` is None where no rate trains."""

    rate: float | None
    best: float | None = None  # the rate with the lowest loss
    open: tuple[float, ...] = ()  # rates whose loss cannot be told from the lowest one
    collapses_at: float | None = None  # the first rate above the best one at which a run collapses
    edge: str | None = None  # `largest` or `smallest`, where the best rate may lie beyond those that were tried


def advise_rate(results: Sequence[RateResult]) -> RateAdvice:
    """Returns the rate to use, from the results of rates in rising order.

    It is the one with the lowest loss. If training collapses at the next rate above, it is the rate below, unless its
    loss is higher beyond the spread of seeds: a rate at the limit of stability rarely holds for a longer run.
    """
    trained = [each for each in results if each.losses and not each.collapsed]
    if not trained:
        return RateAdvice(None)
    best = min(trained, key=lambda each: each.mean)
    open_ = _open_around(best, trained)
    above = [each.rate for each in results if each.rate > best.rate and each.collapsed]
    advised = best
    index = list(results).index(best)
    if index + 1 < len(results) and results[index + 1].collapsed:
        below = [each for each in open_ if each.rate < best.rate]
        advised = below[-1] if below else best
    edge = None
    if best is results[-1]:
        edge = "largest"
    elif best is results[0]:
        edge = "smallest"
    return RateAdvice(advised.rate, best.rate, tuple(each.rate for each in open_), min(above, default=None), edge)


def _open_around(best: RateResult, trained: Sequence[RateResult]) -> list[RateResult]:
    """Returns the rates around the best one whose losses cannot be told from its own.

    On each side rates are compared from the farthest to the nearest, until one cannot be told: in this order, which
    does not depend on the losses, only the number of sides multiplies the probability of an error.
    """
    found = []
    for side in ([each for each in trained if each.rate < best.rate], [e for e in trained[::-1] if e.rate > best.rate]):
        told = 0
        while told < len(side) and difference(TRAIN_LOSS, side[told].losses, best.losses, _SIDES):
            told += 1
        found += side[told:]
    return sorted(found, key=lambda each: each.rate)


def read_result(setting: Setting) -> RateResult:
    """The result of one rate, from its runs."""
    return RateResult(float(setting.values[RATE]), tuple(setting.finals(TRAIN_LOSS)), len(setting.collapsed))


def conclude_rates(analysis: Analysis, settings: Sequence[Setting]) -> list[str]:
    """States the recommended rate of a curve, how sure that is, and under which conditions it was found."""
    results = [read_result(each) for each in settings if each.ended]
    if not results:
        return []
    advice = advise_rate(results)
    tried = f"of the {units.count(len(results), 'rate')} from {results[0].rate:g} to {results[-1].rate:g}"
    if advice.rate is None or advice.best is None:
        lower = f"{results[0].rate / 100:.3g},{results[0].rate / 10:.3g}"
        return [f"No rate trains {tried}: every one has a run that collapses. Try --set optim.lr={lower}."]
    by_rate = {each.rate: each for each in results}
    found = [_recommend(advice, by_rate, tried)]
    if advice.edge is not None:
        found.append(_beyond(advice, results))
    if advice.open:
        found.append(_open(advice, by_rate))
    return [*found, _conditions(analysis, settings)]


def _recommend(advice: RateAdvice, by_rate: dict[float, RateResult], tried: str) -> str:
    assert advice.rate is not None and advice.best is not None
    lowest = summarise(by_rate[advice.best].losses)
    assert lowest is not None
    collapse = f"; training collapses at {advice.collapses_at:g}" if advice.collapses_at is not None else ""
    figure = f"the lowest training loss {tried}, {lowest.metric(TRAIN_LOSS)}"
    if advice.rate == advice.best:
        return f"Recommended: optim.lr={advice.rate:g}, which has {figure}{collapse}."
    return (
        f"Recommended: optim.lr={advice.rate:g}. A rate of {advice.best:g} has {figure}, but training collapses at "
        f"{advice.collapses_at:g}, the next one; the loss at {advice.rate:g}, "
        f"{units.metric(TRAIN_LOSS, by_rate[advice.rate].mean)}, cannot be told from it."
    )


def _beyond(advice: RateAdvice, results: Sequence[RateResult]) -> str:
    """States that the best rate may lie outside of those that were tried, and what to try."""
    last = results[-1].rate if advice.edge == "largest" else results[0].rate
    factors = (1, 3, 10, 30) if advice.edge == "largest" else (0.01, 0.03, 0.1, 1)
    more = ",".join(f"{last * factor:.3g}" for factor in factors)
    way = "larger" if advice.edge == "largest" else "smaller"
    return f"It is the {advice.edge} rate that was tried: a {way} one may be better. Try --set optim.lr={more}."


def _open(advice: RateAdvice, by_rate: dict[float, RateResult]) -> str:
    assert advice.best is not None
    best, others = by_rate[advice.best].losses, [by_rate[rate].losses for rate in advice.open]
    needed = [seeds_needed(TRAIN_LOSS, other, best, _SIDES) for other in others]
    enough = [each for each in needed if each is not None]
    more = ""
    if enough:
        more = (
            f" If the losses stay as they are, --seeds {max(enough)} would tell {len(enough)} of {len(others)} from it."
        )
    low, high = min(*advice.open, advice.best), max(*advice.open, advice.best)
    return (
        f"With {seeds_words(best, *others)} the losses from {low:g} to {high:g} cannot be told from the lowest.{more}"
    )


def _conditions(analysis: Analysis, settings: Sequence[Setting]) -> str:
    plan = next((each.plan for each in settings if each.plan), {})
    batch = f"a global batch of {plan['global_batch']:,}, " if plan.get("global_batch") else ""
    return (
        f"This holds for {batch}{units.count(analysis.definition.goal.steps or 0)} steps from the first weights at a "
        "constant rate without warm-up, judged by the training loss of the last tenth. A longer run, a warm-up or a "
        "decay can have another best rate: compare the neighbours of this one in whole runs, with tutti sweep."
    )
