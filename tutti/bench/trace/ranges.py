"""Names for the parts of a step in a trace, put around them from outside."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from tutti.bench.trace.summary import DIRECT, PARTS
from tutti.config.schema import RuntimeConfig
from tutti.parallel.host_memory import HostMemory
from tutti.ranks.hang_detection import Watch
from tutti.ranks.placement import Placement
from tutti.runs.step_parts import StepPart


class Ranges:
    """The open ranges of the main thread: a step, and the part of it that runs."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._open: list[tuple[str, Any]] = []

    def begin_step(self, step: int) -> None:
        self.close()
        self._push(f"step {step}")

    def enter(self, part: StepPart) -> None:
        """The next part of the step; the one before it ends."""
        if not self._open or self._open[-1][0] == part:
            return
        if len(self._open) > 1:
            self._pop()
        self._push(part.value)

    def close(self) -> None:
        """The step is over."""
        while self._open:
            self._pop()

    def _push(self, name: str) -> None:
        if self._on_gpu:
            torch.cuda.nvtx.range_push(name)
        entered = record_function(name)
        entered.__enter__()
        self._open.append((name, entered))

    def _pop(self) -> None:
        self._open.pop()[1].__exit__(None, None, None)
        if self._on_gpu:
            torch.cuda.nvtx.range_pop()


class MarkingWatch(Watch):
    """A watch that also makes a range of what the main thread tells it."""

    def __init__(
        self, placement: Placement, store: dist.Store, hosts: Sequence[str], config: RuntimeConfig, ranges: Ranges
    ) -> None:
        self._ranges = ranges
        super().__init__(placement, store, hosts, config)

    def at(self, phase: StepPart, step: int) -> None:
        super().at(phase, step)
        if phase is StepPart.DATA:
            self._ranges.begin_step(step)
        if phase in PARTS:
            self._ranges.enter(phase)


@contextmanager
def direct_averages_marked() -> Iterator[None]:
    """Give averages through the memory of a host a name in the trace, as Gloo gives one to its own."""
    average = HostMemory.average

    def marked(self: HostMemory, tensor: torch.Tensor) -> torch.Tensor:
        with record_function(DIRECT):
            return average(self, tensor)

    HostMemory.average = marked
    try:
        yield
    finally:
        HostMemory.average = average
