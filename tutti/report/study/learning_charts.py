"""The charts of training results: training loss, final metric, time and steps to the goal."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tutti import units
from tutti.report.study.charts import Chart, ChartAxis, Curve, Study, axis_along, log_axis, metric_axis, style_series
from tutti.study.analysis import Setting
from tutti.study.outcome import RunFigures, Summary
from tutti.study.sweep_results import axis_of, axis_words, describe, place
from tutti.units import is_lower_better

_MOST_POINTS = 300  # of a curve; more are not visible
_MOST_RUNS = 60  # above this, one run per setting is drawn


@dataclass(frozen=True)
class CurveStyle:
    """The name, colour and style of the curve of a run."""

    name: str
    colour: int
    style: int
    panel: str = ""


def loss_chart(studies: Sequence[Study]) -> Chart | None:
    """The training loss of every run, or of one run per setting if there are many, over steps or time."""
    found = [each for each in _coloured_runs(studies) if each[1].outcome.losses]
    if not found:
        return None
    is_many = len(found) > _MOST_RUNS
    if is_many:
        firsts = {run.id for study in studies for s in study.analysis.settings for run in _with_losses(s)[:1]}
        found = [each for each in found if each[1].id in firsts]
    curves: list[Curve] = []
    named: set[str] = set()
    for drawn, run in found:
        curves.append(_loss_curve(drawn, run, drawn.name not in named))
        named.add(drawn.name)
    values = [value for curve in curves for value in curve.y if value is not None and value > 0]
    wide = bool(values) and max(values) > 20 * min(values)
    whose = "the first run of each setting" if is_many else "each run"
    return Chart(
        "losses",
        "Training loss",
        f"Mean of each log window, one line for {whose}, over steps or over training time since the first step.",
        ChartAxis("step"),
        log_axis("training loss", values) if wide else ChartAxis("training loss"),
        tuple(curves),
        other_axis=ChartAxis("training time in seconds"),
        switch=("by step", "by time"),
    )


def _with_losses(setting: Setting) -> list[RunFigures]:
    return [run for run in setting.runs if run.outcome.losses]


def _coloured_runs(studies: Sequence[Study]) -> list[tuple[CurveStyle, RunFigures]]:
    """Assigns each run the colour of its number of ranks, or of its series in a sweep."""
    if studies[0].analysis.definition.kind == "sweep":
        return [
            (CurveStyle(each.name, each.colour, each.style, each.panel), run)
            for each in style_series(studies)
            for setting in each.series.settings
            for run in setting.runs
        ]
    ranks = sorted({setting.ranks for study in studies for setting in study.analysis.settings})
    found = []
    for index, study in enumerate(studies):
        for setting in study.analysis.settings:
            words = f"{setting.ranks} rank{'' if setting.ranks == 1 else 's'}"
            name = f"{words}, {study.name}" if len(studies) > 1 else words
            drawn = CurveStyle(name, ranks.index(setting.ranks), index)
            found += [(drawn, run) for run in setting.runs]
    return found


def _loss_curve(drawn: CurveStyle, run: RunFigures, in_legend: bool) -> Curve:
    losses, words = run.outcome.losses, describe(run.outcome.point.values)
    stride = math.ceil(len(losses) / _MOST_POINTS)
    kept = [*losses[:: stride or 1]]
    if kept[-1] != losses[-1]:
        kept.append(losses[-1])
    return Curve(
        drawn.name,
        [step for step, _, _ in kept],
        [loss if math.isfinite(loss) else None for _, _, loss in kept],
        [f"step {step:,}, {units.duration(seconds)}: {loss:.4g}" for step, seconds, loss in kept],
        heading=f"{run.id}: {words}",
        colour=drawn.colour,
        style=drawn.style,
        marks=len(kept) == 1,
        group=drawn.name,
        in_legend=in_legend,
        other_x=[round(seconds, 4) for _, seconds, _ in kept],
        panel=drawn.panel,
    )


_SMALL_RANGE = 0.5  # of the axis: if stable settings span less, there is an enlarged view


def learning_charts(studies: Sequence[Study]) -> list[Chart]:
    """Returns all charts for which the studies have data."""
    found = [_metric(studies), _seconds(studies), _steps(studies), loss_chart(studies)]
    return [chart for chart in found if chart]


def _metric(studies: Sequence[Study]) -> Chart | None:
    """The final metric over the varied key, with a curve for each series."""
    metric = studies[0].analysis.metric
    axis = axis_of(studies[0].analysis)
    if metric is None or axis is None:
        return None
    words = units.metric_title(metric)

    def middle(setting: Setting) -> tuple[Summary, float] | None:
        found = setting.final(metric)
        return (found, found.mean) if found else None

    curves = _summary_curves(studies, axis, middle, lambda found: found.metric(metric))
    crosses = _collapsed(studies, axis, metric, curves)
    if not curves and not crosses:
        return None
    crossed = " Crosses are collapsed runs; those whose loss was not finite have no value and are drawn at the edge."
    return Chart(
        "metric",
        f"Final {words}",
        f"{words.capitalize()} at the end: mean, minimum and maximum over runs.{crossed if crosses else ''}",
        axis_along(axis_words(axis), _places(studies, axis)),
        metric_axis(metric, words),
        (*curves, *crosses),
        close_up=_close_up(studies, metric, (*curves, *crosses)),
    )


def _close_up(studies: Sequence[Study], metric: str, curves: Sequence[Curve]) -> tuple[float, float] | None:
    """Returns the range of the stable settings if collapsed ones take most of the axis."""
    settings = [setting for study in studies for setting in study.analysis.settings]
    held = [found for each in settings if not each.collapsed and (found := each.final(metric))]
    shown = [value for curve in curves for value in curve.y if value is not None]
    if not held:
        return None
    low, high = min(each.low for each in held), max(each.high for each in held)
    if high - low >= _SMALL_RANGE * (max(shown) - min(shown)):
        return None
    margin = 0.06 * (high - low) or 0.01 * abs(high)
    return low - margin, high + margin


def _seconds(studies: Sequence[Study]) -> Chart | None:
    return _to_goal(
        studies, "solution", "Time to solution", "training time in seconds", Setting.seconds_to_goal, units.duration
    )


def _steps(studies: Sequence[Study]) -> Chart | None:
    if studies[0].analysis.definition.goal.target is None:
        return None
    return _to_goal(studies, "steps", "Steps to the target", "steps", Setting.steps_to_goal, units.count)


def _to_goal(
    studies: Sequence[Study],
    id: str,
    title: str,
    unit: str,
    found: Callable[[Setting], Summary | None],
    show: Callable[[float], str],
) -> Chart | None:
    goal, axis = studies[0].analysis.definition.goal, axis_of(studies[0].analysis)
    if axis is None:
        return None

    def middle(setting: Setting) -> tuple[Summary, float] | None:
        summary = found(setting)
        return (summary, summary.median) if summary else None

    def text(summary: Summary) -> str:
        return f"{show(summary.median)} ({show(summary.low)} to {show(summary.high)}, n = {summary.n})"

    curves = _summary_curves(studies, axis, middle, text)
    if not curves:
        return None
    what = "the end of training"
    if goal.metric and goal.target is not None:
        what = f"a {units.metric_title(goal.metric)} of {units.metric(goal.metric, goal.target)}"
    return Chart(
        id,
        title,
        f"Until {what}: median, minimum and maximum over runs; validation and checkpoints are not counted.",
        axis_along(axis_words(axis), _places(studies, axis)),
        log_axis(unit, [value for curve in curves for value in curve.y]),
        tuple(curves),
    )


def _summary_curves(
    studies: Sequence[Study],
    axis: str,
    middle: Callable[[Setting], tuple[Summary, float] | None],
    text: Callable[[Summary], str],
) -> list[Curve]:
    """Returns a curve for each series of each study, with the range over runs."""
    curves: list[Curve] = []
    for placed in style_series(studies):
        series = placed.series
        known = [(setting, *value) for setting in series.settings if (value := middle(setting))]
        if not known:
            continue
        curves.append(
            Curve(
                placed.name,
                [place(setting, axis) for setting, _, _ in known],
                [value for _, _, value in known],
                [f"{series.name}<br>{axis_words(axis)} {units.count(place(s, axis))}: {text(v)}" for s, v, _ in known],
                [summary.low for _, summary, _ in known],
                [summary.high for _, summary, _ in known],
                colour=placed.colour,
                style=placed.style,
                group=placed.name,
                in_legend=placed.name not in {curve.name for curve in curves},
                panel=placed.panel,
            )
        )
    return curves


def _collapsed(studies: Sequence[Study], axis: str, metric: str, curves: Sequence[Curve]) -> list[Curve]:
    """Returns a cross for every collapsed run, in the colour of its series."""
    edge = max((high or 0.0 for curve in curves for high in curve.high or ()), default=0.0)
    worst = edge if is_lower_better(metric) else 0.0
    crosses = []
    for placed in style_series(studies):
        runs = [(setting, run) for setting in placed.series.settings for run in setting.collapsed]
        if runs:
            values = [run.final.get(metric, math.nan) for _, run in runs]
            crosses.append(
                Curve(
                    f"collapsed, {placed.name}",
                    [place(setting, axis) for setting, _ in runs],
                    [value if math.isfinite(value) else worst for value in values],
                    [f"{run.id}, {placed.series.name}, collapsed:<br>{run.collapse}" for _, run in runs],
                    colour=placed.colour,
                    style=placed.style,
                    line=False,
                    crossed=True,
                    group=placed.name,
                    in_legend=placed.name not in {curve.name for curve in curves},
                    panel=placed.panel,
                )
            )
    return crosses


def _places(studies: Sequence[Study], axis: str) -> list[float]:
    return [place(setting, axis) for study in studies for setting in study.analysis.settings]
