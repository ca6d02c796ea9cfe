"""Steps of a training run under torch's profiler: a trace for each rank, one timeline of all, and a summary."""

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tutti.bench.session import Session, open_session
from tutti.bench.trace.spans import read_trace
from tutti.bench.trace.summary import DIRECT, PARTS, RankSummary, TracedSteps, summarise
from tutti.bench.trace.text import write_summary
from tutti.bench.trace.timeline import (
    ClockOffset,
    RankTrace,
    clock_of,
    measure_offset,
    shares_first_clock,
    write_timeline,
)
from tutti.config.check import check_parts
from tutti.config.run import RunConfig
from tutti.config.schema import RuntimeConfig
from tutti.errors import FolderError, Interrupted
from tutti.parallel.ddp import HostMemory
from tutti.ranks.hang_detection import Monitor
from tutti.ranks.hub_client import HubClient
from tutti.ranks.placement import Placement
from tutti.runs.files import write_durably
from tutti.runs.folder import RunFolder
from tutti.runs.step_parts import StepPart
from tutti.train.build import agreed, build_job
from tutti.train.job import Job
from tutti.train.learner import TorchLearner
from tutti.train.torch import TorchFramework
from tutti.units import count


class Ranges:
    """The open profiler ranges of the main thread: a step, and its current part."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._open: list[tuple[str, Any]] = []

    def begin_step(self, step: int) -> None:
        self.close()
        self._push(f"step {step}")

    def enter(self, part: StepPart) -> None:
        """Begin the next part of the step, and end the one before it."""
        if not self._open or self._open[-1][0] == part:
            return
        if len(self._open) > 1:
            self._pop()
        self._push(part.value)

    def close(self) -> None:
        """End the step."""
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


class RangeMonitor(Monitor):
    """A monitor that also opens a profiler range for each part of a step."""

    def __init__(
        self, placement: Placement, hub: HubClient, hosts: Sequence[str], config: RuntimeConfig, ranges: Ranges
    ) -> None:
        self._ranges = ranges
        super().__init__(placement, hub, hosts, config)

    def enter(self, phase: StepPart, step: int) -> None:
        super().enter(phase, step)
        if phase is StepPart.DATA:
            self._ranges.begin_step(step)
        if phase in PARTS:
            self._ranges.enter(phase)


@contextmanager
def direct_averages_marked() -> Iterator[None]:
    """Name averages through shared memory in the trace, as Gloo names its own."""
    average = HostMemory.average

    def marked(self: HostMemory, tensor: torch.Tensor) -> torch.Tensor:
        with record_function(DIRECT):
            return average(self, tensor)

    HostMemory.average = marked
    try:
        yield
    finally:
        HostMemory.average = average


_NSIGHT = "NSYS_PROFILING_SESSION_ID"  # set by nsys for the processes that it starts


class Recorder:
    """Runs the profiler of torch between `start` and `stop`."""

    def __init__(self, device: torch.device, memory: bool, stacks: bool) -> None:
        self._on_gpu = device.type == "cuda"
        activities = [ProfilerActivity.CPU]
        if self._on_gpu and _NSIGHT not in os.environ:  # a GPU has one profiler at a time
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities, profile_memory=memory, with_stack=stacks)

    def prepare(self) -> None:
        """Initialise the profiler, which takes long; called one step before the first traced one."""
        self._profiler.prepare_trace()

    def start(self) -> None:
        """Start recording, when the GPU has finished the steps before."""
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        self._profiler.start_trace()

    def stop(self) -> None:
        """Stop recording, when the GPU has finished all submitted work."""
        if self._on_gpu:
            torch.cuda.synchronize()
        self._profiler.stop_trace()
        if self._on_gpu:
            torch.cuda.profiler.stop()

    def write(self, path: Path) -> None:
        """Write the trace as compressed Trace Event JSON."""
        self._profiler.export_chrome_trace(str(path))


def profile_rank(config: RunConfig, asked: TracedSteps, placement: Placement, folder: RunFolder | None) -> None:
    """Train as one rank to the last step to trace, and write the trace."""
    with open_session("profile", config, placement, folder) as session:
        group = session.group
        agreed(group, lambda: check_parts(config, group.world_size))
        ranges = Ranges(on_gpu=session.device.type == "cuda")
        with _monitored(session, ranges) as monitor:
            job = build_job(
                TorchFramework(), without_saving(config), group, monitor, session.device, session.folder, None
            )
            job.valid_sets = {}
            try:
                agreed(group, lambda: asked.check_end(job.plan.total_steps))
                ranks = count(group.world_size, "rank")
                session.say(f"{config.recipe}: {count(asked.last, 'step')} on {ranks}, then the traces")
                _trace(session, job, ranges, asked)
            finally:
                job.close()
        if group.is_first:
            _remove_traces_of_training(session.folder)


def without_saving(config: RunConfig) -> RunConfig:
    """The same training without checkpoints and TensorBoard."""
    return config.model_copy(
        update={
            "checkpoint": config.checkpoint.model_copy(
                update={"every_steps": None, "every_epochs": None, "best": None}
            ),
            "log": config.log.model_copy(update={"tensorboard": False, "ledger": False}),
        }
    )


@contextmanager
def _monitored(session: Session, ranges: Ranges) -> Iterator[RangeMonitor]:
    monitor = RangeMonitor(session.placement, session.group.hub, session.group.hosts, session.config.runtime, ranges)
    monitor.write_to(session.folder)
    try:
        with monitor.explained():
            yield monitor
    finally:
        monitor.close()


def _trace(session: Session, job: Job[TorchLearner], ranges: Ranges, asked: TracedSteps) -> None:
    group = session.group
    shared = shares_first_clock(group)
    recorder = Recorder(session.device, asked.memory, asked.stacks)
    with direct_averages_marked():
        clocks = _train(session, job, ranges, asked, recorder)
    job.monitor.suspend()
    clock = clock_of(clocks[0], clocks[1], shared)
    path = session.folder.path / "traces" / f"rank-{group.rank}.json.gz"
    agreed(group, functools.partial(_write_trace, recorder, path))
    trace = read_trace(path)
    summary = summarise(trace, group.rank, group.hosts[group.rank])
    found = group.gather((trace.begin, clock, summary), tuple[int, ClockOffset, RankSummary])
    del trace
    if group.is_first:
        parts = [
            RankTrace(rank, group.hosts[rank], clock, begin, functools.partial(read_trace, _beside(path, rank)))
            for rank, (begin, clock, _) in enumerate(found)
        ]
        write_timeline(session.folder.path / "timeline.json.gz", parts, (asked.first, asked.last))
        _report(session, asked, [summary for _, _, summary in found], [clock.offset for _, clock, _ in found])
    group.barrier("the timeline of all ranks")


def _train(
    session: Session, job: Job[TorchLearner], ranges: Ranges, asked: TracedSteps, recorder: Recorder
) -> list[tuple[int, int]]:
    """Train as the loop does, and trace the requested steps; returns the clock offsets before and after them."""
    learner = job.learner
    job.begin()
    clocks = _start_recorder(session, job.step, asked, recorder)
    for batch in job.batches():
        loss = learner.forward_backward(batch, job.logs_after(batch.step + 1))
        ranges.enter(StepPart.OPTIMIZER)
        learner.clip_gradients()
        learner.update_weights(job.lr)
        job.end_step(loss)
        if job.logs_after(job.step):
            job.log()
        ranges.close()
        clocks += _start_recorder(session, job.step, asked, recorder)
        if job.step == asked.last:
            recorder.stop()
            return [*clocks, measure_offset(session.group)]
    stopped = Interrupted(f"stopped {job.monitor.stop_reason} after step {job.step:,}, before all steps were traced.")
    stopped.agreed = True
    raise stopped


def _start_recorder(session: Session, done: int, asked: TracedSteps, recorder: Recorder) -> list[tuple[int, int]]:
    """Prepare the recorder one step ahead, and have all ranks begin the first traced step together."""
    if done == max(0, asked.first - 2):
        recorder.prepare()
    if done != asked.first - 1:
        return []
    clock = measure_offset(session.group)
    recorder.start()
    session.group.barrier("the first step that is traced")
    return [clock]


def _write_trace(recorder: Recorder, path: Path) -> None:
    try:
        path.parent.mkdir(exist_ok=True)
        recorder.write(path)
    except OSError as error:
        raise FolderError(f"{path}: the trace cannot be written: {error.strerror or error}.") from error


def _beside(path: Path, rank: int) -> Path:
    return path.with_name(f"rank-{rank}.json.gz")


def _report(session: Session, asked: TracedSteps, summaries: list[RankSummary], offsets: list[int]) -> None:
    path = session.folder.path
    steps = f"step {asked.first:,}" if asked.first == asked.last else f"steps {asked.first:,} to {asked.last:,}"
    title = f"{session.config.recipe}: {steps} on {count(session.group.world_size, 'rank')}, {session.device_name}"
    text = write_summary(title, summaries, offsets)
    write_durably(path / "summary.txt", text)
    session.say(f"\n{text}")
    session.say(f"timeline:   {path / 'timeline.json.gz'} (open it at https://ui.perfetto.dev)")
    session.say(f"traces:     {path / 'traces'}")
    session.say(f"run folder: {path}")


def _remove_traces_of_training(folder: RunFolder) -> None:
    folder.metrics.unlink(missing_ok=True)
    if folder.checkpoints.is_dir() and not any(folder.checkpoints.iterdir()):
        folder.checkpoints.rmdir()
