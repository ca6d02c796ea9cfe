"""What bounds a recipe: one sentence to act on, with the numbers it stands on.

Light: imports no torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tutti.bench.evidence import explain_host, fixed_share, host_share, name_slowest, percent, show_evidence
from tutti.bench.results import Measurement
from tutti.bench.shares import Figure, Shares, device_seconds, find_shares
from tutti.bench.suggestions import Suggestion, largest, suggest

Bound = Literal["reading", "computing", "communication", "slow rank", "host", "memory", "balanced", "unclear"]
_LEAD = 0.1  # of a step: parts that are closer are balanced
_NOISE = 0.4  # of a step: trials that differ more say nothing
_DISSENT = 0.25  # of the trials may find another part the largest, by more than the lead
_HALF = 0.5
_MANY_SYNCHRONISATIONS = {"cuda": 1, "cpu": 10}  # a GPU runs dry at each; on a CPU they are work of the host
_HIGH_HOST_SHARE = 0.3
# Of computing: what it moves, at the speed of large copies, which other operators stay below.
_MOVED = 0.4
_MOVED_ANYWAY = 0.2  # where most of a step does not depend on the batch: weights are what is moved


@dataclass(frozen=True)
class Verdict:
    """What bounds a step, what could be won at most, and what to try."""

    bound: Bound
    sentence: str
    evidence: tuple[str, ...]
    gain: float | None  # at most, as a factor of speed
    suggestions: tuple[Suggestion, ...]
    shares: Shares

    def plain(self) -> dict[str, Any]:
        """As values for JSON."""
        return {
            "bound": self.bound,
            "sentence": self.sentence,
            "evidence": list(self.evidence),
            "gain": self.gain,
            "suggestions": [vars(each) for each in self.suggestions],
            "shares": {name: self.shares.share(name) for name in self.shares.path},
        }


def judge(measurement: Measurement) -> Verdict:
    """The verdict on a measurement."""
    shares = find_shares(measurement)
    bound, doubt = _find_bound(shares)
    refined: Bound = refine(measurement, shares) if bound == "computing" else bound
    suggestions = suggest(measurement, refined, shares)
    gain = _gain(measurement, shares, refined)
    sentence = "; ".join(_clauses(measurement, shares, refined, doubt, gain, suggestions))
    evidence = tuple(show_evidence(measurement, shares))
    return Verdict(refined, sentence, evidence, gain, tuple(suggestions), shares)


def _find_bound(shares: Shares) -> tuple[Bound, str]:
    """The largest part if it leads clearly, and otherwise the reason of the doubt."""
    whole = shares.whole
    if not whole.median:
        return "unclear", "no whole step was measured"
    if whole.relative_spread > _NOISE:
        return "unclear", f"the middle half of {len(whole.trials)} trials differs by {percent(whole.relative_spread)}"
    names = largest(shares)
    first, second = (shares.path[_part(name)] for name in names[:2])
    if _dissent(shares, first):
        return "unclear", "the largest part of a step is another from trial to trial"
    lead = first - second
    if lead.median < _LEAD * whole.median:
        return "balanced", ""
    if lead.median <= lead.spread:
        return "unclear", f"{names[0]} leads {names[1]} by less than the trials differ"
    if names[0] == "slow rank" and not _always_the_same(shares):
        return "unclear", "the slow rank is another from trial to trial"
    return names[0], ""  # pyright: ignore[reportReturnType]


def _part(name: str) -> str:
    return "rest" if name == "host" else name


def _dissent(shares: Shares, first: Figure) -> bool:
    """Whether too many trials find another part the largest, by more than closeness explains."""
    least = _LEAD * shares.whole.median
    others = [figure for figure in shares.path.values() if figure is not first]
    found = [max(parts) - ours > least for ours, *parts in zip(first.trials, *(o.trials for o in others), strict=True)]
    return sum(found) > _DISSENT * len(found)


def _always_the_same(shares: Shares) -> bool:
    return shares.slowest_in.count(shares.slowest) >= (1 - _DISSENT) * len(shares.slowest_in)


def refine(measurement: Measurement, shares: Shares) -> Bound:
    """What bounds computing: the device's arithmetic, its memory, or the host that keeps it busy."""
    flops, moved = (seconds or 0.0 for seconds in device_seconds(measurement))
    work, fixed = measurement.work, fixed_share(shares) or 0.0
    idle = work.host_share if work else None
    least = _MOVED_ANYWAY if fixed >= _HALF else _MOVED
    if (idle or 0) < _HALF and moved > 2 * flops and moved >= least * shares.path["computing"].median:
        return "memory"
    if (idle or 0) >= _HALF or (fixed >= _HALF and (idle is None or idle >= _HIGH_HOST_SHARE)):
        return "host"
    many = _MANY_SYNCHRONISATIONS.get(measurement.device, 1)
    if work and work.synchronisations >= many and (idle or 0) >= _HIGH_HOST_SHARE:
        return "host"
    return "computing"


def _gain(measurement: Measurement, shares: Shares, bound: Bound) -> float | None:
    """How many times as fast a step could be if what bounds it took no more than it must."""
    if bound == "unclear":
        return None
    won = shares.path["computing"].median
    if bound in ("computing", "memory"):
        flops, moved = device_seconds(measurement, fused=True)
        if flops is None or moved is None:
            return None
        won -= max(flops, moved)
    elif bound == "host":
        won = max(0.0, shares.path["rest"].median) + won * host_share(measurement, shares)
    else:
        won = shares.path[_part(largest(shares)[0])].median
    left = shares.whole.median - max(0.0, won)
    return shares.whole.median / left if left > 0 else None


def _clauses(
    measurement: Measurement,
    shares: Shares,
    bound: Bound,
    doubt: str,
    gain: float | None,
    suggestions: Sequence[Suggestion],
) -> Iterator[str]:
    """The sentence: what bounds, how much could be won, what to try."""
    if bound == "unclear":
        yield f"not enough evidence: {doubt}"
        yield "try --trials 9 or a quiet machine"
        return
    yield _reason(measurement, shares, bound)
    if gain is not None:
        yield f"at most {gain:.1f} times as fast" + (" by either alone" if bound == "balanced" else "")
    harmless = [each for each in suggestions if each.changes is None]
    for chosen in (harmless or suggestions)[:1]:
        changes = f" (changes the {chosen.changes})" if chosen.changes else ""
        yield f"try {chosen.text}{changes}" if chosen.overrides else chosen.text


def _reason(measurement: Measurement, shares: Shares, bound: Bound) -> str:
    """What bounds a step, in words and a number."""
    if bound == "balanced":
        first, second = (f"{name} ({percent(shares.share(_part(name)))})" for name in largest(shares)[:2])
        return f"balanced: {first} and {second} take about as long"
    if bound == "reading":
        return f"bound by reading: {percent(shares.share('reading'))} of a step waits for batches"
    if bound == "communication":
        return (
            f"bound by communication: {percent(shares.share('communication'))} of a step waits for averaged gradients"
        )
    if bound == "slow rank":
        waits = f"{percent(shares.share('slow rank'))} of a step waits"
        return f"bound by a slow rank: {waits} for {name_slowest(measurement, shares)}"
    computing = f"{percent(shares.share('computing'))} of a step is computing"
    if bound == "memory":
        moved = device_seconds(measurement)[1] or 0.0
        return (
            f"bound by memory: {computing}, and {percent(moved / shares.path['computing'].median)} of that moves data"
        )
    if bound == "host":
        return f"bound by the host: {explain_host(measurement, shares)}"
    return f"bound by computing: {computing}"
