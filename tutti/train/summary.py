"""What a run prints of itself at its start, and what its record holds."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from tutti.config.framework import keras_backend
from tutti.ranks.group import Machine
from tutti.train.job import Job
from tutti.units import count

_MOST_LINES = 16


def announce(job: Job[Any], machine: Machine, cores: list[dict[str, Any]] | None, resume: Path | None) -> None:
    """Print what a run is to do, and on what."""
    plan, config = job.plan, job.config
    accumulated = f" in {plan.passes} passes of {plan.micro_batch}" if plan.passes > 1 else ""
    keras = f" in Keras on {keras_backend(config)}"
    made_of = {"torch": "", "keras": keras, "tensorflow": " in TensorFlow"}[config.framework]
    job.journal.say(
        f"{config.recipe}: {config.model.name} ({job.learner.parameters:,} parameters){made_of} on {config.data.name}, "
        f"{plan.train_samples:,} training samples"
    )
    layout = plan.layout
    job.journal.say(
        f"{count(plan.world_size, 'rank')} on {machine.device}, {count(machine.threads, 'thread')} each; "
        f"global batch {plan.global_batch} = {layout.data_ranks} x {plan.per_rank_batch}{accumulated}; "
        f"{count(plan.steps_per_epoch, 'step')} an epoch, {count(plan.epochs, 'epoch')}, {config.precision}"
    )
    for line in (
        *job.schedule.notes,
        *layout.notes,
        *(() if layout.is_data_parallel else (f"layout: {layout.line()}",)),
    ):
        job.journal.say(line)
    for rank, bound in enumerate((cores or [])[:_MOST_LINES]):
        job.journal.say(f"rank {rank} on host {bound['host']}: {bound['line']}")
    if note := getattr(job.loader.dataset, "note", None):
        job.journal.say(f"data: {note}")
    if resume:
        job.journal.say(f"resumed from {resume} at step {job.step:,}")
    for line in job.starting_point.lines() if job.starting_point else ():
        job.journal.say(line)
    if job.later_steps:
        steps = ", ".join(f"{step:,}" for step in job.later_steps)
        job.journal.say(f"the checkpoints after it, of steps {steps}, are removed when the next one is saved")


def plan_facts(job: Job[Any]) -> dict[str, object]:
    """The numbers of a run that follow from its recipe, its data and its ranks."""
    plan = job.plan
    return {
        "global_batch": plan.global_batch,
        "per_rank_batch": plan.per_rank_batch,
        "micro_batch": plan.micro_batch,
        "train_samples": plan.train_samples,
        "steps_per_epoch": plan.steps_per_epoch,
        "total_steps": plan.total_steps,
        "peak_lr": job.schedule.peak_lr,
        "parameters": job.learner.parameters,
        "gradient_bytes": job.learner.gradient_bytes,
    }


def data_shapes(data: Any) -> dict[str, Any]:
    """What the model was built for, with which it can be built again without the data."""
    shape, classes = (getattr(data, name, None) for name in ("input_shape", "num_classes"))
    return {"input_shape": None if shape is None else list(shape), "num_classes": classes}


def results_of(job: Job[Any]) -> dict[str, Any]:
    """How a run has ended, and how long it took."""
    seconds = {name: round(value, 3) for name, value in job.clock.totals.items()}
    return {
        "ended_by": job.ended_by,
        "results": job.results,
        "samples_per_second": job.samples_per_second,
        "seconds": seconds,
    }


def slow_ranks(job: Job[Any]) -> dict[str, Any]:
    """Ranks for which the others have waited."""
    found = [asdict(slow) for slow in job.stragglers.found.values()]
    return {"slow_ranks": found} if found else {}
