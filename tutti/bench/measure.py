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

from tutti import units
from tutti.bench.ceilings import cache_bytes, measure_ceilings
from tutti.bench.results import PARTS, PHASES, Ceilings, Measurement, Times, Work, write_measurements
from tutti.bench.session import Session, open_session
from tutti.bench.trial_plan import PhaseCost, TrialPlan, plan_trials
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

_WARM_STEPS = 3  # of a phase, by which its time is estimated
_EXPENSIVE = 0.02  # of the time: a phase is warmed up only once if that takes longer
_COUNTED_STEPS, _COUNTING_SECONDS = 10, 2.5  # of compute, and without them: what counting takes
_MOST_COUNTING = 0.25  # of the time, left for counting
_ceilings: dict[tuple[str, str, int], tuple[Ceilings, ...]] = {}  # the same for all variants

Report = Callable[[str], None]
Clock = Callable[[], float]


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
    least_trials: int | None = None,
    clock: Clock = time.perf_counter,
) -> Measurement:
    """Measure a recipe; every rank must call this and gets the same result, or the same error.

    `seconds` is the time after the start, which is what building, compiling and the first batch take. Where all trials
    do not fit, fewer are made, but at least `least_trials`; without it, all are made in any case. If none is made, the
    warm-up counts as one.
    """
    all_marked = config.log.model_copy(update={"phases": True, "every_steps": 1})
    least = trials if least_trials is None else least_trials
    report("building")
    with open_workload(session, config.model_copy(update={"log": all_marked}), clock) as workload:
        watch = _BlockTimer(session, workload, clock)
        costs, log, steps = _warm_up(watch, seconds, report)
        counting = _COUNTING_SECONDS + _COUNTED_STEPS * costs["compute" if "compute" in costs else "whole"].step
        end = seconds - min(counting, _MOST_COUNTING * seconds)
        plan = plan_trials(costs, trials, least, end - watch.spent)
        if plan.trials:
            log, steps = _make_trials(watch, plan, least, end, report), plan.steps
        if len(log.seconds["whole"]) < trials and session.group.is_first:
            made = units.count(len(log.seconds["whole"]), "trial")
            log.notes.append(f"{made} of {trials} fitted into {seconds:g} s; raise --seconds for more")
        report("counting")
        ceilings = _find_ceilings(session, config)
        work = _count(session, workload, log)
        return _assemble(session, config, workload, name, overrides, steps, log, work, ceilings)


class _BlockTimer:
    """Runs phases, and adds up the time that they take on the slowest rank; every rank must enter."""

    def __init__(self, session: Session, workload: Workload, clock: Clock) -> None:
        self._session, self.workload, self._clock = session, workload, clock
        self.spent = 0.0

    def block(self, log: _Log, phase: str, steps: int, is_counted: bool = True) -> PhaseCost:
        """Note the seconds per step on this rank; returns those of the slowest rank, with what it needs besides."""
        began = self._clock()
        taken, parts = _block(self._session, self.workload, phase, steps, self._clock)
        found = self._session.group.gather([self._clock() - began, taken])
        longest, slowest = (max(each[place] for each in found) for place in range(2))
        self.spent += longest if is_counted else 0.0
        log.seconds.setdefault(phase, []).append(taken)
        if phase == "whole":
            _note_parts(log, taken, parts)
            log.peak_bytes = _peak_bytes(self._session.device)
        return PhaseCost(max(0.0, longest - steps * slowest), slowest, self.workload.multiple(phase))


def _warm_up(
    watch: _BlockTimer, seconds: float, report: Report
) -> tuple[Mapping[str, PhaseCost], _Log, Mapping[str, int]]:
    """Run every phase, and find what it costs; also returns its last times and their steps."""
    costs: dict[str, PhaseCost] = {}
    steps: dict[str, int] = {}
    last = _Log()
    for phase in watch.workload.phases():
        report(f"warming up: {phase}")
        reads, log = phase in watch.workload.READING, _Log()
        # The first call of a step compiles it or selects its kernels, which belongs to the start.
        steps[phase] = watch.workload.multiple(phase)
        costs[phase] = watch.block(log, phase, steps[phase], is_counted=reads)
        is_expensive = costs[phase].seconds(steps[phase]) > _EXPENSIVE * seconds
        if not reads or not is_expensive:
            log = _Log()
            steps[phase] = 1 if is_expensive else costs[phase].at_least(_WARM_STEPS)
            costs[phase] = watch.block(log, phase, steps[phase])
        last.seconds |= log.seconds
        last.parts |= log.parts
        last.peak_bytes = log.peak_bytes
    _reset_peak(watch.workload.device)
    return costs, last, steps


def _make_trials(watch: _BlockTimer, plan: TrialPlan, least: int, end: float, report: Report) -> _Log:
    """Measure every phase in every trial; trials that would not end in time are left out."""
    log, longest = _Log(), 0.0
    for trial in range(plan.trials):
        began = watch.spent
        if trial >= max(1, least) and began + longest > end:
            break
        report(f"trial {trial + 1} of {plan.trials}")
        for phase, count in plan.steps.items():
            watch.block(log, phase, count)
        longest = max(longest, watch.spent - began)
    return log


def _block(
    session: Session, workload: Workload, phase: str, steps: int, clock: Clock
) -> tuple[float, dict[StepPart, float]]:
    """Seconds per step on this rank, in all and by part; ranks begin together."""
    with ExitStack() as stack:
        step = agreed(session.group, functools.partial(_begin, workload, phase, stack))
        session.group.sum(torch.zeros(1))  # a barrier
        workload.settle(phase)
        workload.learner.timer.close(0)
        began = clock()
        for _ in range(steps):
            step()
        workload.synchronise()
        taken = (clock() - began) / steps
    parts = workload.learner.timer.close(steps)()
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
    names = sorted(logs[0], key=lambda name: list(PHASES).index(name) if name in PHASES else 0)
    return {name: tuple(tuple(log[name]) for log in logs) for name in names}


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
        if variant.config.step is not None:
            raise ConfigError(
                f"step={variant.config.step.name} cannot be measured in parts: expected a recipe without step. Measure "
                "whole runs with tutti scale, or trace the step with tutti profile."
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
    return measure(session, variant.config, variant.name, variant.overrides, trials, seconds, own, least_trials=0)
