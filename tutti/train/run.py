"""One rank's life: join the others, build the job, train, leave a record."""

import contextlib
import os
import shutil
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tutti.config.run import RunConfig
from tutti.errors import TuttiError
from tutti.launch.local import launch_line
from tutti.records.folder import RunFolder, check_writable, create_folder, write_config
from tutti.records.output import Tee, captured_output
from tutti.records.record import Record
from tutti.runtime.device import choose_device, set_determinism, set_threads
from tutti.runtime.group import Group, join
from tutti.runtime.placement import Placement
from tutti.train.build import Objects, build_job
from tutti.train.check import check_parts
from tutti.train.job import Job
from tutti.train.loop import train


@dataclass(frozen=True)
class Outcome:
    """What a finished run gives back."""

    folder: RunFolder
    results: dict[str, float]
    samples_per_second: float | None
    model: nn.Module


def run_rank(
    config: RunConfig,
    placement: Placement,
    folder: RunFolder | None = None,
    resume: Path | None = None,
    objects: Objects | None = None,
) -> Outcome:
    """Train as one rank of a run; rank 0 makes the run folder if the launcher has not."""
    threads = set_threads(config.runtime, placement)
    set_determinism(config.runtime)
    error: TuttiError | None = None
    device = torch.device("cpu")
    try:
        device = choose_device(config.runtime, placement)
        if objects is None:
            check_parts(config, placement.world_size)
        if folder is None:
            check_writable(config.out)
    except TuttiError as found:
        error = found
    group = join(placement, config.runtime)
    try:
        group.agree(error)
        folder, is_new = _open_folder(config, group, folder, resume)
        with captured_output(folder.log(group.rank), on_screen=group.is_first):
            try:
                outcome = _run(config, objects or Objects(), group, device, threads, folder, resume, is_new)
            except BaseException as failure:
                if not isinstance(failure, TuttiError):
                    _log_traceback()
                raise
        group.leave()
        return outcome
    except BaseException:
        _abandon()
        raise


def _open_folder(
    config: RunConfig, group: Group, folder: RunFolder | None, resume: Path | None
) -> tuple[RunFolder, bool]:
    """The run folder on every rank, and whether it is new; a resumed run goes on in its own."""
    if resume is not None:
        return RunFolder(resume.parent.parent), False
    if folder is None:
        error: TuttiError | None = None
        if group.is_first:
            try:
                folder = create_folder(config.out, config.recipe, group.world_size)
            except TuttiError as found:
                error = found
        group.agree(error)
        folder = group.from_first(folder)
    assert folder is not None
    return folder, True


def _run(
    config: RunConfig,
    objects: Objects,
    group: Group,
    device: torch.device,
    threads: int,
    folder: RunFolder,
    resume: Path | None,
    is_new: bool,
) -> Outcome:
    record = Record.open(folder.record)
    if group.is_first:
        record.content |= {"recipe": config.recipe, "ranks": group.world_size, "seed": config.seed}
        record.start(
            launcher=group.placement.launcher,
            launch_line=launch_line(),
            ranks=group.world_size,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            threads_per_rank=threads,
            resumed_from=str(resume) if resume else None,
        )
    hosts = group.gather(os.uname().nodename)
    try:
        job = build_job(config, objects, group, device, folder, resume)
    except TuttiError as error:
        if group.is_first:
            _discard(folder, record, is_new, error)
        raise
    try:
        if group.is_first:
            record.content["segments"][-1]["hosts"] = hosts
            record.content["plan"] = _facts(job)
            record.write()
            write_config(folder, config.as_yaml())
            _announce(job, resume)
        train(job)
    except BaseException as error:
        job.close()
        if group.is_first:
            state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            record.end(state, failure=f"{type(error).__name__}: {error}".split("\n")[0], step=job.step)
        raise
    job.close()
    if group.is_first:
        seconds = {name: round(value, 3) for name, value in job.clock.totals.items()}
        rate = job.samples_per_second
        record.end("finished", step=job.step, results=job.results, samples_per_second=rate, seconds=seconds)
    return Outcome(folder, job.results, job.samples_per_second, job.learner.model)


def _discard(folder: RunFolder, record: Record, is_new: bool, error: TuttiError) -> None:
    """A run that never began leaves nothing; one that could not be resumed keeps what it had."""
    if is_new:
        shutil.rmtree(folder.path, ignore_errors=True)
        with contextlib.suppress(OSError):  # the folders above it that are empty
            os.removedirs(folder.path.parent)
    else:
        record.end("failed", failure=str(error))


def _announce(job: Job, resume: Path | None) -> None:
    plan, config = job.plan, job.config
    parameters = sum(p.numel() for p in job.learner.model.parameters())
    accumulated = f" in {plan.passes} passes of {plan.micro_batch}" if plan.passes > 1 else ""
    job.journal.say(
        f"{config.recipe}: {config.model.name} ({parameters:,} parameters) on {config.data.name}, "
        f"{plan.train_samples:,} training samples"
    )
    job.journal.say(
        f"{plan.world_size} rank(s) on {job.device.type}, {torch.get_num_threads()} thread(s) each; "
        f"global batch {plan.global_batch} = {plan.world_size} x {plan.per_rank_batch}{accumulated}; "
        f"{plan.steps_per_epoch:,} steps an epoch, {plan.epochs} epochs, {config.precision}"
    )
    if note := getattr(job.loader.dataset, "note", None):
        job.journal.say(f"data: {note}")
    if resume:
        job.journal.say(f"resumed from {resume} at step {job.step:,}")


def _facts(job: Job) -> dict[str, object]:
    plan = job.plan
    return {
        "global_batch": plan.global_batch,
        "per_rank_batch": plan.per_rank_batch,
        "micro_batch": plan.micro_batch,
        "train_samples": plan.train_samples,
        "steps_per_epoch": plan.steps_per_epoch,
        "total_steps": plan.total_steps,
        "peak_lr": job.schedule.peak_lr,
        "parameters": sum(p.numel() for p in job.learner.model.parameters()),
    }


def _log_traceback() -> None:
    """Into this rank's log only: the screen shows the first cause, once."""
    stream = sys.stderr.log if isinstance(sys.stderr, Tee) else sys.stderr
    with contextlib.suppress(OSError):
        traceback.print_exc(file=stream)


def _abandon() -> None:
    """Drop the process group without waiting for anyone."""
    if torch.distributed.is_initialized():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.distributed.destroy_process_group()
