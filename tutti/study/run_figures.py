"""What one run of a study came to: speed, shares, metrics, when it reached its goal, and whether it collapsed.

Light: imports no torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tutti.config.check import is_lower_better, is_reached
from tutti.runs.step_parts import StepPart
from tutti.study.definition import Goal
from tutti.study.outcome import Outcome, shares_together

_OUTLIER = 3.5  # median absolute deviations, scaled as a standard deviation is
_NORMAL = 1.4826
_NEAR_CHANCE = 1.5  # a final accuracy up to this many times chance is no better than chance
NOT_FINITE = "the loss is not finite"


@dataclass(frozen=True)
class Summary:
    """Several measurements of one thing."""

    n: int
    mean: float
    median: float
    low: float  # the least
    high: float  # the largest
    deviation: float  # standard, 0 for one alone


@dataclass(frozen=True)
class Reached:
    """When a run came to its goal."""

    epoch: int
    step: int
    seconds: float  # of training


@dataclass(frozen=True)
class RunFigures:
    """One run in figures; what was not measured is None or empty."""

    outcome: Outcome
    speed: Summary | None = None  # samples/s, over windows
    outlier_windows: tuple[int, ...] = ()  # by their last step
    is_outlier: bool = False  # among the repeats of its setting
    shares: Mapping[StepPart, float] = field(default_factory=dict)
    final: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, float] = field(default_factory=dict)
    reached: Reached | None = None
    collapse: str | None = None  # why it counts as collapsed

    @property
    def id(self) -> str:
        return self.outcome.point.id


def summarise(values: Sequence[float]) -> Summary | None:
    """The middle and the spread of values; None where there are none."""
    if not values:
        return None
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return Summary(len(values), float(np.mean(values)), float(np.median(values)), min(values), max(values), deviation)


def find_outliers(values: Sequence[float], least: float = 0.01) -> list[bool]:
    """Which of three or more values are away from the median by 3.5 scaled median absolute deviations.

    And by `least` as a part of it: of a few values two are often close by chance, and the third is then far.
    """
    if len(values) < 3:
        return [False] * len(values)
    away = np.abs(np.asarray(values) - np.median(values))
    bound = max(_OUTLIER * _NORMAL * float(np.median(away)), least * abs(float(np.median(values))))
    return (away > bound).tolist()


def read_figures(outcome: Outcome, goal: Goal) -> RunFigures:
    """One run in figures; only of a run that has finished are speed and goal told."""
    if not outcome.is_finished:
        return RunFigures(outcome, collapse=find_collapse(outcome))
    speeds = [window.samples_per_second for window in outcome.windows]
    marked = find_outliers(speeds)
    return RunFigures(
        outcome,
        speed=summarise(speeds),
        outlier_windows=tuple(w.step for w, is_marked in zip(outcome.windows, marked, strict=True) if is_marked),
        shares=shares_together(outcome.windows),
        final=dict(outcome.epochs[-1].metrics) if outcome.epochs else {},
        best=_best(outcome),
        reached=_reached(outcome, goal),
        collapse=find_collapse(outcome),
    )


def find_collapse(outcome: Outcome) -> str | None:
    """Why a run counts as collapsed: a loss that is not finite or above its start, or an accuracy near chance.

    Chance is the accuracy before the first step or exp(-loss) there, which is one in the number of classes,
    whichever is larger.
    """
    losses = [loss for _, _, loss in outcome.losses]
    if outcome.has_diverged or not all(map(math.isfinite, losses)):
        return NOT_FINITE
    if not outcome.is_finished or not outcome.epochs:
        return None
    final, start = outcome.epochs[-1].metrics, outcome.start.get("train_loss", losses[0] if losses else math.inf)
    if not all(map(math.isfinite, final.values())):
        return NOT_FINITE
    if final.get("train_loss", 0.0) > start:
        return f"the training loss ends at {final['train_loss']:.3g}, above its start of {start:.3g}"
    accuracy = final.get("valid_accuracy")
    chance = max(outcome.start.get("valid_accuracy", 0.0), math.exp(-start))
    if accuracy is not None and accuracy <= _NEAR_CHANCE * chance:
        return f"an accuracy of {accuracy:.1%} is near chance, {chance:.1%}"
    return None


def _best(outcome: Outcome) -> dict[str, float]:
    names = outcome.epochs[-1].metrics if outcome.epochs else ()
    values = {name: [epoch.metrics[name] for epoch in outcome.epochs if name in epoch.metrics] for name in names}
    return {name: (min if is_lower_better(name) else max)(found) for name, found in values.items()}


def _reached(outcome: Outcome, goal: Goal) -> Reached | None:
    """The first epoch at the target, or the last one where the whole recipe is the goal."""
    found = outcome.epochs[-1:]
    if goal.metric is not None and goal.target is not None:
        target = {goal.metric: goal.target}
        found = [epoch for epoch in outcome.epochs if is_reached(target, epoch.metrics)]
    elif goal.kind != "full":
        return None
    return Reached(found[0].epoch, found[0].step, found[0].seconds) if found else None
