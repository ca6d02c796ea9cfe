"""The chart of the training loss, a line for each run, along steps or along time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tutti.report.study_charts import Axis, Chart, Curve, Study, log_axis
from tutti.report.study_layout import place_series
from tutti.study.analysis import Setting
from tutti.study.numbers import duration
from tutti.study.run_figures import RunFigures
from tutti.study.series import describe

_MOST_POINTS = 300  # of a curve: more are not seen
_MOST_RUNS = 60  # that are all drawn


@dataclass(frozen=True)
class Look:
    """How the curve of a run is drawn, and what it is called."""

    name: str
    colour: int
    style: int
    panel: str = ""


def loss_chart(studies: Sequence[Study]) -> Chart | None:
    """The training loss of every run, or of one of each setting where they are many, along steps or along time."""
    found = [each for each in _coloured_runs(studies) if each[1].outcome.losses]
    if not found:
        return None
    is_many = len(found) > _MOST_RUNS
    if is_many:
        firsts = {run.id for study in studies for s in study.analysis.settings for run in _with_losses(s)[:1]}
        found = [each for each in found if each[1].id in firsts]
    curves: list[Curve] = []
    named: set[str] = set()
    for look, run in found:
        curves.append(_loss_curve(look, run, look.name not in named))
        named.add(look.name)
    values = [value for curve in curves for value in curve.y if value is not None and value > 0]
    wide = bool(values) and max(values) > 20 * min(values)
    whose = "the first run of each setting" if is_many else "each run"
    return Chart(
        "losses",
        "Training loss",
        f"Means of log windows, a line for {whose}, along steps or along training time since the first step.",
        Axis("step"),
        log_axis("training loss", values) if wide else Axis("training loss"),
        tuple(curves),
        other_axis=Axis("training time in seconds"),
        switch=("by step", "by time"),
    )


def _with_losses(setting: Setting) -> list[RunFigures]:
    return [run for run in setting.runs if run.outcome.losses]


def _coloured_runs(studies: Sequence[Study]) -> list[tuple[Look, RunFigures]]:
    """Runs in the colour of their number of ranks, or of their series in a sweep."""
    if studies[0].analysis.definition.kind == "sweep":
        return [
            (Look(each.name, each.colour, each.style, each.panel), run)
            for each in place_series(studies)
            for setting in each.series.settings
            for run in setting.runs
        ]
    ranks = sorted({setting.ranks for study in studies for setting in study.analysis.settings})
    found = []
    for index, study in enumerate(studies):
        for setting in study.analysis.settings:
            words = f"{setting.ranks} rank{'' if setting.ranks == 1 else 's'}"
            name = f"{words}, {study.name}" if len(studies) > 1 else words
            look = Look(name, ranks.index(setting.ranks), index)
            found += [(look, run) for run in setting.runs]
    return found


def _loss_curve(look: Look, run: RunFigures, in_legend: bool) -> Curve:
    losses, words = run.outcome.losses, describe(run.outcome.point.values)
    stride = math.ceil(len(losses) / _MOST_POINTS)
    kept = [*losses[:: stride or 1]]
    if kept[-1] != losses[-1]:
        kept.append(losses[-1])
    return Curve(
        look.name,
        [step for step, _, _ in kept],
        [loss if math.isfinite(loss) else None for _, _, loss in kept],
        [f"step {step:,}, {duration(seconds)}: {loss:.4g}" for step, seconds, loss in kept],
        heading=f"{run.id}: {words}",
        colour=look.colour,
        style=look.style,
        marks=len(kept) == 1,
        group=look.name,
        in_legend=in_legend,
        other_x=[round(seconds, 4) for _, seconds, _ in kept],
        panel=look.panel,
    )
