"""The search of `tutti tune`: which changes were tried, which were kept and why, and which is tried next."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tutti import units
from tutti.bench.results import Measurement
from tutti.bench.shares import Figure
from tutti.bench.suggestions import Suggestion, name_part, suggest
from tutti.bench.verdict import judge, refine
from tutti.runs.step_parts import StepPart

ALLOWED = ("precision", "batch")
_LEAST_GAIN = 0.02
_WORTH = 0.05  # of a step: for smaller gains nothing is tried
_AT_START = ("runtime.binding",)  # what ranks do once, before anything is measured


@dataclass(frozen=True)
class TriedChange:
    """One change that was tried in addition to those kept before; the first entry is the unchanged recipe."""

    overrides: tuple[str, ...]
    why: str
    before: Figure | None  # samples/s of all ranks
    after: Figure | None  # None where it failed
    kept: bool
    outcome: str
    verdict: str  # the sentence about the best configuration so far, after this change

    @property
    def name(self) -> str:
        return " ".join(self.overrides) or "as it is"

    @property
    def gain(self) -> float | None:
        """The speed-up of this change, as a factor."""
        if self.before is None or self.after is None or not self.before.median:
            return None
        return self.after.median / self.before.median

    def content(self) -> dict[str, Any]:
        """The change as it is written to `tune.json`."""
        speeds = {name: figure and list(figure.trials) for name, figure in vars(self).items() if name in _SPEEDS}
        return vars(self) | speeds | {"gain": self.gain, "samples_per_second": self.after and self.after.median}


_SPEEDS = ("before", "after")


class GreedySearch:
    """Starts with an unchanged recipe, and compares every change with the best configuration so far."""

    def __init__(self, first: Measurement, allow: Collection[str] = ()) -> None:
        self._allow = allow
        self._tried: dict[tuple[str, ...], tuple[int, bool]] = {}  # the changes kept by then, and whether it failed
        self._changes = 0
        self._measured: list[dict[str, str]] = [{}]
        self.kept: dict[str, str] = {}  # values by key
        self.best, self.verdict = first, judge(first)
        self.tried = [TriedChange((), "", None, self.speed, True, "", self.verdict.sentence)]

    @property
    def speed(self) -> Figure:
        """Samples per second of the best configuration so far."""
        return self.verdict.shares.samples_per_second

    @property
    def gain(self) -> float:
        """The speed-up of the best configuration over the unchanged recipe, as a factor."""
        first = self.tried[0].after
        return self.speed.median / first.median if first and first.median else 1.0

    def next(self) -> Suggestion | None:
        """The change to try next: first for what limits the best configuration, then for other parts that would gain.

        When all changes have been tried, those that did not help before the last kept change are tried again.
        """
        open_ones = [each for each in self._candidates() if self._can_try(each)]
        new = [each for each in open_ones if each.overrides not in self._tried]
        return next(iter(new or [each for each in open_ones if self._may_help_now(each)]), None)

    def overrides_with(self, suggestion: Suggestion) -> tuple[str, ...]:
        """All overrides with which a suggestion is tried."""
        return _texts(self.kept | _values(suggestion.overrides))

    def note(self, suggestion: Suggestion, found: Measurement | str) -> TriedChange:
        """Record a suggestion that was tried; it is kept if it helps. `found` is its measurement, or why it failed."""
        before = self.speed
        self._tried[suggestion.overrides] = (self._changes, isinstance(found, str))
        self._measured.append(self.kept | _values(suggestion.overrides))
        if isinstance(found, str):
            return self._add(suggestion, before, None, False, f"failed: {found.splitlines()[0] if found else '?'}")
        verdict = judge(found)
        after = verdict.shares.samples_per_second
        kept, outcome = compare(before, after)
        if kept:
            self.kept |= _values(suggestion.overrides)
            self._changes += 1
            self.best, self.verdict = found, verdict
        return self._add(suggestion, before, after, kept, outcome)

    def left(self) -> list[str]:
        """Suggestions for the best configuration that were not tried, and how to try them."""
        return list(dict.fromkeys(filter(None, map(self._why_not, self._candidates()))))

    def _add(self, tried: Suggestion, before: Figure, after: Figure | None, kept: bool, outcome: str) -> TriedChange:
        self.tried.append(TriedChange(tried.overrides, tried.why, before, after, kept, outcome, self.verdict.sentence))
        return self.tried[-1]

    def _candidates(self) -> Iterator[Suggestion]:
        shares, what_if = self.verdict.shares, self.verdict.what_if
        yield from self.verdict.suggestions
        for part in what_if.ranked:
            if what_if.gain(part).median >= _WORTH * what_if.whole.median:
                if part is StepPart.COMPUTE:
                    yield from suggest(self.best, refine(self.best, shares), shares)
                yield from suggest(self.best, name_part(part), shares)

    def _can_try(self, suggestion: Suggestion) -> bool:
        if not suggestion.overrides or suggestion.overrides[0].startswith(_AT_START):
            return False
        if suggestion.changes and suggestion.changes not in self._allow:
            return False
        return self.kept | _values(suggestion.overrides) not in self._measured

    def _may_help_now(self, suggestion: Suggestion) -> bool:
        changes, failed = self._tried[suggestion.overrides]
        return not failed and changes < self._changes

    def _why_not(self, suggestion: Suggestion) -> str | None:
        if not suggestion.overrides:
            return suggestion.why
        if suggestion.overrides[0].startswith(_AT_START):
            return (
                f"{suggestion.text}: {suggestion.why}; ranks do that when they start: compare two runs of tutti bench"
            )
        if suggestion.changes and suggestion.changes not in self._allow:
            return f"{suggestion.text}: {suggestion.why}; may be tried with --allow {suggestion.changes}"
        return None


def compare(before: Figure, after: Figure) -> tuple[bool, str]:
    """Whether a change is faster by more than the spread of the trials, and its outcome in words."""
    noise = max(math.hypot(before.spread, after.spread), _LEAST_GAIN * before.median)
    more = after.median - before.median
    if more > noise:
        return True, "kept"
    if more < -noise:
        return False, "slower"
    return False, f"within the noise of {units.percent(noise / before.median)}" if before.median else "not measured"


def _values(overrides: Sequence[str]) -> dict[str, str]:
    return {key: value for key, _, value in (text.partition("=") for text in overrides)}


def _texts(values: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in values.items())
