"""Charts as plain data, drawn by plotly for the page and by matplotlib for papers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tutti import units
from tutti.report.style import COLOURS, NEUTRAL
from tutti.study.analysis import Analysis
from tutti.study.sweep_results import ALL, Series, describe, find_series

NO_COLOUR = -1  # of a reference line, which is grey
LABELLED_TICKS = 12

Number = float | None


@dataclass(frozen=True)
class Study:
    """A study with the name that it has in legends."""

    name: str
    analysis: Analysis


@dataclass(frozen=True)
class ChartAxis:
    """What an axis shows."""

    title: str
    log: bool = False
    percent: bool = False
    ticks: tuple[float, ...] = ()  # where the values are few and known
    least: float | None = None  # where it begins
    most: float | None = None


@dataclass(frozen=True)
class Curve:
    """Points of one kind, or the bars of one part."""

    name: str
    x: Sequence[float | str]
    y: Sequence[Number]
    texts: Sequence[str] = ()  # what a point says of itself
    low: Sequence[Number] | None = None  # ends of the intervals
    high: Sequence[Number] | None = None
    colour: int = 0
    style: int = 0  # of mark and dash
    line: bool = True
    marks: bool = True
    faint: bool = False
    crossed: bool = False  # points that stand for no good value
    group: str = ""  # shown and hidden together
    in_legend: bool = True
    other_x: Sequence[float] | None = None  # along the chart's other axis
    panel: str = ""  # of the chart, by its title
    heading: str = ""  # what all texts begin with


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
    other_axis: ChartAxis | None = None  # a second way to lay the points out along x
    switch: tuple[str, str] = field(default=("", ""))  # the names of both ways
    close_up: tuple[float, float] | None = None  # ends of y between which the details are

    @property
    def panels(self) -> list[str]:
        """The titles of its panels, all with the same axes."""
        return list(dict.fromkeys(curve.panel for curve in self.curves))


def colour_of(index: int) -> str:
    """The colour of a curve by its number."""
    return NEUTRAL if index == NO_COLOUR else COLOURS[index % len(COLOURS)]


def axis_along(title: str, values: Sequence[float], log: bool | None = None) -> ChartAxis:
    """An axis with a tick at each value; logarithmic where they span much."""
    ticks = tuple(sorted(set(values)))
    if log is None:
        log = bool(ticks) and ticks[0] > 0 and ticks[-1] / ticks[0] >= 8
    log = log and bool(ticks) and ticks[0] > 0
    return ChartAxis(title, log, ticks=ticks if len(ticks) <= LABELLED_TICKS else ())


def log_axis(title: str, values: Sequence[Number]) -> ChartAxis:
    """A logarithmic axis with round numbers as ticks: powers of ten, or as many more as it takes to have three.

    Values so close that there are none are left on a plain axis.
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
    """An axis of a metric, in percent where it is a share."""
    return ChartAxis(title, percent=units.is_share(metric))


_MOST_CURVES = 6  # of several keys that are read in one panel
_RULE = "schedule.scaling"  # what is compared within a panel, if it is varied
_MOST_COLOURS = 7


@dataclass(frozen=True)
class Placed:
    """A curve with its place."""

    study: Study
    series: Series
    name: str  # in the legend
    colour: int
    style: int
    panel: str = ""  # empty where there is one


def place_series(studies: Sequence[Study]) -> list[Placed]:
    """All curves of all studies; a second study has the colours of the first in other styles."""
    found = []
    for index, study in enumerate(studies):
        placed = _place(study)
        only, styles = len(placed) == 1, max((each.style for each in placed), default=0) + 1
        for each in placed:
            name = study.name if each.name == ALL else f"{each.name}, {study.name}"
            colour, style = each.colour + (index if only else 0), each.style + index * styles
            found.append(Placed(study, each.series, name if len(studies) > 1 else each.name, colour, style, each.panel))
    return found


def _place(study: Study) -> list[Placed]:
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
        placed.append(Placed(study, series, name, index, index, panel))
    return placed


def _in_one_panel(study: Study, found: Sequence[Series]) -> list[Placed]:
    """A colour by the first key that tells curves apart, and a style by the others."""
    heads: dict[str, int] = {}
    tails: dict[str, int] = {}
    placed = []
    for series in found:
        head, *tail = [str(value) for value in series.values.values()] or [""]
        colour = heads.setdefault(head, len(heads))
        style = tails.setdefault(str(tail), len(tails)) if tail else colour
        placed.append(Placed(study, series, series.name, colour, style))
    return placed


def _curve_key(found: Sequence[Series], keys: Sequence[str]) -> str:
    """The key that tells curves of a panel apart: the rule, else the one with the most values that colours allow."""
    counts = {key: len({str(series.values[key]) for series in found}) for key in keys}
    fitting = [key for key in keys if counts[key] <= _MOST_COLOURS] or list(keys)
    return _RULE if _RULE in keys else max(fitting, key=lambda key: counts[key])
