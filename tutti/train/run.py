"""One rank of a run, in any framework: join the others, build the job, train, write the record."""

import functools
import os
import platform
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tutti import units
from tutti.config.check import check_init
from tutti.config.run import RunConfig
from tutti.errors import Cause, Interrupted, OutOfMemory, TuttiError, cause_of, summarise_error
from tutti.ranks.device import peak_memory
from tutti.ranks.failures import name_signal
from tutti.ranks.group import Group, Joined, Machine, PreflightCheck, check_same_code
from tutti.ranks.hang_detection import Monitor
from tutti.ranks.placement import Placement
from tutti.ranks.process import FOLDER_VARIABLE, launch_line
from tutti.runs.files import remove_unfinished
from tutti.runs.folder import (
    RunFolder,
    check_writable,
    create_folder,
    note_script_run,
    owned,
    remove_folder,
    write_config,
)
from tutti.runs.output import captured_output, log_traceback
from tutti.runs.record import (
    PREDICTED_VARIABLE,
    SEGMENTS_VARIABLE,
    Record,
    check_segments,
    count_segments,
    describe_best,
    summarise_epochs,
)
from tutti.train.build import Framework, agreed, build_job
from tutti.train.job import Job
from tutti.train.summary import announce, data_shapes, plan_facts, results_of, slow_ranks

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StoppedAtStart(TuttiError):
    """A signal came before the first step, when there was nothing to save yet."""

    exit_code = Interrupted.exit_code
    cause = Cause.INTERRUPTED


@dataclass(frozen=True)
class TrainingResult:
    """What a finished run returns."""

    folder: RunFolder
    results: dict[str, float]
    samples_per_second: float | None
    model: Any  # of torch or of Keras


def run_rank(
    framework: Framework,
    config: RunConfig,
    placement: Placement,
    folder: RunFolder | None = None,
    resume: Path | None = None,
    preflight: PreflightCheck | None = None,
) -> TrainingResult:
    """Train as one rank of a run; rank 0 makes the run folder if the launcher has not.

    `preflight` examines the ranks before they connect; it is given the store where they have met, if they have.
    """
    with (
        join_run(framework, config, placement, folder, resume, preflight) as joined,
        begin_job(framework, config, joined, resume) as job,
    ):
        framework.train(job)
    return TrainingResult(joined.folder, job.results, job.samples_per_second, job.learner.model)


@dataclass(frozen=True)
class JoinedRun:
    """A run whose ranks have met, and its folder, in which no other process trains."""

    rank: Joined
    monitor: Monitor
    folder: RunFolder
    is_new: bool


@contextmanager
def join_run(
    framework: Framework,
    config: RunConfig,
    placement: Placement,
    folder: RunFolder | None = None,
    resume: Path | None = None,
    preflight: PreflightCheck | None = None,
) -> Iterator[JoinedRun]:
    """Meet the other ranks, and leave them when the run has ended; every rank enters."""
    seen = _segments_seen(folder, resume)

    def check() -> None:
        framework.check(config, placement.world_size)
        if resume is None:
            check_init(config)
        if folder is None:
            check_writable(config.out)

    with ExitStack() as after, framework.joined(config, placement, check, preflight or (lambda store: None)) as rank:
        check_same_code(rank.group)
        monitor = Monitor(placement, rank.group.hub, rank.group.hosts, config.runtime)
        try:
            own, is_new = _open_folder(config, rank.group, folder, resume)
            if rank.group.is_first and (launched := os.environ.get(FOLDER_VARIABLE)):
                note_script_run(RunFolder(Path(launched)), own)
            with _owned(own, rank.group, seen):
                yield JoinedRun(rank, monitor, own, is_new)
        finally:
            monitor.close()
        after.enter_context(_on_signals(signal.SIG_IGN))  # the run is finished, and its ranks only leave


def make_folder(group: Group, out: str, name: str) -> RunFolder:
    """A new run folder, made by rank 0; every rank enters."""
    made = agreed(group, lambda: create_folder(out, name, group.world_size) if group.is_first else None)
    return RunFolder(Path(group.from_first(made.path if made else None)))


def begin_record(record: Record, config: RunConfig, group: Group, machine: Machine, **more: Any) -> None:
    """Open a segment of the record with what runs, how it was started and what it runs on."""
    record.content |= {"recipe": config.recipe, "ranks": group.world_size, "seed": config.seed}
    record.start(
        framework=config.framework,
        launcher=group.placement.launcher,
        launch_line=launch_line(),
        ranks=group.world_size,
        device=machine.device_name,
        threads_per_rank=machine.threads,
        **more,
    )


@contextmanager
def _owned(folder: RunFolder, group: Group, seen: int | None) -> Iterator[None]:
    """Have rank 0 hold the folder, in which no other process may train, or have trained meanwhile; all ranks enter."""

    def own() -> None:
        held.enter_context(owned(folder))
        if seen is not None:
            check_segments(folder.record, seen)
        remove_unfinished(folder.path, folder.record.name)

    with ExitStack() as held:
        agreed(group, lambda: own() if group.is_first else None)
        yield


def _segments_seen(folder: RunFolder | None, resume: Path | None) -> int | None:
    """The segments of the record when the checkpoint was chosen, by the launcher or here; None for a new folder."""
    place = RunFolder(resume.parent.parent) if resume is not None else folder
    given = os.environ.get(SEGMENTS_VARIABLE, "")
    if place is None:
        return None
    return int(given) if given.isdecimal() else count_segments(place.record)


@contextmanager
def _on_signals(handler: Any) -> Iterator[None]:
    """Have a handler take the signals that stop a run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


def _stop_at_start(config: RunConfig, folder: RunFolder) -> Callable[[int, Any], None]:
    def stop(number: int, _: Any) -> None:
        raise StoppedAtStart(
            f"stopped on {name_signal(number)} before the first step: there was nothing to save. "
            f"Resume with: {config.resume_line(folder.path)}"
        )

    return stop


def _open_folder(
    config: RunConfig, group: Group, folder: RunFolder | None, resume: Path | None
) -> tuple[RunFolder, bool]:
    """The run folder on every rank, and whether it is new; a resumed run continues in its own."""
    if resume is not None:
        return RunFolder(resume.parent.parent), False
    if folder is None:
        folder = make_folder(group, config.out, config.recipe)
    return folder, not (folder.record.exists() or folder.job.exists() or folder.study.exists())


@contextmanager
def begin_job(framework: Framework, config: RunConfig, joined: JoinedRun, resume: Path | None) -> Iterator[Job[Any]]:
    """Build a job to train; the folder gets what ranks print, the record and the configuration. Every rank enters."""
    rank, monitor, folder = joined.rank, joined.monitor, joined.folder
    monitor.write_to(folder)
    group = rank.group
    log, prefix = folder.shared_log(group.rank, group.world_size, group.placement.node_rank)
    with captured_output(log, group.is_first, prefix):
        try:
            record = Record.open(folder.record)
            if rank.group.is_first:
                begin_record(record, config, rank.group, rank.machine, resumed_from=str(resume) if resume else None)
            cores = _cores(rank.group, rank.machine)
            try:
                with (
                    monitor.explained(),
                    _memory_named(rank.group, folder),
                    _on_signals(_stop_at_start(config, folder)),
                ):
                    job = build_job(framework, config, rank.group, monitor, rank.device, folder, resume)
            except BaseException as error:
                if rank.group.is_first:
                    _discard(folder, record, joined.is_new, error)
                raise
            if rank.group.is_first:
                segment = record.content["segments"][-1]
                segment["hosts"], segment["cores"] = rank.group.hosts, cores
            begin = functools.partial(announce, job, rank.machine, cores, resume)
            with _staged(job), _recorded(framework, job, record, rank.device, begin):
                yield job
        except BaseException as failure:
            if not isinstance(failure, TuttiError):
                log_traceback()
            raise


@contextmanager
def _staged(job: Job[Any]) -> Iterator[None]:
    """Have datasets with a `stage` copy their shards to a disk of the host while the job trains."""
    found = [getattr(data, "stage", None) for data in (job.loader.dataset, *job.valid_sets.values())]
    stages = [stage for stage in found if stage is not None]
    say = job.journal.say if job.group.is_first else None
    for stage in stages:
        stage.begin(say)
    complete = False
    try:
        yield
        complete = True
    finally:
        for stage in stages:
            stage.end(complete)


@contextmanager
def _recorded(
    framework: Framework, job: Job[Any], record: Record, device: torch.device, begin: Callable[[], None]
) -> Iterator[None]:
    """Write into the record what a job trains, and how that ended."""
    is_first, folder = job.group.is_first, job.folder
    try:
        if is_first:
            record.content["plan"] = plan_facts(job)
            record.content["data"] = data_shapes(job.loader.dataset)
            if job.starting_point is not None:
                record.content["init"] = job.starting_point.record()
            if predicted := os.environ.get(PREDICTED_VARIABLE):
                record.note_memory(predicted_peak_bytes=int(predicted))
            record.write()
            write_config(folder, job.config.as_yaml())
            begin()
        with job.monitor.explained(), _memory_named(job.group, folder, job):
            yield
        record.note_memory(measured_peak_bytes=max(job.group.gather(peak_memory(device))))
        for line in job.describe_stop():
            job.journal.say(line)
        if is_first and job.config.log.noise_scale:
            from tutti.runs.noise_scale import describe, read_noise_scale

            job.journal.say(describe(read_noise_scale(folder.path)))
    except BaseException as error:
        job.close(_state_of(error))
        if is_first:
            record.note_memory(measured_peak_bytes=peak_memory(device))  # of this rank: others may be gone
            record.fail(error, _state_of(error), step=job.step, **slow_ranks(job))
        raise
    epochs = summarise_epochs(folder.metrics, job.group.world_size) if is_first else {}
    if best := describe_best(epochs):
        job.journal.say(best)
    job.close()
    if is_first:
        more = slow_ranks(job) | framework.results(job)
        record.end("finished", step=job.step, **results_of(job), **epochs, **more)


def _describe_allocation(error: BaseException) -> str:
    """What an allocator has refused, from the text of its error."""
    found = re.search(r"(?:[Tt]ried|Unable) to allocate ([\d.]+ \w+)", str(error))
    if found is None:
        return summarise_error(error).rstrip(".")
    asked = found[1]
    return f"an allocation of {units.size(int(asked.split()[0])) if asked.endswith(' bytes') else asked} failed"


@contextmanager
def _memory_named(group: Group, folder: RunFolder, job: Job[Any] | None = None) -> Iterator[None]:
    """Replace the error of an allocator by one of ours, without the frames that hold what was allocated."""
    found = ""
    try:
        yield
        return
    except Exception as error:
        if isinstance(error, TuttiError) or cause_of(error) is not Cause.OUT_OF_MEMORY:
            raise
        log_traceback()
        found = _describe_allocation(error)
        traceback.clear_frames(error.__traceback__)
    when = "before the first step" if job is None else f"in step {job.step + 1:,}"
    named = OutOfMemory(f"rank {group.rank} on host {platform.node()} ran out of memory {when}: {found}.")
    named.record = folder.record
    named.rank, named.step = group.rank, None if job is None else job.step + 1
    raise named


def _discard(folder: RunFolder, record: Record, is_new: bool, error: BaseException) -> None:
    """Remove the folder of a run that never began; one that could not be resumed keeps what it had."""
    if is_new and isinstance(error, TuttiError) and error.cause not in (Cause.INTERRUPTED, Cause.OUT_OF_MEMORY):
        remove_folder(folder)
    else:
        record.fail(error, _state_of(error))


def _state_of(error: BaseException) -> str:
    """The state of a run that an error has ended."""
    is_stopped = isinstance(error, TuttiError) and error.cause == Cause.INTERRUPTED  # also on another rank
    if is_stopped:
        return "interrupted"
    return "stopped" if isinstance(error, KeyboardInterrupt) else "failed"


def _cores(group: Group, machine: Machine) -> list[dict[str, Any]] | None:
    """The cores of every rank, where ranks were to be bound; every rank enters."""
    if machine.binding is None or machine.binding.mode == "none":
        return None
    return group.gather(machine.binding.record() | {"line": machine.binding.line(), "host": platform.node()})
