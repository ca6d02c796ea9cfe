"""Traces of torch's profiler as spans of time, and the arithmetic of intervals."""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Track = tuple[int, int]  # a process and its thread, or a GPU and its stream

_ABSOLUTE_MICROSECONDS = 1e15  # a time since 1970 is larger, one since the base of a trace smaller
_DEVICE_KINDS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_ON_DEVICE = _DEVICE_KINDS | {"gpu_user_annotation", "cuda_sync"}
_STEP = re.compile(r"step (\d+)")


@dataclass(frozen=True, slots=True)
class Span:
    """An event with a duration on a track; in nanoseconds."""

    name: str
    kind: str  # in the profiler's words: cpu_op, user_annotation, cuda_runtime, kernel, ...
    track: Track
    begin: int
    end: int

    @property
    def is_work_of_gpu(self) -> bool:
        """Whether a GPU was busy: a kernel or a copy."""
        return self.kind in _DEVICE_KINDS

    @property
    def is_on_host(self) -> bool:
        return self.kind not in _ON_DEVICE

    @property
    def step(self) -> int | None:
        """The number of the step, if this is the range of one."""
        found = _STEP.fullmatch(self.name) if self.kind == "user_annotation" else None
        return int(found.group(1)) if found else None


@dataclass(frozen=True)
class Trace:
    """The events of one rank, their `ts` and `dur` in whole nanoseconds since 1970 on the clock of its host."""

    events: list[Event]
    thread_names: dict[Track, str] = field(default_factory=dict)
    gpus: frozenset[int] = frozenset()  # the process numbers that stand for GPUs

    def spans(self) -> Iterator[Span]:
        for event in self.events:
            if event["ph"] == "X":
                begin = event["ts"]
                track = (event["pid"], event["tid"])
                yield Span(event["name"], event.get("cat", ""), track, begin, begin + event["dur"])

    @property
    def begin(self) -> int:
        return min((event["ts"] for event in self.events), default=0)


def read_trace(path: Path) -> Trace:
    """Read a trace file of torch's profiler, compressed or not."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return trace_of(json.load(file))


def trace_of(content: dict[str, Any]) -> Trace:
    """The events of threads and streams; events about the profiler itself are left out.

    Times in the file count from `baseTimeNanoseconds`; without it, or where they are larger than such a time can be,
    they count from 1970.
    """
    base = int(content.get("baseTimeNanoseconds", 0))
    events: list[Event] = []
    names: dict[Track, str] = {}
    gpus: set[int] = set()
    for event in content["traceEvents"]:
        if not isinstance(event.get("pid"), int) or not isinstance(event.get("tid"), int):
            continue
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                names[event["pid"], event["tid"]] = str(event["args"]["name"])
            continue
        if event.get("cat") in _ON_DEVICE:
            gpus.add(event["pid"])
        origin = 0 if event["ts"] > _ABSOLUTE_MICROSECONDS else base
        times = {"ts": origin + _nanoseconds(event["ts"])}
        if event["ph"] == "X":
            times["dur"] = max(0, _nanoseconds(event.get("dur", 0)))
        events.append(event | times)
    return Trace(events, names, frozenset(gpus))


def _nanoseconds(microseconds: float) -> int:
    """A time in whole nanoseconds, without loss of precision."""
    whole = int(microseconds)
    return whole * 1000 + round((microseconds - whole) * 1000)


Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, as disjoint intervals in order."""
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
    """The intersection of two unions."""
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
    """The difference of two unions."""
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
    """Spans by their thread or stream."""
    found: dict[Track, list[Span]] = defaultdict(list)
    for span in spans:
        found[span.track].append(span)
    return found


def innermost(spans: Iterable[Span]) -> Iterator[tuple[int, int, Span]]:
    """The intervals of one track, each with the innermost span that contains it.

    A span that ends after the one around it, by inexact clocks, is cut at the end of that one.
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
