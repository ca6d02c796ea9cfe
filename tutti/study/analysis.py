"""The numbers of a study: runs by setting, and for a scaling study speed-up, efficiency and fits.

Light: imports no torch.
"""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tutti.study.definition import Definition
from tutti.study.efficiency import Scaling, measure_scaling
from tutti.study.links import Links
from tutti.study.outcome import TRAIN_LOSS, PointOutcome, RunFigures, Summary, find_outliers, read_figures, summarise

_FAR = 0.05  # relative distance from the median that an outlier among repeats has at least


@dataclass(frozen=True)
class Setting:
    """Runs that differ only in their repeat and seed."""

    values: Mapping[str, Any]  # the varied values, by key
    ranks: int
    runs: tuple[RunFigures, ...]

    @property
    def finished(self) -> tuple[RunFigures, ...]:
        return tuple(run for run in self.runs if run.outcome.is_finished)

    @property
    def ended(self) -> tuple[RunFigures, ...]:
        """Runs that finished, or failed with a loss that is not finite."""
        return tuple(run for run in self.runs if run.outcome.is_finished or run.collapse)

    @property
    def collapsed(self) -> tuple[RunFigures, ...]:
        return tuple(run for run in self.runs if run.collapse)

    @property
    def plan(self) -> Mapping[str, Any]:
        return next((run.outcome.plan for run in self.runs if run.outcome.plan), {})

    @property
    def speed(self) -> Summary | None:
        """Samples/s over repeats; that of a repeat is the median over its log windows."""
        return summarise([run.speed.median for run in self.finished if run.speed])

    def finals(self, metric: str) -> list[float]:
        return [run.final[metric] for run in self.finished if metric in run.final]

    def final(self, metric: str) -> Summary | None:
        return summarise(self.finals(metric))

    def best(self, metric: str) -> Summary | None:
        return summarise([run.best[metric] for run in self.finished if metric in run.best])

    def seconds_to_goal(self) -> Summary | None:
        return summarise([run.reached.seconds for run in self.finished if run.reached])

    def goal_steps(self) -> list[int]:
        return [run.reached.step for run in self.finished if run.reached]

    def steps_before_goal(self) -> list[int]:
        """The last step of each run at which it was known not to have reached its goal."""
        return [run.reached.after_step for run in self.finished if run.reached]

    def steps_to_goal(self) -> Summary | None:
        return summarise(self.goal_steps())


@dataclass(frozen=True)
class Analysis:
    """The numbers of a study."""

    definition: Definition
    settings: tuple[Setting, ...]
    metric: str | None  # by which runs are compared
    scaling: Scaling | None  # of a scaling study with finished runs
    links: Links | None = None  # the comparison with measured collectives, if any

    @property
    def runs(self) -> tuple[RunFigures, ...]:
        return tuple(run for setting in self.settings for run in setting.runs)

    @property
    def varied(self) -> list[str]:
        """The keys that differ between settings."""
        keys = dict.fromkeys(itertools.chain.from_iterable(setting.values for setting in self.settings))
        return [key for key in keys if len({_plain(setting.values.get(key)) for setting in self.settings}) > 1]


def analyse(definition: Definition, outcomes: Sequence[PointOutcome]) -> Analysis:
    """Analyses a study; points that failed or have not run are included without numbers."""
    groups: dict[str, list[PointOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(_plain([outcome.point.ranks, dict(outcome.point.values)]), []).append(outcome)
    settings = [_setting(definition, group) for group in groups.values()]
    given = [_plain(value) for setting in settings for value in setting.values.values()]
    settings.sort(key=lambda setting: (setting.ranks, [_order(value, given) for value in setting.values.values()]))
    scaling = measure_scaling(definition, outcomes) if definition.kind == "scale" else None
    return Analysis(definition, tuple(settings), _metric(definition, outcomes), scaling)


def _setting(definition: Definition, group: Sequence[PointOutcome]) -> Setting:
    runs = [read_figures(outcome, definition.goal) for outcome in sorted(group, key=lambda each: each.point.repeat)]
    timed = [run for run in runs if run.speed and definition.at_once == 1]
    speeds = [run.speed.median for run in timed if run.speed]
    marked = {run.id for run, is_marked in zip(timed, find_outliers(speeds, _FAR), strict=True) if is_marked}
    runs = [dataclasses.replace(run, is_outlier=run.id in marked) for run in runs]
    return Setting(group[0].point.values, group[0].point.ranks, tuple(runs))


def _metric(definition: Definition, outcomes: Sequence[PointOutcome]) -> str | None:
    """Returns the metric of the goal, else the accuracy, else another, else the loss; None if runs are only timed."""
    if definition.goal.metric is not None or definition.goal.kind == "steps":
        return definition.goal.metric
    if definition.goal.kind == "rate":
        return TRAIN_LOSS
    found = dict.fromkeys(name for each in outcomes for epoch in each.epochs[-1:] for name in epoch.metrics)
    names = sorted(
        (name for name in found if name.startswith("valid_")),
        key=lambda name: (name != "valid_accuracy", name.endswith("loss"), name),
    )
    return names[0] if names else None


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _order(value: Any, given: Sequence[str]) -> tuple[int, float]:
    """Sort key: None first, then numbers by value, then text in the given order."""
    if value is None:
        return 0, 0.0
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (1, float(value)) if is_number else (2, given.index(_plain(value)))
