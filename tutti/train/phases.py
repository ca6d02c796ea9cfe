"""Where the time of a step goes, marked as it runs: by the clock on a CPU, by events of the stream on a GPU."""

import itertools
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Protocol

import torch

from tutti.config.schema import LogConfig

# Of every step, in this order; what lies between them belongs to none.
PHASES: tuple[str, ...] = ("data", "forward", "backward", "communication", "update")

_PAUSE = "pause"
_SAMPLES = 5  # steps of a log window that are marked on a GPU, where marks keep kernels apart; they stand for all


class StepTimer(Protocol):
    """Marks between the phases of a step."""

    def begin(self) -> None:
        """What has passed since the last mark belongs to no phase."""
        ...

    def paused(self) -> None:
        """So does what has passed on the stream: a checkpoint was saved."""
        ...

    def ended(self, phase: str) -> None:
        """What has passed since the last mark belongs to this phase."""
        ...

    def lap(self, steps: int) -> dict[str, float]:
        """Seconds of the steps since the last lap by phase; a GPU must have done its work."""
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

    def ended(self, phase: str) -> None: ...

    def lap(self, steps: int) -> dict[str, float]:
        return {}


class HostTimer:
    """The clock of the thread that computes."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._last = time.perf_counter()

    def begin(self) -> None:
        self._last = time.perf_counter()

    def paused(self) -> None:
        self.begin()

    def ended(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[phase] += now - self._last
        self._last = now

    def lap(self, steps: int) -> dict[str, float]:
        seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return seconds


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

    def ended(self, phase: str) -> None:
        ends_step = phase == PHASES[-1]
        if self._step % self._every_steps == 0:
            self._mark(phase)
        elif ends_step and (self._step + 1) % self._every_steps == 0:
            self._mark(_PAUSE)
        self._step += ends_step

    def lap(self, steps: int) -> dict[str, float]:
        seconds = dict.fromkeys((*PHASES, _PAUSE), 0.0)
        for (_, began), (phase, event) in itertools.pairwise(self._marks):
            seconds[phase] += began.elapsed_time(event) / 1000
        marked = sum(phase == PHASES[-1] for phase, _ in self._marks)
        waited = sum(phase == PHASES[0] for _, (phase, _) in itertools.pairwise(self._marks))  # the first has no begin
        self._spare += [event for _, event in self._marks]
        self._marks, self._step = [], 0
        clocked = dict.fromkeys(PHASES, marked) | {PHASES[0]: waited}
        return {phase: seconds[phase] * steps / max(1, clocked[phase]) for phase in PHASES}

    def _mark(self, phase: str) -> None:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((phase, event))


def combine(rows: Sequence[Mapping[str, float]], seconds: float) -> dict[str, float]:
    """What a log window tells of its phases, from those of every rank.

    Ranks that come early to an exchange of gradients wait there for the others: the least time that any rank was in it
    is the exchange itself, and what the others were in it beyond that is waiting.
    """
    means = {phase: fmean(row[phase] for row in rows) for phase in PHASES}
    exchange = min(row["communication"] for row in rows)
    told = {f"{phase}_seconds": value for phase, value in means.items()} | {"communication_seconds": exchange}
    if len(rows) > 1:
        told["waiting_seconds"] = means["communication"] - exchange
        told["communication_share"] = exchange / seconds
        told["waiting_share"] = told["waiting_seconds"] / seconds
    return told | {"data_share": means["data"] / seconds, "rest_seconds": max(0.0, seconds - sum(means.values()))}
