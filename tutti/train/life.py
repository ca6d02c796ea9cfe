"""The life of a run on one rank, whichever framework it is made of: folder, record, training, what remains."""

import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tutti.config.framework import keras_backend
from tutti.config.plan import Plan
from tutti.config.run import RunConfig
from tutti.errors import Interrupted, TuttiError
from tutti.optim.schedule import Schedule
from tutti.ranks.group import Group, Machine
from tutti.ranks.hang_detection import Watch
from tutti.runs.folder import RunFolder, remove_folder, write_config
from tutti.runs.journal import Journal
from tutti.runs.output import captured_output, log_traceback
from tutti.runs.record import Record, summarise_epochs
from tutti.train.clock import Clock
from tutti.train.start import begin_record, make_folder
from tutti.train.stragglers import Stragglers


class Running(Protocol):
    """What is asked of the job of a run."""

    config: RunConfig
    plan: Plan
    schedule: Schedule
    journal: Journal
    clock: Clock
    step: int
    results: dict[str, float]
    samples_per_second: float | None
    stragglers: Stragglers

    @property
    def parameters(self) -> int: ...

    @property
    def gradient_bytes(self) -> int: ...

    @property
    def note(self) -> str | None: ...

    @property
    def ended_by(self) -> str: ...

    def tell_stop(self) -> Iterable[str]: ...

    def close(self) -> None: ...


_STATES = {KeyboardInterrupt: "stopped", Interrupted: "interrupted"}

_MOST_LINES = 16

JobType = TypeVar("JobType", bound=Running)


def live(
    config: RunConfig,
    group: Group,
    watch: Watch,
    machine: Machine,
    folder: RunFolder | None,
    resume: Path | None,
    build: Callable[[RunFolder, Path | None], JobType],
    train: Callable[[JobType], None],
    facts: Callable[[JobType], dict[str, Any]] = lambda _: {},
) -> tuple[RunFolder, JobType]:
    """Build a job and train it, with all that is written about it; rank 0 makes the run folder where there is none."""
    folder, is_new = _open_folder(config, group, folder, resume)
    watch.writes_to(folder)
    with captured_output(folder.log(group.rank), on_screen=group.is_first):
        try:
            return folder, _live_in(folder, is_new, config, group, watch, machine, resume, build, train, facts)
        except BaseException as failure:
            if not isinstance(failure, TuttiError):
                log_traceback()
            raise


def _live_in(
    folder: RunFolder,
    is_new: bool,
    config: RunConfig,
    group: Group,
    watch: Watch,
    machine: Machine,
    resume: Path | None,
    build: Callable[[RunFolder, Path | None], JobType],
    train: Callable[[JobType], None],
    facts: Callable[[JobType], dict[str, Any]] = lambda _: {},
) -> JobType:
    record = Record.open(folder.record)
    if group.is_first:
        begin_record(record, config, group, machine, resumed_from=str(resume) if resume else None)
    cores = _cores(group, machine)
    try:
        with watch.explained():
            job = build(folder, resume)
    except Exception as error:
        if group.is_first:
            _discard(folder, record, is_new, error)
        raise
    try:
        if group.is_first:
            record.content["segments"][-1]["hosts"] = group.hosts
            record.content["segments"][-1]["cores"] = cores
            record.content["plan"] = _facts(job)
            record.write()
            write_config(folder, config.as_yaml())
            _announce(job, machine, cores, resume)
        with watch.explained():
            train(job)
        for line in job.tell_stop():
            job.journal.say(line)
    except BaseException as error:
        job.close()
        if group.is_first:
            record.fail(error, _STATES.get(type(error), "failed"), step=job.step, **_slow(job))
        raise
    job.close()
    if group.is_first:
        epochs = summarise_epochs(folder.metrics, group.world_size)
        record.end("finished", step=job.step, **_results(job), **epochs, **_slow(job), **facts(job))
    return job


def _open_folder(
    config: RunConfig, group: Group, folder: RunFolder | None, resume: Path | None
) -> tuple[RunFolder, bool]:
    """The run folder on every rank, and whether it is new; a resumed run goes on in its own."""
    if resume is not None:
        return RunFolder(resume.parent.parent), False
    if folder is None:
        folder = make_folder(group, config.out, config.recipe)
    return folder, not (folder.record.exists() or folder.job.exists() or folder.study.exists())


def _discard(folder: RunFolder, record: Record, is_new: bool, error: Exception) -> None:
    """A run that never began leaves nothing; one that could not be resumed keeps what it had."""
    if is_new and isinstance(error, TuttiError):
        remove_folder(folder)
    else:
        record.fail(error)


def _cores(group: Group, machine: Machine) -> list[dict[str, Any]] | None:
    """The cores of every rank, where ranks were to be bound; every rank enters."""
    if machine.binding is None or machine.binding.mode == "none":
        return None
    return group.gather(machine.binding.record() | {"line": machine.binding.line(), "host": platform.node()})


def _announce(job: Running, machine: Machine, cores: list[dict[str, Any]] | None, resume: Path | None) -> None:
    plan, config = job.plan, job.config
    accumulated = f" in {plan.passes} passes of {plan.micro_batch}" if plan.passes > 1 else ""
    keras = f" in Keras on {keras_backend(config)}"
    made_of = {"torch": "", "keras": keras, "tensorflow": " in TensorFlow"}[config.framework]
    job.journal.say(
        f"{config.recipe}: {config.model.name} ({job.parameters:,} parameters){made_of} on {config.data.name}, "
        f"{plan.train_samples:,} training samples"
    )
    job.journal.say(
        f"{plan.world_size} rank(s) on {machine.device}, {machine.threads} thread(s) each; "
        f"global batch {plan.global_batch} = {plan.world_size} x {plan.per_rank_batch}{accumulated}; "
        f"{plan.steps_per_epoch:,} steps an epoch, {plan.epochs} epochs, {config.precision}"
    )
    for rank, bound in enumerate((cores or [])[:_MOST_LINES]):
        job.journal.say(f"rank {rank} on host {bound['host']}: {bound['line']}")
    if job.note:
        job.journal.say(f"data: {job.note}")
    if resume:
        job.journal.say(f"resumed from {resume} at step {job.step:,}")


def _facts(job: Running) -> dict[str, object]:
    plan = job.plan
    return {
        "global_batch": plan.global_batch,
        "per_rank_batch": plan.per_rank_batch,
        "micro_batch": plan.micro_batch,
        "train_samples": plan.train_samples,
        "steps_per_epoch": plan.steps_per_epoch,
        "total_steps": plan.total_steps,
        "peak_lr": job.schedule.peak_lr,
        "parameters": job.parameters,
        "gradient_bytes": job.gradient_bytes,
    }


def _results(job: Running) -> dict[str, Any]:
    seconds = {name: round(value, 3) for name, value in job.clock.totals.items()}
    return {
        "ended_by": job.ended_by,
        "results": job.results,
        "samples_per_second": job.samples_per_second,
        "seconds": seconds,
    }


def _slow(job: Running) -> dict[str, Any]:
    """Ranks for which the others have waited."""
    found = [asdict(slow) for slow in job.stragglers.found.values()]
    return {"slow_ranks": found} if found else {}
