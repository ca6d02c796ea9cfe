"""The timeline of a script that uses Horovod's API as text: the cost of each tensor, and which ranks were late."""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti import units
from tutti.errors import FolderError
from tutti.runs.files import parse_json

_NEGOTIATION, _WORK = 0, 1  # the tracks of a tensor's row
_MOST_TENSORS = 12
_MOST_WAITS = 6


@dataclass(frozen=True)
class Negotiation:
    """The time from the first rank that was ready for an operation to its start; in microseconds."""

    begin: float
    end: float
    ready: tuple[tuple[float, int], ...]  # the time at which each rank was ready, in order


@dataclass(frozen=True)
class Wait:
    """The time from the first rank that was ready to the last, which is `rank`; in microseconds."""

    begin: float
    end: float
    rank: int
    tensors: tuple[str, ...]

    @property
    def microseconds(self) -> float:
        return self.end - self.begin


@dataclass
class Tensor:
    """The operations of one row; times in microseconds."""

    name: str
    negotiations: list[Negotiation] = field(default_factory=list)
    work: list[float] = field(default_factory=list)

    @property
    def negotiated(self) -> float:
        return sum(one.end - one.begin for one in self.negotiations)


def read_timeline(path: Path) -> list[dict[str, Any]]:
    """The events of a timeline; if its process was killed, those of complete lines."""
    content = path.read_bytes()
    for text in (content, content.rpartition(b"\n")[0].rstrip().rstrip(b",") + b"\n]"):
        with contextlib.suppress(ValueError):
            events = parse_json(text)
            if isinstance(events, list) and all(isinstance(event, dict) for event in events):
                return events
    raise FolderError(
        f"{path} is damaged: expected the timeline of a Horovod run, a JSON list of events. Profile again."
    )


def read_tensors(events: Iterable[dict[str, Any]]) -> list[Tensor]:
    """The operations of every row; those that have not ended are left out."""
    tensors: dict[int, Tensor] = {}
    begun: dict[tuple[int, int], float] = {}
    ready: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for event in events:
        row, track, time = event["pid"], event["tid"], event.get("ts", 0.0)
        if event["ph"] == "M":
            if event["name"] == "process_name":
                tensors[row] = Tensor(event["args"]["name"])
        elif event["ph"] == "B":
            begun[row, track] = time
        elif event["ph"] == "i" and track == _NEGOTIATION and event["name"].isdigit():
            ready[row].append((time, int(event["name"])))
        elif event["ph"] == "E" and (row, track) in begun:
            begin = begun.pop((row, track))
            if track == _WORK:
                tensors[row].work.append(time - begin)
            else:
                tensors[row].negotiations.append(Negotiation(begin, time, tuple(sorted(ready.pop(row, [])))))
    return [tensor for tensor in tensors.values() if tensor.negotiations or tensor.work]


def write_horovod_summary(title: str, tensors: Sequence[Tensor]) -> str:
    """The most expensive tensors, the ranks that were last, and the longest waits."""
    operations = sum(len(tensor.work) for tensor in tensors)
    lines = [
        title,
        f"{operations:,} operation(s) of {len(tensors):,} tensor(s). Negotiation is the time until all ranks are "
        "ready, work what rank 0 then takes; in milliseconds.",
        "",
        *_costs(tensors),
    ]
    if waits := find_waits(tensors):
        lines += ["", *_last_ranks(waits), "", *_longest(waits)]
    return "\n".join(lines) + "\n"


def find_waits(tensors: Sequence[Tensor]) -> list[Wait]:
    """The waits of ranks, in the order of time; tensors that were waited for at the same time are one wait."""
    found = [
        Wait(one.ready[0][0], one.ready[-1][0], one.ready[-1][1], (tensor.name,))
        for tensor in tensors
        for one in tensor.negotiations
        if len(one.ready) > 1
    ]
    waits: dict[int, list[Wait]] = defaultdict(list)
    for wait in sorted(found, key=lambda wait: wait.begin):
        before = waits[wait.rank][-1] if waits[wait.rank] else None
        if before and wait.begin < before.end:
            tensors_of_both = (*before.tensors, *wait.tensors)
            waits[wait.rank][-1] = Wait(before.begin, max(before.end, wait.end), wait.rank, tensors_of_both)
        else:
            waits[wait.rank].append(wait)
    return sorted((wait for those in waits.values() for wait in those), key=lambda wait: wait.begin)


def _last_ranks(waits: Sequence[Wait]) -> list[str]:
    times = Counter(wait.rank for wait in waits)
    rows = [
        [
            f"rank {rank}",
            f"{count:,}",
            units.percent(count / len(waits)),
            f"{sum(wait.microseconds for wait in waits if wait.rank == rank) / 1e3:,.2f}",
        ]
        for rank, count in times.most_common()
    ]
    return units.table(["Waited for", "times", "share", "ms in all"], rows)


def _longest(waits: Sequence[Wait]) -> list[str]:
    rows = []
    for wait in sorted(waits, key=lambda wait: -wait.microseconds)[:_MOST_WAITS]:
        names = wait.tensors[0] + (f" and {len(wait.tensors) - 1} more" if len(wait.tensors) > 1 else "")
        at = (wait.begin - waits[0].begin) / 1e6
        rows.append([f"{at:,.3f}", f"{wait.microseconds / 1e3:,.2f}", str(wait.rank), names])
    return units.table(["Longest waits at second", "ms", "for rank", "with"], rows, left=("with",))


def _costs(tensors: Sequence[Tensor]) -> list[str]:
    rows = []
    for tensor in sorted(tensors, key=lambda one: -(one.negotiated + sum(one.work)))[:_MOST_TENSORS]:
        longest = max((one.end - one.begin for one in tensor.negotiations), default=0.0)
        last = Counter(one.ready[-1][1] for one in tensor.negotiations if len(one.ready) > 1).most_common(1)
        times = max(len(tensor.negotiations), len(tensor.work))
        figures = [tensor.negotiated / times, longest, sum(tensor.work) / times]
        who = f"{last[0][0]} ({units.percent(last[0][1] / len(tensor.negotiations))})" if last else "-"
        rows.append([tensor.name, f"{times:,}", *(f"{value / 1e3:,.3f}" for value in figures), who])
    return units.table(["tensor", "times", "negotiation", "longest", "work", "mostly last"], rows)
