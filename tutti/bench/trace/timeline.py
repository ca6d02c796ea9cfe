"""One timeline of all ranks on rank 0's clock, in the Trace Event format of Perfetto, and how clocks are compared."""

import gzip
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tutti.bench.trace.spans import Event, Trace, Track
from tutti.ranks.group import Group

_SLACK_NANOSECONDS = 1_000  # a span that ends later than the one around it by at most this is cut
_IDS = ("correlation", "External id")  # numbers that connect events of one rank


@dataclass(frozen=True)
class ClockOffset:
    """The offset of a rank's clock from rank 0's, and its uncertainty; in nanoseconds."""

    offset: int
    uncertainty: int
    measured: int  # the measured offset, also if both have the same clock

    def as_microseconds(self) -> dict[str, float]:
        values = {"offset": self.offset, "uncertainty": self.uncertainty, "measured": self.measured}
        return {f"{name}_microseconds": value / 1000 for name, value in values.items()}


@dataclass(frozen=True)
class RankTrace:
    """One rank's trace in a timeline."""

    rank: int
    host: str
    clock: ClockOffset
    begin: int  # of its first event, in nanoseconds since 1970 on its own clock
    read: Callable[[], Trace]  # called when its trace is written: traces are large


def write_timeline(path: Path, parts: list[RankTrace], steps: tuple[int, int]) -> None:
    """Write the traces of all ranks into one compressed file."""
    base = min(part.begin - part.clock.offset for part in parts)
    header = {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
        "metadata": {
            "steps": list(steps),
            "clocks": [{"rank": part.rank, "host": part.host, **part.clock.as_microseconds()} for part in parts],
        },
    }
    with gzip.open(path, "wt", compresslevel=4) as file:
        file.write(json.dumps(header)[:-1] + ', "traceEvents": [')
        separator = "\n"
        for part in parts:
            for event in timeline_events(part.read(), part, base, len(parts)):
                file.write(separator + json.dumps(event))
                separator = ",\n"
        file.write("\n]}\n")


def timeline_events(trace: Trace, part: RankTrace, base: int, ranks: int) -> Iterator[Event]:
    """The events of one rank as one process of the timeline, with ids that are unique over ranks."""
    process = part.rank + 1  # viewers use 0 for the kernel
    lanes = nested(trace.events)
    tracks = _tracks(trace, {(*track, lane) for track, lane, _ in lanes}, process)
    yield _name(process, 0, "process_name", name=f"rank {part.rank} on host {part.host}")
    yield _name(process, 0, "process_sort_index", sort_index=part.rank)
    for number, (thread, name) in enumerate(tracks.values()):
        yield _name(process, thread, "thread_name", name=name)
        yield _name(process, thread, "thread_sort_index", sort_index=number)
    for track, lane, event in lanes:
        if event["name"] == "[memory]":
            event = _counter(event)
        moved = {"pid": process, "tid": tracks[*track, lane][0]}
        moved["ts"] = (event["ts"] - part.clock.offset - base) / 1000
        if event["ph"] == "X":
            moved["dur"] = event["dur"] / 1000
        if "id" in event:
            moved["id"] = _own(event["id"], part.rank, ranks)
        if tied := {key: _own(event["args"][key], part.rank, ranks) for key in _IDS if key in event.get("args", {})}:
            moved["args"] = event["args"] | tied
        yield event | moved


def nested(events: Iterable[Event]) -> list[tuple[Track, int, Event]]:
    """Events with their track and a lane in it, in the order of time, so that the spans of a lane nest.

    Viewers drop a span that begins inside another and ends after it. A small difference is cut off; spans that really
    overlap get lanes of their own.
    """
    open_ends: dict[tuple[int, int, int], list[int]] = {}
    placed: list[tuple[Track, int, Event]] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0))):
        track, lane = (event["pid"], event["tid"]), 0
        if event["ph"] != "X":
            placed.append((track, 0, event))
            continue
        begin, end = event["ts"], event["ts"] + event["dur"]
        while True:
            ends = open_ends.setdefault((*track, lane), [])
            while ends and ends[-1] <= begin:
                ends.pop()
            if not ends or end <= ends[-1] + _SLACK_NANOSECONDS:
                break
            lane += 1
        end = min(end, ends[-1]) if ends else end
        ends.append(end)
        placed.append((track, lane, event | {"dur": end - begin}))
    return placed


def _tracks(
    trace: Trace, lanes: set[tuple[int, int, int]], process: int
) -> dict[tuple[int, int, int], tuple[int, str]]:
    """A number and a name for every lane: the main thread, other threads, then streams of GPUs."""

    def order(lane: tuple[int, int, int]) -> tuple[bool, bool, int, int, int]:
        return (lane[0] in trace.gpus, lane[0] != lane[1], *lane)

    found: dict[tuple[int, int, int], tuple[int, str]] = {}
    names: dict[str, int] = {}
    for number, lane in enumerate(sorted(lanes, key=order)):
        name = _track_name(trace, (lane[0], lane[1]))
        names[name] = names.get(name, 0) + 1
        name = name if names[name] == 1 else f"{name} {names[name]}"
        found[lane] = (process * 10_000 + number, name)
    return found


def _track_name(trace: Trace, track: Track) -> str:
    process, thread = track
    given = trace.thread_names.get(track, "")
    if process in trace.gpus:
        return f"GPU {process} {given.strip() or f'stream {thread}'}"
    if process < 0:
        return "the profiler's overhead"
    if process == thread:
        return "main thread"
    inside = re.search(r"\((.*)\)", given)
    name = inside.group(1) if inside else given
    return "thread" if name.startswith("python") or not name else name


def _counter(event: Event) -> Event:
    """A memory event as a counter event."""
    arguments = event.get("args", {})
    device = arguments.get("Device Id", -1)
    name = "CPU memory" if device < 0 else f"GPU {device} memory"
    return {
        "ph": "C",
        "name": name,
        "ts": event["ts"],
        "args": {"allocated MB": arguments.get("Total Allocated", 0) / 1e6},
    }


def _own(number: Any, rank: int, ranks: int) -> Any:
    """An id that is unique over ranks."""
    return number * ranks + rank if isinstance(number, int) else f"{rank}.{number}"


def _name(process: int, thread: int, what: str, **arguments: Any) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": arguments}


_ROUNDS = 40
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class ClockReading:
    """A message to rank 0 and its reply: sent and received on this clock, answered on rank 0's; in nanoseconds."""

    sent: int
    answered: int
    received: int


def offset_of(exchanges: Sequence[ClockReading]) -> tuple[int, int]:
    """The offset of this clock from rank 0's, from the shortest round trip, and its uncertainty.

    Rank 0 answered at some time between the two: the midpoint is wrong by at most half of the round trip.
    """
    best = min(exchanges, key=lambda one: one.received - one.sent)
    return (best.sent + best.received) // 2 - best.answered, (best.received - best.sent + 1) // 2


def clock_of(before: tuple[int, int], after: tuple[int, int], shared: bool) -> ClockOffset:
    """The mean of two measurements, before and after a trace; half of their difference adds to the uncertainty.

    Ranks under one kernel have the same clock: its offset is 0, whatever was measured.
    """
    measured = (before[0] + after[0]) // 2
    if shared:
        return ClockOffset(0, 0, measured)
    return ClockOffset(measured, max(before[1], after[1]) + abs(before[0] - after[0]) // 2, measured)


def measure_offset(group: Group) -> tuple[int, int]:
    """The offset of this clock from rank 0's, and its uncertainty; every rank must call this, and they take turns."""
    message = torch.zeros(1, dtype=torch.int64)
    exchanges: list[ClockReading] = [ClockReading(0, 0, 0)]
    for rank in range(1, group.world_size):
        if group.is_first:
            for _ in range(_ROUNDS):
                dist.recv(message, src=rank)
                message[0] = time.time_ns()
                dist.send(message, dst=rank)
        elif rank == group.rank:
            exchanges = [_ask(message) for _ in range(_ROUNDS)]
    return offset_of(exchanges)


def _ask(message: torch.Tensor) -> ClockReading:
    sent = time.time_ns()
    dist.send(message, dst=0)
    dist.recv(message, src=0)
    return ClockReading(sent, int(message[0]), time.time_ns())


def shares_first_clock(group: Group) -> bool:
    """Returns whether this rank runs under the same kernel as rank 0; every rank must call this."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else f"rank {group.rank}"
    boots = group.gather(boot)
    return boots[0] == boot
