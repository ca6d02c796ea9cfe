"""The phases of a recipe measured on all ranks: warmed up, in repeated trials, each of which has every phase once."""

import functools
import os
import resource
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from tutti.bench.ceilings import cache_bytes, measure_ceilings
from tutti.bench.results import PARTS, Ceilings, Measurement, Times, Work
from tutti.bench.session import Session
from tutti.bench.subject import Step, Subject, opened
from tutti.bench.work import count_work
from tutti.config.run import RunConfig
from tutti.errors import ConfigError, TuttiError
from tutti.runs.step_parts import StepPart
from tutti.train.build import agreed

_LEAST_STEPS, _MOST_STEPS = 3, 2000  # of a phase in a trial
_WEIGHTS = {"whole": 2.0, "copy": 0.3, "double": 0.7, "exchange": 0.7}  # of the time, where a phase has not 1
_ceilings: dict[tuple[str, str, int], tuple[Ceilings, ...]] = {}  # the same for all variants

Tell = Callable[[str], None]


@dataclass
class _Log:
    """What the trials gave on this rank."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    parts: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: int = 0
    notes: list[str] = field(default_factory=list)


def measure(
    session: Session,
    config: RunConfig,
    name: str = "",
    overrides: tuple[str, ...] = (),
    trials: int = 5,
    seconds: float = 20.0,
    tell: Tell = lambda _: None,
) -> Measurement:
    """Measure a recipe; every rank enters and gets the same. What is wrong with it is raised on all ranks.

    `seconds` is about what the trials take in all; the start, the warm-up and long steps come on top of it.
    """
    all_marked = config.log.model_copy(update={"phases": True, "every_steps": 1})
    tell("building")
    with opened(session, config.model_copy(update={"log": all_marked})) as subject:
        log = _Log()
        steps = _calibrate(session, subject, trials, seconds, tell)
        for trial in range(trials):
            tell(f"trial {trial + 1} of {trials}")
            for phase, count in steps.items():
                taken, parts = _block(session, subject, phase, count)
                log.seconds.setdefault(phase, []).append(taken)
                if phase == "whole":
                    _note_parts(log, taken, parts)
                    log.peak_bytes = _peak_bytes(session.device)
        tell("counting")
        ceilings = _find_ceilings(session, config)
        work = _count(session, subject, log)
        return _assemble(session, config, subject, name, overrides, steps, log, work, ceilings)


def _calibrate(session: Session, subject: Subject, trials: int, seconds: float, tell: Tell) -> Mapping[str, int]:
    """Warm every phase up, and find how many steps of it make a trial."""
    steps: dict[str, int] = {}
    phases = subject.phases()
    unit = seconds / trials / sum(_WEIGHTS.get(phase, 1.0) for phase in phases)
    for phase in phases:
        tell(f"warming up: {phase}")
        _block(session, subject, phase, 1)
        taken, _ = _block(session, subject, phase, _LEAST_STEPS)
        slowest = max(session.group.gather(taken))
        wish = int(unit * _WEIGHTS.get(phase, 1.0) / max(slowest, 1e-9))
        steps[phase] = min(max(wish, _LEAST_STEPS), _MOST_STEPS)
    _forget_peak(session.device)
    return steps


def _block(session: Session, subject: Subject, phase: str, steps: int) -> tuple[float, dict[StepPart, float]]:
    """Seconds a step on this rank, and its parts as marked; ranks begin together."""
    with ExitStack() as stack:
        step = agreed(session.group, functools.partial(_begin, subject, phase, stack))
        session.group.sum(torch.zeros(1))  # all ranks are here
        subject.learner.timer.lap(0)
        began = time.perf_counter()
        for _ in range(steps):
            step()
        subject.synchronise()
        taken = (time.perf_counter() - began) / steps
    parts = subject.learner.timer.lap(steps)
    return taken, {part: value / steps for part, value in parts.items()}


def _begin(subject: Subject, phase: str, stack: ExitStack) -> Step:
    """The step of a phase, made once: what is wrong with it shows here, where ranks agree."""
    try:
        step = stack.enter_context(subject.phases()[phase]())
        step()
        subject.synchronise()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"out of memory in the phase {phase} with {subject.plan.per_rank_batch} samples a rank. "
            "Lower batch.per_rank or batch.micro."
        ) from error
    return step


def _note_parts(log: _Log, whole: float, parts: Mapping[StepPart, float]) -> None:
    for part in PARTS:
        value = max(0.0, whole - sum(parts.values())) if part is StepPart.OTHER else parts[part]
        log.parts.setdefault(part.key, []).append(value)


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_bytes(device: torch.device) -> int:
    """The most memory used so far: of the GPU since it was forgotten, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _find_ceilings(session: Session, config: RunConfig) -> tuple[Ceilings, ...]:
    """All ranks at once: those of a host share its memory."""
    conditions = (str(session.device), config.precision, torch.get_num_threads())
    if conditions not in _ceilings:
        session.group.sum(torch.zeros(1))
        _ceilings[conditions] = tuple(session.group.gather(measure_ceilings(session.device, config.precision)))
    return _ceilings[conditions]


def _count(session: Session, subject: Subject, log: _Log) -> Work | None:
    """The same step on every rank; what rank 0 counts stands for all."""
    learner = subject.learner
    cache = cache_bytes(session.device, session.placement.local_size)
    work: Work | None = None
    try:
        batch = subject.cached.micro_batches
        work = count_work(
            subject.one_step, session.device, learner.model, learner.optimizer, batch, cache, log.notes.append
        )
    except (RuntimeError, TuttiError) as error:
        log.notes.append(f"the work of a step could not be counted: {error}")
    return session.group.from_first(work)


def _assemble(
    session: Session,
    config: RunConfig,
    subject: Subject,
    name: str,
    overrides: tuple[str, ...],
    steps: Mapping[str, int],
    log: _Log,
    work: Work | None,
    ceilings: tuple[Ceilings, ...],
) -> Measurement:
    logs: list[_Log] = session.group.gather(log)
    notes = [f"rank {rank}: {note}" if rank else note for rank, each in enumerate(logs) for note in each.notes]
    return Measurement(
        name=name,
        overrides=overrides,
        settings=config.plain(),
        ranks=session.group.world_size,
        hosts=tuple(session.group.hosts),
        cores=session.group.from_first(len(os.sched_getaffinity(0))),
        local_ranks=session.group.from_first(session.placement.local_size),
        device=session.device.type,
        device_name=session.device_name,
        threads=torch.get_num_threads(),
        per_rank_batch=subject.plan.per_rank_batch,
        global_batch=subject.plan.global_batch,
        parameters=sum(parameter.numel() for parameter in subject.learner.model.parameters()),
        gradient_bytes=subject.gradient_bytes,
        steps=steps,
        seconds=_by_rank([each.seconds for each in logs]),
        parts=_by_rank([each.parts for each in logs]),
        peak_bytes=tuple(each.peak_bytes for each in logs),
        batches_are_samples=subject.batches_are_samples,
        sources=_sources(config, session.device),
        work=work,
        ceilings=ceilings,
        notes=tuple(dict.fromkeys(notes)),
    )


def _by_rank(logs: list[dict[str, list[float]]]) -> Times:
    return {phase: tuple(tuple(log[phase]) for log in logs) for phase in logs[0]}


def _sources(config: RunConfig, device: torch.device) -> tuple[str, ...]:
    """Where else the data may be kept, the fastest first."""
    given: Any = config.data
    if not hasattr(given, "source"):
        return ()
    return ("device", "memory") if device.type == "cuda" else ("memory",)
