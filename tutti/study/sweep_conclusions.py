"""What a sweep shows in plain sentences: where training collapses, which setting is best, what a larger batch costs.

Light: imports no torch.
"""

from collections.abc import Sequence

from tutti.config.check import is_lower_better
from tutti.study.analysis import Analysis, Setting
from tutti.study.numbers import count, metric_number, metric_range, metric_words
from tutti.study.run_figures import Summary
from tutti.study.series import ALL, Series, at_place, axis_of, find_series, place, the_axis

_MOST_NAMED = 4  # curves in a sentence


def conclude_sweep(analysis: Analysis) -> list[str]:
    """Where curves collapse or hold, the best setting, the curves that fall, the first to reach the target."""
    axis, series = axis_of(analysis), find_series(analysis)
    found = [*(_collapse(each, axis) for each in series), _holds(series, axis)] if axis else []
    if analysis.metric is not None:
        found.append(_best(analysis, analysis.metric))
        found += [_changes(series, axis, analysis.metric)] if axis else []
        found.append(_soonest(analysis))
    return [sentence for sentence in found if sentence]


def is_better(metric: str, one: Summary | None, other: Summary | None) -> bool:
    """Whether every run of one is better than every run of the other, of two or more each."""
    if one is None or other is None or min(one.n, other.n) < 2:
        return False
    return one.high < other.low if is_lower_better(metric) else one.low > other.high


def _collapse(series: Series, axis: str) -> str | None:
    """From where on all runs collapse, or where some do."""
    tried = [setting for setting in series.settings if setting.ended]
    some = [setting for setting in tried if setting.collapsed]
    if len(tried) < 2 or not some:
        return None
    first = tried.index(some[0])
    if all(len(setting.collapsed) == len(setting.ended) for setting in tried[first:]):
        beyond = " and beyond" if len(tried) > first + 1 else ", the largest tried"
        return _of(series, f"training collapses at {at_place(some[0], axis)}{beyond}, in every run.")
    parts = ", ".join(f"{len(s.collapsed)} of {len(s.ended)} at {count(place(s, axis))}" for s in some)
    return _of(series, f"some runs collapse, by {the_axis(axis)}: {parts}.")


def _holds(series: Sequence[Series], axis: str) -> str | None:
    """The curves in which no run collapses, by the largest value that was tried."""
    names: dict[float, list[str]] = {}
    for each in series:
        tried = [setting for setting in each.settings if setting.ended]
        if len(tried) > 1 and not any(setting.collapsed for setting in tried):
            names.setdefault(place(tried[-1], axis), []).append(each.name)
    parts = [f"up to {count(most)}, the largest tried{_named(held, len(series))}" for most, held in names.items()]
    return f"Training holds for all values of {the_axis(axis)} {'. Also '.join(parts)}." if parts else None


def _named(held: Sequence[str], of: int) -> str:
    """The names of some curves, or how many they are of all."""
    if of == 1:
        return ""
    return f": {'; '.join(held)}" if len(held) <= _MOST_NAMED else f", in {len(held)} of {of} curves"


def _best(analysis: Analysis, metric: str) -> str | None:
    """The best setting by its mean, and how many are as good within their ranges."""
    known = [(s, found) for s in analysis.settings if not s.collapsed and (found := s.final(metric))]
    if len(known) < 2:
        return None
    sign = -1 if is_lower_better(metric) else 1
    best, figure = max(known, key=lambda each: sign * each[1].mean)
    near = sum(not is_better(metric, figure, found) for setting, found in known if setting is not best)
    rest = f"; {near} other setting{'s are' if near != 1 else ' is'} as good within the range of runs" if near else ""
    value, name = metric_range(metric, figure), _full_name(best, analysis)
    return f"The best final {metric_words(metric)} is {value}, {_with(name)}{rest}."


def _changes(series: Sequence[Series], axis: str, metric: str) -> str | None:
    """What the largest value that holds costs against the smallest, curve by curve."""
    falls = []
    for each in series:
        known = [(s, found) for s in each.settings if s.ended and not s.collapsed and (found := s.final(metric))]
        if len(known) > 1 and is_better(metric, known[0][1], known[-1][1]):
            ends = [f"{metric_number(metric, f.mean)} at {count(place(s, axis))}" for s, f in (known[0], known[-1])]
            by = abs(known[0][1].mean - known[-1][1].mean)
            falls.append((by, f"from {ends[0]} to {ends[1]} {_with(each.name)}"))
    moves = "rises" if is_lower_better(metric) else "falls"
    words = f"{_capital(metric_words(metric))} {moves} as {the_axis(axis)} grows"
    if len(falls) > _MOST_NAMED:
        (_, least), *_, (_, most) = sorted(falls)
        return f"{words} in {len(falls)} of {len(series)} curves: most {most}; least {least}."
    return f"{words}: {'; '.join(text for _, text in falls)}." if falls else None


def _soonest(analysis: Analysis) -> str | None:
    """The setting that needs the fewest steps to the target, where that is plain."""
    goal = analysis.definition.goal
    if goal.metric is None or goal.target is None:
        return None
    known = [(s, found) for s in analysis.settings if (found := s.steps_to_goal()) and found.n == len(s.ended)]
    known.sort(key=lambda each: each[1].median)
    target = f"a {metric_words(goal.metric)} of {metric_number(goal.metric, goal.target)}"
    if not known:
        return f"No setting reaches {target} in every run."
    best, steps = known[0]
    if len(known) > 1 and steps.high >= known[1][1].low:
        return None
    return f"{_capital(_full_name(best, analysis))} reaches {target} in the fewest steps: {count(round(steps.median))}."


def _full_name(setting: Setting, analysis: Analysis) -> str:
    axis = axis_of(analysis)
    name = next(each.name for each in find_series(analysis) if setting in each.settings)
    where = at_place(setting, axis) if axis else ""
    return " at ".join(part for part in ("" if name == ALL else name, where) if part)


def _of(series: Series, words: str) -> str:
    """A sentence about one curve, which is named where there are others."""
    return _capital(words if series.name == ALL else f"{series.name}: {words}")


def _with(name: str) -> str:
    return name if name.startswith("with") else f"with {name}"


def _capital(words: str) -> str:
    return words if "." in words.partition(" ")[0] else words[:1].upper() + words[1:]  # a key stays as it is
