"""Collectives measured on the ranks of a session, over sizes of messages and numbers of ranks.

All calls of a point are one stream: a warm-up, then the trials, with the clock read on every rank where one trial ends
and the next begins. So no trial pays for ranks that begin apart, and a link never rests. The time of a call is the
slowest rank's.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tutti import units
from tutti.bench.collectives.results import Dropped, Measured
from tutti.bench.session import Session
from tutti.errors import ConfigError

_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_FLOAT_BYTES = 4
_SMALL_SHARE = 0.4  # of its part of the time, for a message of which many calls are made: large ones need the rest
_BLOCK_SECONDS = 0.05  # a trial is one call, or as many as take this long, so that the clock is steady
_MOST_CALLS = 5000
_PROBE_GROWTH = 8
_PROBE_OFTEN_BYTES = 1 << 20  # a hiccup of a small probe would be taken for its time


@dataclass(frozen=True)
class CollectivesRequest:
    """What is to be measured."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    trials: int
    seconds: float


Tell = Callable[[int, int, int], None]  # points that are done, of how many, and the size of the last one


def measure(session: Session, request: CollectivesRequest, tell: Tell) -> tuple[list[Measured], list[Dropped]]:
    """Measure small messages first, on few ranks first; complete on rank 0."""
    _check_memory(session, request.sizes[-1])
    end = time.monotonic() + request.seconds
    group, series = session.group, _make_series(session, request)
    mine = [place for place, each in enumerate(series) if group.rank < each.ranks]
    going = set(range(len(series)))  # without those that have dropped a size already
    measured: list[Measured] = []
    dropped: list[Dropped] = []
    for number, size in enumerate(request.sizes):
        left = group.from_first(_left(end) if number else math.inf)  # the smallest are measured in any case
        reached = [place for place in mine if place in going and series[place].reach(size, left / (request.trials + 2))]
        costs = {place: series[place].expect(size) * (request.trials + 1) for place in reached}
        going = group.from_first(affordable(costs, left))
        block = group.from_first(_SMALL_SHARE * _left(end) / len(series) / (len(request.sizes) - number))
        for place in mine:
            if place in going:
                measured.append(
                    series[place].measure(size, request.trials, min(block / request.trials, _BLOCK_SECONDS))
                )
            else:
                dropped.append(series[place].drop(size))
            tell(len(measured) + len(dropped), len(series) * len(request.sizes), size)
    return measured, dropped


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.0)


def rank_counts(world_size: int) -> list[int]:
    """2, 4, 8, ... and all."""
    counts = [2**power for power in range(1, world_size.bit_length()) if 2**power < world_size]
    return [*counts, world_size]


def affordable(costs: Mapping[int, float], left: float) -> set[int]:
    """What can be done in the time that is left: all, or all but the dearest."""
    chosen = dict(costs)
    while chosen and sum(chosen.values()) > left:
        del chosen[max(chosen, key=lambda place: chosen[place])]
    return set(chosen)


class CollectiveSeries:
    """One operation on the first ranks, size after size."""

    def __init__(self, operation: str, ranks: int, subgroup: dist.ProcessGroup, session: Session) -> None:
        self.operation = operation
        self.ranks = ranks
        self.hosts = len(set(session.group.hosts[:ranks]))
        self._subgroup = subgroup
        self._session = session
        self._known_bytes, self._known_seconds = 0, 0.0

    def reach(self, size: int, most_seconds: float) -> bool:
        """Learn what a call takes, by probes that grow to this size; False where one would take too long."""
        if not self._known_bytes:
            self._probe(min(size, 1024))  # connections are made here
            self._probe(min(size, 1024))
        while self._known_bytes < size:
            following = min(size, _PROBE_GROWTH * self._known_bytes)
            if self.expect(following) > most_seconds:
                return False
            self._probe(following)
        return True

    def expect(self, size: int) -> float:
        """The seconds of a call, or the most that a larger message may take than the largest one known."""
        return self._known_seconds * size / self._known_bytes

    def drop(self, size: int) -> Dropped:
        return Dropped(self.operation, self.ranks, size, self.expect(size))

    def _probe(self, size: int) -> None:
        call, _ = self._prepare(size)
        self._slowest([0.0])  # some ranks come from other groups, and others would count the time until then
        clock = _clock(self._session.device)
        for _ in range(3 if size <= _PROBE_OFTEN_BYTES else 1):
            call()
            clock.read()
        self._known_bytes, self._known_seconds = size, min(self._slowest(clock.laps()))

    def measure(self, size: int, trials: int, block_seconds: float) -> Measured:
        """Time trials of as many calls as take so long, one at least."""
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
        """A call of this size, and its bytes: whole numbers, as many from each rank when they are gathered."""
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
        return torch.empty(count, dtype=torch.float32, device=self._session.device).fill_(0)  # touches its pages

    def _slowest(self, laps: Sequence[float]) -> list[float]:
        times = torch.tensor(laps, dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX, group=self._subgroup)
        return times.tolist()


def _make_series(session: Session, request: CollectivesRequest) -> list[CollectiveSeries]:
    """Few ranks first; every rank takes part in making every group."""
    limit = timedelta(seconds=session.group.timeout_seconds + request.seconds)
    series = []
    for ranks in rank_counts(session.group.world_size):
        subgroup: Any = dist.new_group(list(range(ranks)), timeout=limit)
        series += [CollectiveSeries(operation, ranks, subgroup, session) for operation in request.operations]
    return series


def _check_memory(session: Session, size: int) -> None:
    """Refuse messages that do not fit into the memory of a rank; what is gathered is there twice at most."""
    if session.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(session.device)
    else:
        free = _available_bytes() // session.placement.local_size
    least = min(session.group.gather(free))
    if 2 * size > least:
        error = ConfigError(
            f"--sizes: a message of {units.size(size)} needs {units.size(2 * size)} on every rank, and "
            f"{units.size(least)} are free for one. Choose smaller sizes."
        )
        error.agreed = True
        raise error


def _available_bytes() -> int:
    """The memory that this host can still give, caches of files included."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _Stopwatch:
    """Laps of calls that have ended when they return."""

    def __init__(self) -> None:
        self._marks = [time.perf_counter()]

    def read(self) -> None:
        self._marks.append(time.perf_counter())

    def laps(self) -> list[float]:
        return [end - begin for begin, end in zip(self._marks, self._marks[1:], strict=False)]


class _EventStopwatch:
    """Laps of calls that a GPU makes one after the other."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._marks: list[torch.cuda.Event] = []
        self.read()

    def read(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def laps(self) -> list[float]:
        torch.cuda.synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [begin.elapsed_time(end) / 1000 for begin, end in pairs]


def _clock(device: torch.device) -> _Stopwatch | _EventStopwatch:
    return _EventStopwatch() if device.type == "cuda" else _Stopwatch()
