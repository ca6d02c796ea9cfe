"""Charts as plain data, drawn by plotly for the page and by matplotlib for files."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tutti import units
from tutti.forecast.studies import ProjectChecks, StudyForecast
from tutti.report.style import COLOURS, NEUTRAL
from tutti.study.analysis import Analysis
from tutti.study.sweep_results import ALL, Series, describe, find_series

NO_COLOUR = -1  # a grey reference line
LABELLED_TICKS = 12
BAND_OPACITY = 0.25

Number = float | None


@dataclass(frozen=True)
class Study:
    """A study with its name in legends."""

    name: str
    analysis: Analysis
    forecast: StudyForecast | None = None  # of a scaling study with finished runs
    checks: ProjectChecks = field(default_factory=ProjectChecks)


@dataclass(frozen=True)
class ChartAxis:
    """The title, scale and ticks of an axis."""

    title: str
    log: bool = False
    percent: bool = False
    ticks: tuple[float, ...] = ()  # if the values are few and known
    least: float | None = None  # lower limit
    most: float | None = None  # upper limit


@dataclass(frozen=True)
class Curve:
    """One line of a chart, or the bars of one step part."""

    name: str
    x: Sequence[float | str]
    y: Sequence[Number]
    texts: Sequence[str] = ()  # hover texts
    low: Sequence[Number] | None = None  # ends of the intervals
    high: Sequence[Number] | None = None
    colour: int = 0
    style: int = 0  # of marker and line
    line: bool = True
    marks: bool = True
    faint: bool = False
    crossed: bool = False  # drawn as crosses: outliers and collapsed runs
    group: str = ""  # shown and hidden together
    in_legend: bool = True
    hollow: bool = False  # markers of what was not measured
    band: bool = False  # from low to high as an area, without a line
    other_x: Sequence[float] | None = None  # positions on the chart's other axis
    panel: str = ""  # title of its panel
    heading: str = ""  # prefix of all texts


@dataclass(frozen=True)
class Chart:
    """One picture."""

    id: str
    title: str
    caption: str
    x: ChartAxis
    y: ChartAxis
    curves: tuple[Curve, ...]
    kind: Literal["curves", "bars"] = "curves"
    other_axis: ChartAxis | None = None  # an alternative x axis
    switch: tuple[str, str] = field(default=("", ""))  # the labels of the buttons for both x axes
    close_up: tuple[float, float] | None = None  # limits of y of the enlarged view

    @property
    def panels(self) -> list[str]:
        """The titles of its panels, which share the axes."""
        return list(dict.fromkeys(curve.panel for curve in self.curves))


def colour_of(index: int) -> str:
    """Returns the colour of a curve by its number."""
    return NEUTRAL if index == NO_COLOUR else COLOURS[index % len(COLOURS)]


def axis_along(title: str, values: Sequence[float], log: bool | None = None) -> ChartAxis:
    """Returns an axis with a tick at each value, logarithmic if they span a factor of 8 or more."""
    ticks = tuple(sorted(set(values)))
    if log is None:
        log = bool(ticks) and ticks[0] > 0 and ticks[-1] / ticks[0] >= 8
    log = log and bool(ticks) and ticks[0] > 0
    return ChartAxis(title, log, ticks=ticks if len(ticks) <= LABELLED_TICKS else ())


def log_axis(title: str, values: Sequence[Number]) -> ChartAxis:
    """Returns a logarithmic axis with at least three round numbers as ticks.

    The axis is linear if the values are too close for that.
    """
    known = [value for value in values if value is not None and value > 0]
    if not known:
        return ChartAxis(title)
    first, last = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    for digits in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        ticks = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
        around = [tick for tick in ticks if 0.7 * min(known) <= tick <= 1.4 * max(known)]
        if len(around) > 2 and sum(min(known) <= tick <= max(known) for tick in around) > 1:
            return ChartAxis(title, log=True, ticks=tuple(around))
    return ChartAxis(title)


def metric_axis(metric: str, title: str) -> ChartAxis:
    """Returns the axis of a metric, in percent for an accuracy."""
    return ChartAxis(title, percent=units.is_share(metric))


_MOST_CURVES = 6  # in one panel, if several keys are varied
_RULE = "schedule.scaling"  # the key that is preferably compared within a panel
_MOST_COLOURS = 7


@dataclass(frozen=True)
class StyledSeries:
    """A curve with its colour, style and panel."""

    study: Study
    series: Series
    name: str  # in the legend
    colour: int
    style: int
    panel: str = ""  # empty if there is only one


def style_series(studies: Sequence[Study]) -> list[StyledSeries]:
    """Assigns colours, styles and panels to all curves; a second study has the same colours in other styles."""
    found = []
    for index, study in enumerate(studies):
        placed = _place(study)
        only, styles = len(placed) == 1, max((each.style for each in placed), default=0) + 1
        for each in placed:
            name = study.name if each.name == ALL else f"{each.name}, {study.name}"
            colour, style = each.colour + (index if only else 0), each.style + index * styles
            found.append(
                StyledSeries(study, each.series, name if len(studies) > 1 else each.name, colour, style, each.panel)
            )
    return found


def _place(study: Study) -> list[StyledSeries]:
    found = find_series(study.analysis)
    keys = list(found[0].values) if found else []
    if len(found) <= _MOST_CURVES or len(keys) < 2:
        return _in_one_panel(study, found)
    along = _curve_key(found, keys)
    among = [series.values for series in found]
    names: dict[str, int] = {}
    placed = []
    for series in found:
        name = describe({along: series.values[along]}, among)
        panel = describe({key: series.values[key] for key in keys if key != along}, among)
        index = names.setdefault(name, len(names))
        placed.append(StyledSeries(study, series, name, index, index, panel))
    return placed


def _in_one_panel(study: Study, found: Sequence[Series]) -> list[StyledSeries]:
    """Assigns a colour by the first varied key and a style by the others."""
    heads: dict[str, int] = {}
    tails: dict[str, int] = {}
    placed = []
    for series in found:
        head, *tail = [str(value) for value in series.values.values()] or [""]
        colour = heads.setdefault(head, len(heads))
        style = tails.setdefault(str(tail), len(tails)) if tail else colour
        placed.append(StyledSeries(study, series, series.name, colour, style))
    return placed


def _curve_key(found: Sequence[Series], keys: Sequence[str]) -> str:
    """Returns the key that distinguishes curves within a panel: _RULE, else the one with the most values up to 7."""
    counts = {key: len({str(series.values[key]) for series in found}) for key in keys}
    fitting = [key for key in keys if counts[key] <= _MOST_COLOURS] or list(keys)
    return _RULE if _RULE in keys else max(fitting, key=lambda key: counts[key])
