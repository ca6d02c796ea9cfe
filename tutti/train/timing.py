"""Where the seconds of a run go: log windows, the phases of a step, and ranks that the others wait for."""

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Protocol

import torch

from tutti.config.schema import LogConfig
from tutti.ranks.group import Group
from tutti.runs.step_parts import TIMED, StepPart


class Clock:
    """Measures the windows of a run, and sums up the seconds of the whole run by what they went to.

    Where steps are queued on a GPU, a window ends when that has computed them, which the host may be far ahead of.
    """

    def __init__(self, queues_on_gpu: bool = False) -> None:
        self._ends = _find_gpu_time if queues_on_gpu else _find_time
        self.totals = {"training": 0.0, "waiting_for_data": 0.0, "validation": 0.0, "checkpoints": 0.0}
        self._start = time.perf_counter()
        self._waited = 0.0
        self._paused = 0.0

    def start(self) -> None:
        """Begin the first window here, after a validation that a resumed run may have begun with."""
        self._start, self._waited, self._paused = time.perf_counter(), 0.0, 0.0

    def wait_began(self) -> float:
        return time.perf_counter()

    def wait_ended(self, began: float) -> None:
        self._waited += time.perf_counter() - began

    @contextmanager
    def paused(self, what: str) -> Iterator[None]:
        """Leave out what is not training, and add it up by its name."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - began
            self.totals[what] += time.perf_counter() - began

    def close(self) -> Callable[[], tuple[float, float]]:
        """End a window with what is queued; returns a function that gives its seconds, and those of them without data.

        That is called once, before the window after it ends, and waits for a GPU.
        """
        ended, waited = self._ends(), self._waited
        self._waited = 0.0

        def lap() -> tuple[float, float]:
            end = ended()
            seconds = max(end - self._start - self._paused, 1e-9)
            self._start, self._paused = end, 0.0
            self.totals["training"] += seconds
            self.totals["waiting_for_data"] += waited
            return seconds, waited

        return lap


def _find_time() -> Callable[[], float]:
    now = time.perf_counter()
    return lambda: now


def _find_gpu_time() -> Callable[[], float]:
    """Returns a function that gives the host's time at which the GPU has computed what is queued now."""
    computed = torch.cuda.Event(enable_timing=True)
    computed.record()

    def find() -> float:
        computed.synchronize()
        now = torch.cuda.Event(enable_timing=True)
        now.record(_idle_stream())  # the stream that computes may have the next step queued
        now.synchronize()
        return time.perf_counter() - computed.elapsed_time(now) / 1000

    return find


@functools.cache
def _idle_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream(priority=-1)  # of 32 that torch hands out in turn: few ask for this priority


_PAUSE = "pause"
_SAMPLES = 5  # steps of a log window that are marked on a GPU, where marks keep kernels apart


Phases = Callable[[], dict[StepPart, float]]


class StepTimer(Protocol):
    """Marks between the parts of a step."""

    def begin(self) -> None:
        """What has passed since the last mark belongs to no part."""
        ...

    def paused(self) -> None:
        """So does what has passed on the stream: a checkpoint was saved."""
        ...

    def ended(self, part: StepPart) -> None:
        """What has passed since the last mark belongs to this part of the step."""
        ...

    def close(self, steps: int) -> Phases:
        """End a window of steps; returns a function that gives its seconds by part, when a GPU has done its work."""
        ...


def make_timer(device: torch.device, log: LogConfig) -> StepTimer:
    """The clock for a device."""
    if not log.phases:
        return NoTimer()
    return StreamTimer(max(1, log.every_steps // _SAMPLES)) if device.type == "cuda" else HostTimer()


class NoTimer:
    """Marks nothing."""

    def begin(self) -> None: ...

    def paused(self) -> None: ...

    def ended(self, part: StepPart) -> None: ...

    def close(self, steps: int) -> Phases:
        return dict


class HostTimer:
    """The clock of the thread that computes."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(TIMED, 0.0)
        self._last = time.perf_counter()

    def begin(self) -> None:
        self._last = time.perf_counter()

    def paused(self) -> None:
        self.begin()

    def ended(self, part: StepPart) -> None:
        now = time.perf_counter()
        self._seconds[part] += now - self._last
        self._last = now

    def close(self, steps: int) -> Phases:
        seconds, self._seconds = self._seconds, dict.fromkeys(TIMED, 0.0)
        return lambda: seconds


class StreamTimer:
    """Events on the stream that computes: the host may be far ahead of it.

    A GPU that waits for its batch is idle between the update of one step and the arrival of the next batch, so that
    this time, and not the host's, is spent on data. Every so many steps one is marked, beginning with the first of a
    window, and the end of the step before it.
    """

    def __init__(self, every_steps: int = 1) -> None:
        self._every_steps = every_steps
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self._spare: list[torch.cuda.Event] = []
        self._step = 0  # of the window

    def begin(self) -> None: ...

    def paused(self) -> None:
        self._mark(_PAUSE)

    def ended(self, part: StepPart) -> None:
        ends_step = part == TIMED[-1]
        if self._step % self._every_steps == 0:
            self._mark(part)
        elif ends_step and (self._step + 1) % self._every_steps == 0:
            self._mark(_PAUSE)
        self._step += ends_step

    def close(self, steps: int) -> Phases:
        marks, self._marks, self._step = self._marks, [], 0
        return lambda: self._read(marks, steps)

    def _read(self, marks: list[tuple[str, torch.cuda.Event]], steps: int) -> dict[StepPart, float]:
        seconds: dict[str, float] = dict.fromkeys((*TIMED, _PAUSE), 0.0)
        for (_, began), (part, event) in itertools.pairwise(marks):
            seconds[part] += began.elapsed_time(event) / 1000
        marked = sum(part == TIMED[-1] for part, _ in marks)
        waited = sum(part == TIMED[0] for _, (part, _) in itertools.pairwise(marks))  # the first has no begin
        self._spare += [event for _, event in marks]
        clocked = dict.fromkeys(TIMED, marked) | {TIMED[0]: waited}
        return {part: seconds[part] * steps / max(1, clocked[part]) for part in TIMED}

    def _mark(self, part: str) -> None:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((part, event))


@dataclass(frozen=True)
class ClosedWindow:
    """Steps that were made, and that a GPU may still be computing: their results are read when somebody asks."""

    step: int  # the last one
    epoch: int
    losses: Sequence[Any]  # of the steps
    totals: Callable[[], torch.Tensor]  # waits for a GPU
    phases: Callable[[], Mapping[StepPart, float]]  # to be read after the totals
    lap: Callable[[], tuple[float, float]]  # its seconds, and those of them without data

    def read(self, rank: int, world_size: int) -> list[torch.Tensor]:
        """The totals, and the seconds by phase at this rank's place in a row of zeros; empty if none are measured."""
        totals = self.totals()  # first: a GPU has then done the work that the phases are of
        own = list(self.phases().values())
        row = [0.0] * (len(own) * world_size)
        row[rank * len(own) : (rank + 1) * len(own)] = own
        return [totals, torch.tensor(row, dtype=torch.float64)]


def phases_by_rank(phases: Sequence[float]) -> list[dict[StepPart, float]]:
    """The seconds by phase of every rank, from the sum of their rows."""
    cuts = range(0, len(phases), len(TIMED))
    return [dict(zip(TIMED, phases[cut : cut + len(TIMED)], strict=True)) for cut in cuts]


def find_first_bad(losses: Sequence[Any], last_step: int, group: Group) -> tuple[int, int]:
    """The first step up to `last_step`, counted from 0, whose loss is not finite, and its rank; every rank enters."""
    first = last_step - len(losses)
    own = next((first + i for i, value in enumerate(losses) if not math.isfinite(float(value))), None)
    found = [(step, rank) for rank, step in enumerate(group.gather(own)) if step is not None]
    return min(found, default=(last_step - 1, group.rank))


def combine(rows: Sequence[Mapping[StepPart, float]], seconds: float) -> dict[str, float]:
    """The fields of a log window about the parts of its steps, from those of every rank.

    Ranks that arrive early at an exchange of gradients wait there for the others: the least time that any rank was in
    it is the exchange itself, and what the others were in it beyond that is waiting. Sharded weights are exchanged
    within the passes: then no rank has time of its own for it, and nothing is said of it.
    """
    means = {part: fmean(row[part] for row in rows) for part in TIMED}
    exchange = min(row[StepPart.COMMUNICATION] for row in rows)
    fields = {f"{part.key}_seconds": value for part, value in means.items()} | {"communication_seconds": exchange}
    if len(rows) > 1 and means[StepPart.COMMUNICATION]:
        fields["waiting_seconds"] = means[StepPart.COMMUNICATION] - exchange
        fields["communication_share"] = exchange / seconds
        fields["waiting_share"] = fields["waiting_seconds"] / seconds
    return fields | {
        "data_share": means[StepPart.DATA] / seconds,
        "rest_seconds": max(0.0, seconds - sum(means.values())),
    }


_LEAST_STEPS = 5  # a window of fewer is not compared
_LEAST_SHARE = 0.1  # of the window: the least cost of a slow rank that is reported
_LEAST_SECONDS = 5e-3  # of a step on CPUs, where the operating system delays ranks of shared cores by milliseconds


@dataclass
class Straggler:
    """A slow rank, as the record has it."""

    rank: int
    host: str
    windows: int  # log windows in which it was slow
    worst: float  # its time over the median of the others
    first_step: int
    last_step: int


class Stragglers:
    """Compares ranks window by window."""

    def __init__(self, hosts: Sequence[str], factor: float, on_cpus: bool = False) -> None:
        self._hosts = hosts
        self._factor = factor
        self._least_seconds = _LEAST_SECONDS if on_cpus else 0.0
        self.found: dict[int, Straggler] = {}

    def compare(self, own_seconds: Sequence[float], steps: int, window_seconds: float, step: int) -> list[str]:
        """A line for each rank that is slow in the window that ends at a step, and was not before."""
        if len(own_seconds) < 2 or steps < _LEAST_STEPS:
            return []
        lines = []
        for rank, seconds in enumerate(own_seconds):
            others = median([*own_seconds[:rank], *own_seconds[rank + 1 :]])
            least = max(_LEAST_SHARE * window_seconds, self._least_seconds * steps)
            if seconds < self._factor * others or seconds - others < least:
                continue
            ratio = seconds / max(others, 1e-9)
            slow = self.found.get(rank)
            if slow is None:
                slow = self.found[rank] = Straggler(rank, self._hosts[rank], 0, ratio, step, step)
                lines.append(
                    f"slow rank: rank {rank} on host {self._hosts[rank]} takes {seconds / steps * 1e3:.1f} ms a step "
                    f"for its batch and forward pass, the others {others / steps * 1e3:.1f} ms: all wait for it"
                )
            slow.windows += 1
            slow.worst = max(slow.worst, ratio)
            slow.last_step = step
        return lines
