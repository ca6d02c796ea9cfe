"""The results of a sweep: its settings as curves, and its conclusions as sentences."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tutti import units
from tutti.study.analysis import Analysis, Setting
from tutti.study.differences import MOST_SEEDS, difference, seeds_needed, seeds_words, selected
from tutti.study.outcome import summarise
from tutti.units import count, is_lower_better

_ALONG = ("batch.global", "batch.per_rank", "ranks")  # preferred keys of the horizontal axis
ALL = "all runs"  # the name of the only curve
_WORDS = {"batch.global": "global batch", "batch.per_rank": "batch of a rank", "optim.lr": "learning rate"}


@dataclass(frozen=True)
class Series:
    """A curve: settings that differ only in the key of the horizontal axis."""

    values: Mapping[str, Any]  # the other keys
    name: str
    settings: tuple[Setting, ...]  # along the axis


def axis_of(analysis: Analysis) -> str | None:
    """Returns the key of the horizontal axis: the batch if it is varied, else the number with the most values."""
    varied = analysis.varied
    for key in ("optim.lr",) if analysis.definition.goal.kind == "rate" else _ALONG:
        if key in varied:
            return key
    counts = {
        key: len({setting.values.get(key) for setting in analysis.settings})
        for key in varied
        if _is_number(analysis, key)
    }
    return max(counts, key=lambda key: counts[key]) if counts else None


def find_series(analysis: Analysis) -> list[Series]:
    """Returns all curves in the order of their values; curves have one point each if no key is a number."""
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
    """The position of a setting on the horizontal axis."""
    return setting.ranks if axis == "ranks" else float(setting.values.get(axis) or 0)


def axis_words(axis: str | None) -> str:
    return _WORDS.get(axis or "", axis or "")


def the_axis(axis: str) -> str:
    """The name of the horizontal axis in a sentence."""
    return f"the {_WORDS[axis]}" if axis in _WORDS else axis


def at_place(setting: Setting, axis: str) -> str:
    """The position of a setting on the horizontal axis, in a sentence."""
    value = count(place(setting, axis))
    return f"a {_WORDS[axis]} of {value}" if axis in _WORDS else f"{axis}={value}"


def describe(values: Mapping[str, Any], among: Sequence[Mapping[str, Any]] = ()) -> str:
    """Describes a setting in as few words as distinguish it from `among`: `linear scaling without warm-up, lars`."""
    words = ""
    for key, value in values.items():
        part = _describe_one(key, value, [each.get(key) for each in among])
        words += ("" if not words else " " if part.startswith("with") else ", ") + part
    return words or ALL


def value_words(value: Any, among: Sequence[Any] = ()) -> str:
    """A value as short text; a part by its name, and by the options that differ from others of that name."""
    if not isinstance(value, Mapping):
        if value is None or isinstance(value, bool):
            return "none" if value is None else str(value).lower()
        return f"{value:g}" if isinstance(value, float) else str(value)
    name = value.get("name")
    namesakes = [each for each in among if isinstance(each, Mapping) and each.get("name") == name]
    shown = [key for key in value if key != "name"]
    if name is not None and namesakes:
        shown = [key for key in shown if any(each.get(key) != value[key] for each in namesakes)]
    parts = [f"{key} {value_words(value[key])}" for key in shown]
    return ", ".join(parts if name is None else [str(name), *parts])


def _describe_one(key: str, value: Any, among: Sequence[Any]) -> str:
    if key == "schedule.scaling":
        return "no scaling" if value in ("none", None) else f"{value} scaling"
    if key in ("schedule.warmup_epochs", "schedule.warmup_steps"):
        unit = key.rpartition("_")[2].removesuffix("s")
        return f"with {value:g} {unit}{'' if value == 1 else 's'} of warm-up" if value else "without warm-up"
    if key == "schedule.warmup":
        return f"with a {value} as warm-up"
    if key == "optim.name" or isinstance(value, Mapping):
        return value_words(value, among)
    if key == "ranks":
        return f"{value} rank{'' if value == 1 else 's'}"
    return f"{_WORDS.get(key, key)} {value_words(value)}"


def _is_number(analysis: Analysis, key: str) -> bool:
    values = [setting.values.get(key) for setting in analysis.settings]
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


_MOST_NAMED = 4  # curves in a sentence


def conclude_sweep(analysis: Analysis) -> list[str]:
    """States where training collapses, the best setting, where the metric gets worse, and what reaches the target."""
    axis, series = axis_of(analysis), find_series(analysis)
    found = [*(_collapse(each, axis) for each in series), _stable(series, axis)] if axis else []
    if analysis.metric is not None:
        found.append(_best(analysis, analysis.metric))
        found += _changes(series, axis, analysis.metric) if axis else []
        found.append(_soonest(analysis))
    return [sentence for sentence in found if sentence]


def _collapse(series: Series, axis: str) -> str | None:
    """States from which value on all runs collapse, or where some do."""
    tried = [setting for setting in series.settings if setting.ended]
    some = [setting for setting in tried if setting.collapsed]
    if len(tried) < 2 or not some:
        return None
    first = tried.index(some[0])
    if all(len(setting.collapsed) == len(setting.ended) for setting in tried[first:]):
        beyond = " and beyond" if len(tried) > first + 1 else ", the largest tried"
        runs = "in every run" if max(len(setting.ended) for setting in tried[first:]) > 1 else "in the one run of each"
        return _of(series, f"training collapses at {at_place(some[0], axis)}{beyond}, {runs}.")
    parts = ", ".join(f"{len(s.collapsed)} of {len(s.ended)} at {count(place(s, axis))}" for s in some)
    return _of(series, f"some runs collapse, by {the_axis(axis)}: {parts}.")


def _stable(series: Sequence[Series], axis: str) -> str | None:
    """States the curves in which no run collapses, by the largest value tried."""
    names: dict[float, list[str]] = {}
    fewest = math.inf
    for each in series:
        tried = [setting for setting in each.settings if setting.ended]
        if len(tried) > 1 and not any(setting.collapsed for setting in tried):
            names.setdefault(place(tried[-1], axis), []).append(each.name)
            fewest = min(fewest, *(len(setting.ended) for setting in tried))
    if not names:
        return None
    parts = [f"up to {count(most)}, the largest tried{_named(held, len(series))}" for most, held in names.items()]
    others = ". With one seed each it cannot be told whether other seeds would" if fewest == 1 else ""
    return f"No run collapses at any value of {the_axis(axis)} {'. Also '.join(parts)}{others}."


def _named(held: Sequence[str], of: int) -> str:
    """The names of some curves, or their number."""
    if of == 1:
        return ""
    return f": {'; '.join(held)}" if len(held) <= _MOST_NAMED else f", in {len(held)} of {of} curves"


def _best(analysis: Analysis, metric: str) -> str | None:
    """States the best setting by its mean, and how many cannot be distinguished from it."""
    known = [(s, values) for s in analysis.settings if not s.collapsed and (values := s.finals(metric))]
    if len(known) < 2:
        return None
    sign = -1 if is_lower_better(metric) else 1
    best, values = max(known, key=lambda each: sign * statistics.fmean(each[1]))
    pairs = selected(len(known))
    open_ = [other for s, other in known if s is not best and not difference(metric, values, other, pairs)]
    figure = summarise(values)
    assert figure is not None
    sentence = f"The best final {units.metric_title(metric)} is {figure.metric(metric)}, "
    sentence += _with(_full_name(best, analysis))
    if not open_:
        return f"{sentence}, beyond the spread of seeds{' that is usual' if figure.n == 1 else ''}."
    many = f"{len(open_)} other setting{'s' if len(open_) != 1 else ''}"
    needed = [seeds_needed(metric, values, other, pairs) for other in open_]
    return f"{sentence}; {many} cannot be told from it with {seeds_words(values, *open_)}. {_what_to_run(needed)}"


def _what_to_run(needed: Sequence[int | None]) -> str:
    """States how many seeds would show the differences that are open, if they stay as they are."""
    enough = [each for each in needed if each is not None]
    if not enough:
        return f"For differences this small {MOST_SEEDS} seeds would not be enough."
    which = "" if len(needed) == 1 else f" in {len(enough)} of {len(needed)} cases"
    return f"If the difference stays as it is, --seeds {max(enough)} would show it{which}."


def _changes(series: Sequence[Series], axis: str, metric: str) -> list[str]:
    """States how the metric changes from the smallest to the largest stable value of each curve, or that it is open."""
    curves = []
    for each in series:
        known = [(s, f) for s in each.settings if s.ended and not s.collapsed and (f := s.finals(metric))]
        curves += [(each.name, known)] if len(known) > 1 else []
    moves: dict[int, list[tuple[float, str]]] = {1: [], -1: [], 0: []}
    needed = []
    for name, known in curves:
        (first, before), (last, after) = known[0], known[-1]
        way = difference(metric, after, before, len(curves))
        means = [statistics.fmean(values) for values in (before, after)]
        ends = [
            f"{units.metric(metric, m)} at {count(place(s, axis))}" for s, m in zip((first, last), means, strict=True)
        ]
        if way:
            moves[way].append((abs(means[1] - means[0]), f"from {ends[0]} to {ends[1]}{_with_curve(name)}"))
        else:
            pair = f"{ends[0]}, {ends[1]}{_with_curve(name)} with {seeds_words(before, after)}"
            moves[0].append((abs(means[1] - means[0]), pair))
            needed.append(seeds_needed(metric, after, before, len(curves)))
    title, grows = units.metric_title(metric), f"as {the_axis(axis)} grows"
    found = [
        f"{_capital(title)} {verb} {grows}{_listed(moves[way], len(series))}."
        for way, verb in ((-1, "falls"), (1, "rises"))
        if moves[way]
    ]
    if moves[0]:
        cases = _listed(moves[0], len(series))
        found.append(f"Whether {title} changes {grows} cannot be told{cases}. {_what_to_run(needed)}")
    return found


def _listed(cases: Sequence[tuple[float, str]], of: int) -> str:
    """Curves by the size of their change: all of them, or their number with the largest and the smallest."""
    if len(cases) <= _MOST_NAMED:
        return f": {'; '.join(text for _, text in cases)}"
    (_, least), *_, (_, most) = sorted(cases)
    return f" in {len(cases)} of {of} curves: most {most}; least {least}"


def _soonest(analysis: Analysis) -> str | None:
    """States the setting that reaches the target in the fewest steps, or that it cannot be told."""
    goal = analysis.definition.goal
    if goal.metric is None or goal.target is None:
        return None
    reached = [(s, found) for s in analysis.settings if (found := s.goal_steps())]
    known = [(s, found) for s, found in reached if len(found) == len(s.ended)]
    known.sort(key=lambda each: statistics.median(each[1]))
    target = f"a {units.metric_title(goal.metric)} of {units.metric(goal.metric, goal.target)}"
    if not known:
        return f"No setting reaches {target} in every run."
    best, steps = known[0]
    name, fewest = _capital(_full_name(best, analysis)), count(round(statistics.median(steps)))
    pairs, open_, hidden = selected(len(known)), [], False
    for setting, other in known[1:]:
        between = statistics.fmean(setting.steps_before_goal()) < statistics.fmean(steps)
        if between or not difference("steps", steps, other, pairs, steps=True):
            open_.append(other)
            hidden |= between
    if not open_:
        among = " of the settings that reach it in every run" if len(reached) > len(known) else ""
        return f"{name} reaches {target} in the fewest steps{among}: {fewest}."
    many = "1 other setting needs" if len(open_) == 1 else f"{len(open_)} other settings need"
    validated = ", each validated after whole epochs" if hidden else ""
    return (
        f"{name} reaches {target} in {fewest} steps; whether {many} more cannot be told with "
        f"{seeds_words(steps, *open_)}{validated}."
    )


def _full_name(setting: Setting, analysis: Analysis) -> str:
    axis = axis_of(analysis)
    name = next(each.name for each in find_series(analysis) if setting in each.settings)
    where = at_place(setting, axis) if axis else ""
    return " at ".join(part for part in ("" if name == ALL else name, where) if part)


def _of(series: Series, words: str) -> str:
    """A sentence about one curve, which is named if there are others."""
    return _capital(words if series.name == ALL else f"{series.name}: {words}")


def _with(name: str) -> str:
    return name if name.startswith("with") else f"with {name}"


def _with_curve(name: str) -> str:
    return "" if name == ALL else f" {_with(name)}"


def _capital(words: str) -> str:
    return words if "." in words.partition(" ")[0] else words[:1].upper() + words[1:]  # a key stays as it is
