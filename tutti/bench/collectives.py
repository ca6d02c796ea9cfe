"""Collectives measured on the ranks of a session, over sizes of messages and numbers of ranks.

All calls of a point are one stream: a warm-up, then the trials, with the clock read on every rank where one trial ends
and the next begins. So no trial pays for ranks that begin apart, and a link never rests. The time of a call is the
slowest rank's.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tutti.bench.fit import BUS_FACTORS
from tutti.bench.message_sizes import show_size
from tutti.bench.session import Session
from tutti.errors import ConfigError

OPERATIONS = tuple(BUS_FACTORS)
CLOCK = (
    "one stream of calls: a warm-up, then trials of `calls` calls each; {clock} read on every rank between trials; "
    "the time of a call is the slowest rank's"
)
_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # by torch
_FLOAT_BYTES = 4
_SMALL_SHARE = 0.4  # of its part of the time, for a message of which many calls are made: large ones need the rest
_BLOCK_SECONDS = 0.05  # a trial is one call, or as many as take this long, so that the clock is steady
_MOST_CALLS = 5000
_PROBE_GROWTH = 8
_PROBE_OFTEN_BYTES = 1 << 20  # a hiccup of a small probe would be taken for its time


@dataclass(frozen=True)
class Request:
    """What is to be measured."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    trials: int
    seconds: float


@dataclass(frozen=True)
class Measured:
    """One operation, number of ranks and size: the seconds of a call in each trial."""

    operation: str
    ranks: int
    hosts: int
    bytes: int
    calls: int
    trials_seconds: tuple[float, ...]

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Dropped:
    """A size that would have taken too long."""

    operation: str
    ranks: int
    bytes: int
    expected_seconds: float  # of a call, at most

    def plain(self) -> dict[str, Any]:
        return asdict(self)


Tell = Callable[[int, int, str], None]  # points that are done, of how many, and the last one


def measure(session: Session, request: Request, tell: Tell) -> tuple[list[Measured], list[Dropped]]:
    """Measure small messages first, on few ranks first; complete on rank 0."""
    _check_memory(session, request.sizes[-1])
    series = _make_series(session, request)
    measured: list[Measured] = []
    dropped: list[Dropped] = []
    budget = Budget(request, len(series))
    for size in request.sizes:
        for place, each in enumerate(series):
            if session.group.rank < each.ranks:
                found = each.point(size, request.trials, budget.allow(size, place))
                (measured if isinstance(found, Measured) else dropped).append(found)  # pyright: ignore
            tell(len(measured) + len(dropped), len(series) * len(request.sizes), f"{show_size(size)} on {each.name}")
    session.group.barrier("the end of the measurement", request.seconds + session.group.timeout_seconds)
    return measured, dropped


def rank_counts(world_size: int) -> list[int]:
    """2, 4, 8, ... and all."""
    counts = [2**power for power in range(1, world_size.bit_length()) if 2**power < world_size]
    return [*counts, world_size]


class Budget:
    """Shares the time that is left among what is left; rank 0's decides for all."""

    def __init__(self, request: Request, series: int) -> None:
        self._sizes = request.sizes
        self._series = series
        self._end = time.monotonic() + request.seconds

    def allow(self, size: int, place: int) -> tuple[float, float]:
        """The most seconds for a point, and what it should take where calls are short."""
        left = max(self._end - time.monotonic(), 0.0)
        points_of_size = self._series - place
        points = points_of_size + self._series * (len(self._sizes) - 1 - self._sizes.index(size))
        return left / points_of_size, _SMALL_SHARE * left / points


class Series:
    """One operation on the first ranks, size after size."""

    def __init__(self, operation: str, ranks: int, subgroup: dist.ProcessGroup, session: Session) -> None:
        self.operation = operation
        self.ranks = ranks
        self.hosts = len(set(session.group.hosts[:ranks]))
        self.name = f"{ranks} ranks, {operation}"
        self._subgroup = subgroup
        self._session = session
        self._known_bytes, self._known_seconds = 0, 0.0

    def point(self, size: int, trials: int, allowed: tuple[float, float]) -> Measured | Dropped:
        """Measure a size, or say that it takes too long; the smallest is measured in any case."""
        most, share = self._from_first(allowed)
        first = not self._known_bytes
        if not self._reach(size, float("inf") if first else most / (trials + 2)):
            return Dropped(self.operation, self.ranks, size, self._expect(size))
        block = min(_BLOCK_SECONDS, share / (trials + 2))
        calls = max(1, min(_MOST_CALLS, round(block / self._known_seconds)))
        return self._measure(size, trials, calls)

    def _reach(self, size: int, most_seconds: float) -> bool:
        """Learn what a call takes by probes that grow to this size, as long as none takes too long."""
        if not self._known_bytes:
            self._probe(min(size, 1024))  # connections are made here
            self._probe(min(size, 1024))
        while self._known_bytes < size:
            following = min(size, _PROBE_GROWTH * self._known_bytes)
            if self._expect(following) > most_seconds:
                return False
            self._probe(following)
        return True

    def _expect(self, size: int) -> float:
        return self._known_seconds * size / self._known_bytes

    def _probe(self, size: int) -> None:
        call, _ = self._prepare(size)
        clock = _clock(self._session.device)
        for _ in range(3 if size <= _PROBE_OFTEN_BYTES else 1):
            call()
            clock.read()
        self._known_bytes, self._known_seconds = size, min(self._slowest(clock.laps()))

    def _measure(self, size: int, trials: int, calls: int) -> Measured:
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
            return lambda: _ALL_GATHER(whole, part, group=self._subgroup), len(whole) * _FLOAT_BYTES
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

    def _from_first(self, numbers: Sequence[float]) -> list[float]:
        given = torch.tensor(numbers, dtype=torch.float64)
        dist.broadcast(given, src=0, group=self._subgroup)
        return given.tolist()


def _make_series(session: Session, request: Request) -> list[Series]:
    """Few ranks first; every rank takes part in making every group."""
    limit = timedelta(seconds=session.group.timeout_seconds + request.seconds)
    series = []
    for ranks in rank_counts(session.group.world_size):
        subgroup = dist.new_group(list(range(ranks)), timeout=limit)
        series += [Series(operation, ranks, subgroup, session) for operation in request.operations]  # pyright: ignore
    return series


def _check_memory(session: Session, size: int) -> None:
    """Refuse messages that do not fit into the memory of a rank; one that is gathered is there twice at most."""
    if session.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(session.device)
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // session.placement.local_size
    error = None
    if 2 * size > free:
        error = ConfigError(
            f"--sizes: a message of {show_size(size)} needs {show_size(2 * size)} on every rank, and "
            f"{show_size(free)} are free for each. Choose smaller sizes."
        )
    session.group.agree(error)


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
