"""Times in which nothing ran, and what the host did meanwhile."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tutti.bench.trace_intervals import Interval, innermost
from tutti.bench.traces import Span

PARTS = ("batch", "forward", "backward", "update", "log")  # of a step, in its order
_MOST_GAPS = 5


@dataclass(frozen=True)
class Gap:
    """A time in which nothing ran, and what the host was in meanwhile."""

    step: int
    part: str
    nanoseconds: int
    meanwhile: str


def longest_gaps(idle: Sequence[Interval], spans: Sequence[Span], steps: Mapping[int, Span]) -> list[Gap]:
    """The longest of idle times, each with its step and the part of it."""
    main = next(iter(steps.values())).track
    host = [span for span in spans if span.track == main and span.is_on_host and span.kind != "overhead"]
    parts = [span for span in host if span.name in PARTS and span.kind == "user_annotation"]
    pieces = list(innermost(host))
    gaps = []
    for begin, end in sorted(idle, key=lambda gap: gap[0] - gap[1])[:_MOST_GAPS]:
        step = next((number for number, span in steps.items() if span.begin <= begin < span.end), max(steps))
        part = max(parts, key=lambda span: _shared(span, begin, end), default=None)
        if part is None or _shared(part, begin, end) <= 0:
            gaps.append(Gap(step, "between its parts", end - begin, _meanwhile(pieces, begin, end)))
            continue
        meanwhile = _meanwhile(pieces, max(begin, part.begin), min(end, part.end))
        gaps.append(Gap(step, part.name, end - begin, meanwhile))
    return gaps


def _meanwhile(pieces: Iterable[tuple[int, int, Span]], begin: int, end: int) -> str:
    """What held most of a gap on the main thread; inside a mere range, it is code between operators."""
    longest: dict[str, int] = defaultdict(int)
    for left, right, span in pieces:
        if left < end and right > begin:
            is_range = span.kind == "user_annotation"
            longest[f"Python in {span.name}" if is_range else span.name] += min(right, end) - max(left, begin)
    return max(longest, key=lambda name: longest[name], default="nothing that was traced")


def _shared(span: Span, begin: int, end: int) -> int:
    return min(span.end, end) - max(span.begin, begin)
