"""The settings of a sweep as curves: what is along the axis, what tells one curve from another, and their names.

Light: imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tutti.study.analysis import Analysis, Setting
from tutti.study.numbers import count

_ALONG = ("batch.global", "batch.per_rank", "ranks")  # what is looked at first
ALL = "all runs"  # the name of the only curve
_WORDS = {"batch.global": "global batch", "batch.per_rank": "batch of a rank", "optim.lr": "learning rate"}


@dataclass(frozen=True)
class Series:
    """A curve: settings that differ by what is along the axis alone."""

    values: Mapping[str, Any]  # what tells it from others
    name: str
    settings: tuple[Setting, ...]  # along the axis


def axis_of(analysis: Analysis) -> str | None:
    """The key along the axis: the batch where it is varied, else the number with the most values."""
    varied = analysis.varied
    for key in _ALONG:
        if key in varied:
            return key
    counts = {
        key: len({setting.values.get(key) for setting in analysis.settings})
        for key in varied
        if _is_number(analysis, key)
    }
    return max(counts, key=lambda key: counts[key]) if counts else None


def find_series(analysis: Analysis) -> list[Series]:
    """All curves, in the order of their values; one point each where nothing is a number."""
    axis = axis_of(analysis)
    keys = [key for key in analysis.varied if key != axis]
    among = [setting.values for setting in analysis.settings]
    groups: dict[str, list[Setting]] = {}
    for setting in analysis.settings:
        groups.setdefault(describe({key: setting.values.get(key) for key in keys}, among), []).append(setting)
    return [
        Series(
            {key: group[0].values.get(key) for key in keys},
            name,
            tuple(sorted(group, key=lambda each: place(each, axis) if axis else 0)),
        )
        for name, group in groups.items()
    ]


def place(setting: Setting, axis: str) -> float:
    """Where a setting is along the axis."""
    return setting.ranks if axis == "ranks" else float(setting.values.get(axis) or 0)


def axis_words(axis: str | None) -> str:
    return _WORDS.get(axis or "", axis or "")


def the_axis(axis: str) -> str:
    """What is along the axis, in a sentence; a key without words of its own as it is typed."""
    return f"the {_WORDS[axis]}" if axis in _WORDS else axis


def at_place(setting: Setting, axis: str) -> str:
    """Where a setting is along the axis, in a sentence."""
    value = count(place(setting, axis))
    return f"a {_WORDS[axis]} of {value}" if axis in _WORDS else f"{axis}={value}"


def describe(values: Mapping[str, Any], among: Sequence[Mapping[str, Any]] = ()) -> str:
    """A setting in words, as short as tells it from those that it is among: linear scaling without warm-up, lars."""
    words = ""
    for key, value in values.items():
        part = _describe_one(key, value, [each.get(key) for each in among])
        words += ("" if not words else " " if part.startswith("with") else ", ") + part
    return words or ALL


def value_words(value: Any, among: Sequence[Any] = ()) -> str:
    """A value in few letters; a part by its name, and by what tells it from others of that name."""
    if not isinstance(value, Mapping):
        if value is None or isinstance(value, bool):
            return "none" if value is None else str(value).lower()
        return f"{value:g}" if isinstance(value, float) else str(value)
    name = value.get("name")
    namesakes = [each for each in among if isinstance(each, Mapping) and each.get("name") == name]
    told = [key for key in value if key != "name"]
    if name is not None and namesakes:
        told = [key for key in told if any(each.get(key) != value[key] for each in namesakes)]
    parts = [f"{key} {value_words(value[key])}" for key in told]
    return ", ".join(parts if name is None else [str(name), *parts])


def _describe_one(key: str, value: Any, among: Sequence[Any]) -> str:
    if key == "schedule.scaling":
        return "no scaling" if value in ("none", None) else f"{value} scaling"
    if key in ("schedule.warmup_epochs", "schedule.warmup_steps"):
        unit = key.rpartition("_")[2].removesuffix("s")
        return f"with {value:g} {unit}{'' if value == 1 else 's'} of warm-up" if value else "without warm-up"
    if key == "optim.name" or isinstance(value, Mapping):
        return value_words(value, among)
    if key == "ranks":
        return f"{value} rank{'' if value == 1 else 's'}"
    return f"{_WORDS.get(key, key)} {value_words(value)}"


def _is_number(analysis: Analysis, key: str) -> bool:
    values = [setting.values.get(key) for setting in analysis.settings]
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
