"""`tutti bench` on the ranks: the phases of a recipe, or of variants of it, in repeated trials."""

import functools
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tutti.bench.ceilings import cache_bytes, measure_ceilings
from tutti.bench.results import PARTS, Ceilings, Measurement, Times, Work, write_measurements
from tutti.bench.session import Session, open_session
from tutti.bench.verdict import Verdict, judge
from tutti.bench.work import count_work
from tutti.bench.workload import Step, Workload, open_workload
from tutti.config.check import check_parts
from tutti.config.load import resolve
from tutti.config.recipes import read_yaml
from tutti.config.run import RunConfig
from tutti.errors import ConfigError, TuttiError
from tutti.ranks.placement import Placement
from tutti.runs.folder import RunFolder
from tutti.runs.step_parts import StepPart
from tutti.train.build import agreed

_LEAST_STEPS, _MOST_STEPS = 3, 2000  # of a phase in a trial
_WEIGHTS = {"whole": 2.0, "copy": 0.3, "double": 0.7, "exchange": 0.7}  # share of the time of a phase; 1 for others
_ceilings: dict[tuple[str, str, int], tuple[Ceilings, ...]] = {}  # the same for all variants

Report = Callable[[str], None]


@dataclass
class _Log:
    """The results of the trials on this rank."""

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
    report: Report = lambda _: None,
) -> Measurement:
    """Measure a recipe; every rank must call this and gets the same result, or the same error.

    `seconds` is about the time of all trials, without the start and the warm-up.
    """
    all_marked = config.log.model_copy(update={"phases": True, "every_steps": 1})
    report("building")
    with open_workload(session, config.model_copy(update={"log": all_marked})) as workload:
        log = _Log()
        steps = _calibrate(session, workload, trials, seconds, report)
        for trial in range(trials):
            report(f"trial {trial + 1} of {trials}")
            for phase, count in steps.items():
                taken, parts = _block(session, workload, phase, count)
                log.seconds.setdefault(phase, []).append(taken)
                if phase == "whole":
                    _note_parts(log, taken, parts)
                    log.peak_bytes = _peak_bytes(session.device)
        report("counting")
        ceilings = _find_ceilings(session, config)
        work = _count(session, workload, log)
        return _assemble(session, config, workload, name, overrides, steps, log, work, ceilings)


def _calibrate(session: Session, workload: Workload, trials: int, seconds: float, report: Report) -> Mapping[str, int]:
    """Warm up every phase, and choose its number of steps in a trial."""
    steps: dict[str, int] = {}
    phases = workload.phases()
    unit = seconds / trials / sum(_WEIGHTS.get(phase, 1.0) for phase in phases)
    for phase in phases:
        report(f"warming up: {phase}")
        _block(session, workload, phase, 1)
        taken, _ = _block(session, workload, phase, _LEAST_STEPS)
        slowest = max(session.group.gather(taken))
        wanted = int(unit * _WEIGHTS.get(phase, 1.0) / max(slowest, 1e-9))
        steps[phase] = min(max(wanted, _LEAST_STEPS), _MOST_STEPS)
    _reset_peak(session.device)
    return steps


def _block(session: Session, workload: Workload, phase: str, steps: int) -> tuple[float, dict[StepPart, float]]:
    """Seconds per step on this rank, in all and by part; ranks begin together."""
    with ExitStack() as stack:
        step = agreed(session.group, functools.partial(_begin, workload, phase, stack))
        session.group.sum(torch.zeros(1))  # a barrier
        workload.learner.timer.lap(0)
        began = time.perf_counter()
        for _ in range(steps):
            step()
        workload.synchronise()
        taken = (time.perf_counter() - began) / steps
    parts = workload.learner.timer.lap(steps)
    return taken, {part: value / steps for part, value in parts.items()}


def _begin(workload: Workload, phase: str, stack: ExitStack) -> Step:
    """The step of a phase, after one call: its errors are raised here, where ranks agree on them."""
    try:
        step = stack.enter_context(workload.phases()[phase]())
        step()
        workload.synchronise()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"out of memory in the phase {phase} with {workload.plan.per_rank_batch} samples a rank. "
            "Lower batch.per_rank or batch.micro."
        ) from error
    return step


def _note_parts(log: _Log, whole: float, parts: Mapping[StepPart, float]) -> None:
    for part in PARTS:
        value = max(0.0, whole - sum(parts.values())) if part is StepPart.OTHER else parts[part]
        log.parts.setdefault(part.key, []).append(value)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_bytes(device: torch.device) -> int:
    """The peak memory: of the GPU since the last reset, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _find_ceilings(session: Session, config: RunConfig) -> tuple[Ceilings, ...]:
    """The measured peaks of every rank; all ranks measure at once, since those of a host share its memory."""
    conditions = (str(session.device), config.precision, torch.get_num_threads())
    if conditions not in _ceilings:
        session.group.sum(torch.zeros(1))
        _ceilings[conditions] = tuple(
            session.group.gather(measure_ceilings(session.device, config.precision), Ceilings)
        )
    return _ceilings[conditions]


def _count(session: Session, workload: Workload, log: _Log) -> Work | None:
    """The work of a step as rank 0 counts it; every rank must call this."""
    learner = workload.learner
    layout = workload.plan.layout
    if not layout.is_data_parallel:  # the number of counted steps depends on the time, and all ranks must make each
        log.notes += ["the work of a step is not counted where ranks compute together"] * session.group.is_first
        if not workload.stages:
            log.notes += ["compute includes the communication of the layout"] * session.group.is_first
        return None
    cache = cache_bytes(session.device, session.placement.local_size)
    work: Work | None = None
    try:
        batch = workload.cached.micro_batches
        work = count_work(
            workload.one_step, session.device, learner.model, learner.optimizer, batch, cache, log.notes.append
        )
    except (RuntimeError, TuttiError) as error:
        log.notes.append(f"the work of a step could not be counted: {error}")
    return session.group.from_first(work, Work | None)


def _assemble(
    session: Session,
    config: RunConfig,
    workload: Workload,
    name: str,
    overrides: tuple[str, ...],
    steps: Mapping[str, int],
    log: _Log,
    work: Work | None,
    ceilings: tuple[Ceilings, ...],
) -> Measurement:
    logs: list[_Log] = session.group.gather(log, _Log)
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
        per_rank_batch=workload.plan.per_rank_batch,
        global_batch=workload.plan.global_batch,
        parameters=workload.learner.parameters,
        gradient_bytes=workload.gradient_bytes,
        steps=steps,
        seconds=_by_rank([each.seconds for each in logs]),
        parts=_by_rank([each.parts for each in logs]),
        peak_bytes=tuple(each.peak_bytes for each in logs),
        batches_are_samples=workload.batches_are_samples,
        sources=_sources(config, session.device),
        work=work,
        ceilings=ceilings,
        notes=tuple(dict.fromkeys(notes)),
        stages=workload.stages,
        passes=workload.plan.passes,
    )


def _by_rank(logs: list[dict[str, list[float]]]) -> Times:
    return {phase: tuple(tuple(log[phase]) for log in logs) for phase in logs[0]}


def _sources(config: RunConfig, device: torch.device) -> tuple[str, ...]:
    """Other values of data.source for this device, the fastest first."""
    given: Any = config.data
    if not hasattr(given, "source"):
        return ()
    return ("device", "memory") if device.type == "cuda" else ("memory",)


RESULT = "bench.json"
PICTURE = "bench.png"


@dataclass(frozen=True)
class Variant:
    """A recipe with some overrides, under a name."""

    name: str
    overrides: tuple[str, ...]
    config: RunConfig


@dataclass(frozen=True)
class Bench:
    """Measurements of all variants, with a verdict for each."""

    folder: RunFolder
    found: Sequence[Measurement]
    verdicts: Sequence[Verdict]


def read_variants(path: Path | None, recipe: str, overrides: Sequence[str]) -> list[Variant]:
    """The variants of a YAML file, each applied after the overrides of the command line; without a file, the recipe."""
    own = Variant("", (), resolve(recipe, overrides).config)
    if path is None:
        return [own]
    content = read_yaml(path, "--variants")
    if not isinstance(content, dict) or not content:
        raise ConfigError(
            f'--variants {path}: expected names, each with a list of overrides: "more: [data.workers=8]".'
        )
    found = []
    for name, words in content.items():
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ConfigError(
                f"--variants {path}: {name!r} has {words!r}: expected a list of overrides, as in [epochs=2]."
            )
        try:
            found.append(Variant(str(name), tuple(words), resolve(recipe, [*overrides, *words]).config))
        except ConfigError as error:
            raise ConfigError(f"--variants {path}: {name!r}: {error}") from None
    return found


def check(variants: Sequence[Variant], ranks: int, trials: int, seconds: float) -> None:
    """Check the input before ranks are started."""
    if trials < 2:
        raise ConfigError(f"--trials {trials}: expected 2 or more, so that there is a spread. Try 5.")
    if not seconds > 0:
        raise ConfigError(f"--seconds {seconds:g}: expected a number above 0. Try 20.")
    for variant in variants:
        if variant.config.framework != "torch":
            raise ConfigError(
                f"framework={variant.config.framework} cannot be measured: expected torch. Trace it with log.profile."
            )
        check_parts(variant.config, ranks)


def bench(
    variants: Sequence[Variant],
    placement: Placement,
    folder: RunFolder | None,
    trials: int,
    seconds: float,
    report: Report,
) -> Bench:
    """Measure all variants, with a verdict for each; every rank must call this and gets the same."""
    with open_session("bench", variants[0].config, placement, folder) as session:
        found, verdicts = [], []
        for variant in variants:
            label = f"{variant.name}: " if variant.name else ""
            found.append(_measure(session, variant, trials, seconds, lambda text, label=label: report(label + text)))
            verdicts.append(judge(found[-1]))
            if session.group.is_first:
                more: dict[str, Any] = {"verdicts": [each.content() for each in verdicts]}
                write_measurements(session.folder.path / RESULT, found, more)
        return Bench(session.folder, found, verdicts)


def _measure(session: Session, variant: Variant, trials: int, seconds: float, report: Report) -> Measurement:
    own = report if session.group.is_first else (lambda _: None)
    return measure(session, variant.config, variant.name, variant.overrides, trials, seconds, own)
