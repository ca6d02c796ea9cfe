"""Where the curves of a sweep are drawn: a colour and a style each, and panels side by side where they are many."""

from collections.abc import Sequence
from dataclasses import dataclass

from tutti.report.study_charts import Study
from tutti.study.series import ALL, Series, describe, find_series

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
