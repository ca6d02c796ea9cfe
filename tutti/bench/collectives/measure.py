"""Collectives measured on the ranks of a session, over sizes of messages and numbers of ranks.

All calls of a point follow each other without a pause: a warm-up, then the trials, with the clock read on every rank
between two trials. So no trial includes waiting for ranks that start later, and links are never idle. The time of a
call is that of the slowest rank.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tutti import units
from tutti.bench.collectives.results import Dropped, Measured
from tutti.bench.session import Session
from tutti.errors import ConfigError
from tutti.ranks.cores import read_memory

_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_FLOAT_BYTES = 4
_SMALL_SHARE = 0.4  # of its share of the time, for a message with many calls: large messages need the rest
_BLOCK_SECONDS = 0.05  # a trial is one call, or as many as take this long, so that the clock is precise enough
_MOST_CALLS = 5000
_PROBE_GROWTH = 8
_PROBE_OFTEN_BYTES = 1 << 20  # probes up to this size are repeated: one delay would change their time much


@dataclass(frozen=True)
class CollectivesRequest:
    """The operations and message sizes to measure, the number of trials and the time."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    trials: int
    seconds: float


Report = Callable[[int, int, int], None]  # points that are done, of how many, and the size of the last one


def measure(session: Session, request: CollectivesRequest, report: Report) -> tuple[list[Measured], list[Dropped]]:
    """Measure small messages first, on few ranks first; rank 0 has all results."""
    _check_memory(session, request.sizes[-1])
    end = time.monotonic() + request.seconds
    group, series = session.group, _make_series(session, request)
    mine = [place for place, each in enumerate(series) if group.rank < each.ranks]
    active = set(range(len(series)))  # without those that have dropped a size already
    measured: list[Measured] = []
    dropped: list[Dropped] = []
    for number, size in enumerate(request.sizes):
        left = group.from_first(_left(end) if number else math.inf)  # the smallest are measured in any case
        reached = [
            place for place in mine if place in active and series[place].reach(size, left / (request.trials + 2))
        ]
        costs = {place: series[place].expect(size) * (request.trials + 1) for place in reached}
        active = group.from_first(affordable(costs, left))
        block = group.from_first(_SMALL_SHARE * _left(end) / len(series) / (len(request.sizes) - number))
        for place in mine:
            if place in active:
                measured.append(
                    series[place].measure(size, request.trials, min(block / request.trials, _BLOCK_SECONDS))
                )
            else:
                dropped.append(series[place].drop(size))
            report(len(measured) + len(dropped), len(series) * len(request.sizes), size)
    return measured, dropped


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.0)


def rank_counts(world_size: int) -> list[int]:
    """Numbers of ranks to measure: 2, 4, 8, ... and all."""
    counts = [2**power for power in range(1, world_size.bit_length()) if 2**power < world_size]
    return [*counts, world_size]


def affordable(costs: Mapping[int, float], left: float) -> set[int]:
    """The points that can be measured in the time that is left: all, or all but the most expensive."""
    chosen = dict(costs)
    while chosen and sum(chosen.values()) > left:
        del chosen[max(chosen, key=lambda place: chosen[place])]
    return set(chosen)


class CollectiveSeries:
    """The measurements of one operation on the first ranks, from small to large messages."""

    def __init__(self, operation: str, ranks: int, subgroup: dist.ProcessGroup, session: Session) -> None:
        self.operation = operation
        self.ranks = ranks
        self.hosts = len(set(session.group.hosts[:ranks]))
        self._subgroup = subgroup
        self._session = session
        self._known_bytes, self._known_seconds = 0, 0.0

    def reach(self, size: int, most_seconds: float) -> bool:
        """Estimate the time of a call by probes that grow to this size; returns False if one would take too long."""
        if not self._known_bytes:
            self._probe(min(size, 1024))  # establishes connections
            self._probe(min(size, 1024))
        while self._known_bytes < size:
            following = min(size, _PROBE_GROWTH * self._known_bytes)
            if self.expect(following) > most_seconds:
                return False
            self._probe(following)
        return True

    def expect(self, size: int) -> float:
        """The seconds of a call; for a message larger than all probes, an upper limit."""
        return self._known_seconds * size / self._known_bytes

    def drop(self, size: int) -> Dropped:
        return Dropped(self.operation, self.ranks, size, self.expect(size))

    def _probe(self, size: int) -> None:
        call, _ = self._prepare(size)
        self._slowest([0.0])  # a barrier: some ranks still communicate in other groups
        clock = _clock(self._session.device)
        for _ in range(3 if size <= _PROBE_OFTEN_BYTES else 1):
            call()
            clock.read()
        self._known_bytes, self._known_seconds = size, min(self._slowest(clock.laps()))

    def measure(self, size: int, trials: int, block_seconds: float) -> Measured:
        """Time the trials; each has as many calls as take `block_seconds`, at least one."""
        calls = max(1, min(_MOST_CALLS, round(block_seconds / self.expect(size))))
        call, actual = self._prepare(size)
        call()
        clock = _clock(self._session.device)
        for _ in range(trials):
            for _ in range(calls):
                call()
            clock.read()
        laps = self._slowest(clock.laps())
        return Measured(self.operation, self.ranks, self.hosts, actual, calls, tuple(lap / calls for lap in laps))

    def _prepare(self, size: int) -> tuple[Callable[[], Any], int]:
        """A call of about this size, and its bytes: whole floats, the same number from each rank in an all-gather."""
        count = max(1, size // _FLOAT_BYTES)
        if self.operation == "all_gather":
            part = self._numbers(max(1, count // self.ranks))
            whole = self._numbers(len(part) * self.ranks)
            return lambda: _gather(whole, part, group=self._subgroup), len(whole) * _FLOAT_BYTES
        numbers = self._numbers(count)
        if self.operation == "broadcast":
            return lambda: dist.broadcast(numbers, src=0, group=self._subgroup), count * _FLOAT_BYTES
        return lambda: dist.all_reduce(numbers, group=self._subgroup), count * _FLOAT_BYTES

    def _numbers(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.float32, device=self._session.device).fill_(0)  # so that its pages exist

    def _slowest(self, laps: Sequence[float]) -> list[float]:
        times = torch.tensor(laps, dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX, group=self._subgroup)
        return times.tolist()


def _make_series(session: Session, request: CollectivesRequest) -> list[CollectiveSeries]:
    """The series of all operations, for few ranks first; every rank must call this to create the groups."""
    limit = timedelta(seconds=session.group.timeout_seconds + request.seconds)
    series = []
    for ranks in rank_counts(session.group.world_size):
        subgroup: Any = dist.new_group(list(range(ranks)), timeout=limit)
        series += [CollectiveSeries(operation, ranks, subgroup, session) for operation in request.operations]
    return series


def _check_memory(session: Session, size: int) -> None:
    """Refuse messages that do not fit into the memory of a rank; an all-gather holds a message twice."""
    if session.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(session.device)
    else:
        free = (read_memory()[0] or _unused_bytes()) // session.placement.local_size
    least = min(session.group.gather(free))
    if 2 * size > least:
        error = ConfigError(
            f"--sizes: a message of {units.size(size)} needs {units.size(2 * size)} on every rank, and "
            f"{units.size(least)} are free for one. Choose smaller sizes."
        )
        error.agreed = True
        raise error


def _unused_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _Stopwatch:
    """Times of calls that are complete when they return."""

    def __init__(self) -> None:
        self._times = [time.perf_counter()]

    def read(self) -> None:
        self._times.append(time.perf_counter())

    def laps(self) -> list[float]:
        return [end - begin for begin, end in zip(self._times, self._times[1:], strict=False)]


class _EventStopwatch:
    """Times of calls that a GPU runs one after the other."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._times: list[torch.cuda.Event] = []
        self.read()

    def read(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._times.append(event)

    def laps(self) -> list[float]:
        torch.cuda.synchronize()
        pairs = zip(self._times, self._times[1:], strict=False)
        return [begin.elapsed_time(end) / 1000 for begin, end in pairs]


def _clock(device: torch.device) -> _Stopwatch | _EventStopwatch:
    return _EventStopwatch() if device.type == "cuda" else _Stopwatch()
