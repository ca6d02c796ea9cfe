"""Traces as torch's profiler leaves them, one file a rank, read on the clock of their host."""

import gzip
import json
import re
from collections.abc import Iterator
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
    """Something that took time on a track; in nanoseconds."""

    name: str
    kind: str  # in the profiler's words: cpu_op, user_annotation, cuda_runtime, kernel, ...
    track: Track
    begin: int
    end: int

    @property
    def is_work_of_gpu(self) -> bool:
        """Whether a GPU was busy with it."""
        return self.kind in _DEVICE_KINDS

    @property
    def is_on_host(self) -> bool:
        return self.kind not in _ON_DEVICE

    @property
    def step(self) -> int | None:
        """The step that this is the range of."""
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
    """A file of torch's profiler, packed or not."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return trace_of(json.load(file))


def trace_of(content: dict[str, Any]) -> Trace:
    """The events that belong to threads and streams; what the profiler tells of itself is left out.

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
    """A time in whole nanoseconds, as exactly as the number tells it."""
    whole = int(microseconds)
    return whole * 1000 + round((microseconds - whole) * 1000)
