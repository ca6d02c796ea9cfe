"""The charts of what was learned: final metric, time and steps to the goal, and the curves of the loss."""

import math
from collections.abc import Callable, Sequence

from tutti.report.study_charts import Axis, Chart, Curve, Study, axis_along, log_axis, metric_axis
from tutti.study.analysis import Analysis, Setting
from tutti.study.numbers import count, duration, metric_number, metric_range, metric_words
from tutti.study.run_figures import RunFigures, Summary
from tutti.study.series import ALL, Series, axis_of, axis_words, describe, find_series, place

_MOST_POINTS = 300  # of a curve: more are not seen


def learning_charts(studies: Sequence[Study]) -> list[Chart]:
    """All charts that the studies have figures for."""
    found = [_metric(studies), _seconds(studies), _steps(studies), _losses(studies)]
    return [chart for chart in found if chart]


def _metric(studies: Sequence[Study]) -> Chart | None:
    """The final metric along the batch or whatever is varied, a curve for each rule."""
    metric = studies[0].analysis.metric
    axis = axis_of(studies[0].analysis)
    if metric is None or axis is None:
        return None
    words = metric_words(metric)
    curves = _summary_curves(studies, axis, lambda setting: setting.final(metric), lambda f: metric_range(metric, f))
    if not curves:
        return None
    crosses = [cross for study in studies for cross in _collapsed(study.analysis, axis, metric)]
    return Chart(
        "metric",
        f"Final {words}",
        f"{words.capitalize()} at the end: mean, least and largest over runs. "
        "Crosses are runs that collapsed; those whose loss was not finite have no value and stand at the bottom.",
        axis_along(axis_words(axis), _places(studies, axis)),
        metric_axis(metric, words),
        (*curves, *crosses),
    )


def _seconds(studies: Sequence[Study]) -> Chart | None:
    return _to_goal(
        studies, "solution", "Time to solution", "training time in seconds", Setting.seconds_to_goal, duration
    )


def _steps(studies: Sequence[Study]) -> Chart | None:
    if studies[0].analysis.definition.goal.target is None:
        return None
    return _to_goal(studies, "steps", "Steps to the target", "steps", Setting.steps_to_goal, count)


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

    def text(summary: Summary) -> str:
        return f"{show(summary.median)} ({show(summary.low)} to {show(summary.high)}, n = {summary.n})"

    curves = _summary_curves(studies, axis, found, text)
    if not curves:
        return None
    what = "the end of training"
    if goal.metric and goal.target is not None:
        what = f"a {metric_words(goal.metric)} of {metric_number(goal.metric, goal.target)}"
    return Chart(
        id,
        title,
        f"Until {what}: medians, least and largest over runs; validation and checkpoints are not counted.",
        axis_along(axis_words(axis), _places(studies, axis)),
        log_axis(unit, [value for curve in curves for value in curve.y]),
        tuple(curves),
    )


def _summary_curves(
    studies: Sequence[Study],
    axis: str,
    found: Callable[[Setting], Summary | None],
    text: Callable[[Summary], str],
) -> list[Curve]:
    """A curve for each series of each study, with the range over runs."""
    curves = []
    for index, study in enumerate(studies):
        for series, colour, style in styled_series(study.analysis):
            known = [(setting, value) for setting in series.settings if (value := found(setting))]
            if not known:
                continue
            curves.append(
                Curve(
                    _name(study, series, len(studies)),
                    [place(setting, axis) for setting, _ in known],
                    [value.mean for _, value in known],
                    [f"{series.name}<br>{axis_words(axis)} {count(place(s, axis))}: {text(v)}" for s, v in known],
                    [value.low for _, value in known],
                    [value.high for _, value in known],
                    colour=colour + index,
                    style=style + index,
                    group=series.name,
                )
            )
    return curves


def styled_series(analysis: Analysis) -> list[tuple[Series, int, int]]:
    """Series with a colour by the first key that tells them apart, and a style by the others."""
    found = find_series(analysis)
    heads: dict[str, int] = {}
    tails: dict[str, int] = {}
    styled = []
    for series in found:
        head, *tail = [str(value) for value in series.values.values()] or [""]
        colour = heads.setdefault(head, len(heads))
        style = tails.setdefault(str(tail), len(tails)) if tail else colour
        styled.append((series, colour, style))
    return styled


def _collapsed(analysis: Analysis, axis: str, metric: str) -> list[Curve]:
    """Every run that collapsed as a cross, in the colour of its series."""
    curves = []
    for series, colour, style in styled_series(analysis):
        runs = [(setting, run) for setting in series.settings for run in setting.collapsed]
        if runs:
            values = [run.final.get(metric, math.nan) for _, run in runs]
            curves.append(
                Curve(
                    f"collapsed, {series.name}",
                    [place(setting, axis) for setting, _ in runs],
                    [value if math.isfinite(value) else 0.0 for value in values],
                    [f"{run.id} collapsed:<br>{run.collapse}" for _, run in runs],
                    colour=colour,
                    style=style,
                    line=False,
                    crossed=True,
                    group=series.name,
                    in_legend=False,
                )
            )
    return curves


def _losses(studies: Sequence[Study]) -> Chart | None:
    """The training loss of every run, along steps or along time."""
    curves: list[Curve] = []
    named: set[str] = set()
    for index, study in enumerate(studies):
        for name, colour, style, run in _coloured_runs(study.analysis):
            if run.outcome.losses:
                label = f"{name}, {study.name}" if len(studies) > 1 else name
                curves.append(_loss_curve(label, run, colour, style + index, label not in named))
                named.add(label)
    if not curves:
        return None
    values = [value for curve in curves for value in curve.y if value is not None and value > 0]
    wide = bool(values) and max(values) > 20 * min(values)
    return Chart(
        "losses",
        "Training loss",
        "Means of log windows, a line for each run, along steps or along training time since the first step.",
        Axis("step"),
        log_axis("training loss", values) if wide else Axis("training loss"),
        tuple(curves),
        other_axis=Axis("training time in seconds"),
        switch=("by step", "by time"),
    )


def _coloured_runs(analysis: Analysis) -> list[tuple[str, int, int, RunFigures]]:
    """Runs in the colour of their number of ranks, or of their series in a sweep."""
    if analysis.definition.kind == "scale":
        ranks = {number: index for index, number in enumerate(dict.fromkeys(s.ranks for s in analysis.settings))}
        words = {number: f"{number} rank{'' if number == 1 else 's'}" for number in ranks}
        return [(words[s.ranks], ranks[s.ranks], 0, run) for s in analysis.settings for run in s.runs]
    return [
        (series.name, colour, style, run)
        for series, colour, style in styled_series(analysis)
        for setting in series.settings
        for run in setting.runs
    ]


def _loss_curve(name: str, run: RunFigures, colour: int, style: int, in_legend: bool) -> Curve:
    losses, words = run.outcome.losses, describe(run.outcome.point.values)
    stride = math.ceil(len(losses) / _MOST_POINTS)
    kept = [*losses[:: stride or 1]]
    if kept[-1] != losses[-1]:
        kept.append(losses[-1])
    return Curve(
        name,
        [step for step, _, _ in kept],
        [loss if math.isfinite(loss) else None for _, _, loss in kept],
        [f"{run.id}: {words}<br>step {step:,}, {duration(seconds)}: {loss:.4g}" for step, seconds, loss in kept],
        colour=colour,
        style=style,
        marks=len(kept) == 1,
        group=name,
        in_legend=in_legend,
        other_x=[round(seconds, 4) for _, seconds, _ in kept],
    )


def _places(studies: Sequence[Study], axis: str) -> list[float]:
    return [place(setting, axis) for study in studies for setting in study.analysis.settings]


def _name(study: Study, series: Series, studies: int) -> str:
    if studies == 1:
        return series.name
    return study.name if series.name == ALL else f"{series.name}, {study.name}"
