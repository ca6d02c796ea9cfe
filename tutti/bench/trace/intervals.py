"""Arithmetic of time: pieces of it as sorted intervals that do not overlap, and who holds each moment of a thread."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from tutti.bench.trace.read import Span, Track

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The moments that are in any of them."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def intersect(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """The moments that are in both; each side is a union."""
    found: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            found.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def subtract(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """The moments of the left that are not in the right; each side is a union."""
    if not left:
        return []
    outside: list[Interval] = []
    at = left[0][0]
    for begin, end in right:
        outside.append((at, begin))
        at = max(at, end)
    outside.append((at, max(at, left[-1][1])))
    return intersect(left, [part for part in outside if part[0] < part[1]])


def total(intervals: Iterable[Interval]) -> int:
    return sum(end - begin for begin, end in intervals)


def by_track(spans: Iterable[Span]) -> dict[Track, list[Span]]:
    """Spans by the thread or stream that they are of."""
    found: dict[Track, list[Span]] = defaultdict(list)
    for span in spans:
        found[span.track].append(span)
    return found


def innermost(spans: Iterable[Span]) -> Iterator[tuple[int, int, Span]]:
    """The pieces of one track's time, each with the innermost span that holds it.

    A span that outlasts the one around it, which clocks and threads can make it seem to do, is cut where that ends.
    """
    stack: list[tuple[Span, int]] = []  # with the end of each, not after that of the one around it
    at = 0
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        while stack and stack[-1][1] <= span.begin:
            holder, end = stack.pop()
            if at < end:
                yield at, end, holder
            at = max(at, end)
        if stack and at < span.begin:
            yield at, span.begin, stack[-1][0]
        at = max(at, span.begin)
        stack.append((span, min(span.end, stack[-1][1]) if stack else span.end))
    while stack:
        holder, end = stack.pop()
        if at < end:
            yield at, end, holder
        at = max(at, end)
