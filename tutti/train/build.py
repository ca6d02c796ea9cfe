"""From a frozen configuration to a job: first what each rank can do alone, then what all do together."""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from tutti.checkpoint import store
from tutti.checkpoint.manifest import Manifest, verify
from tutti.config.parts import call
from tutti.config.plan import Plan
from tutti.config.run import RunConfig
from tutti.config.schedule import Schedule
from tutti.data.dataset import check_classes
from tutti.data.loader import Loader, check_workers
from tutti.data.order import SampleOrder, make_order
from tutti.errors import CheckpointError, TuttiError
from tutti.ranks.group import Group, Joined, PreflightCheck, RankCheck
from tutti.ranks.hang_detection import Monitor
from tutti.ranks.placement import Placement
from tutti.runs.folder import RunFolder
from tutti.runs.journal import Journal, Screen, rewind
from tutti.runs.step_parts import StepPart
from tutti.train.job import Job
from tutti.train.progress import Learner

Built = TypeVar("Built")


class RankParts(Protocol):
    """What a rank builds alone, in some framework."""

    @property
    def plan(self) -> Plan: ...

    @property
    def schedule(self) -> Schedule: ...

    @property
    def train_data(self) -> Any: ...

    @property
    def valid_data(self) -> Any: ...

    @property
    def valid_sets(self) -> Mapping[str, Any]:
        """Further validation data by name."""
        ...

    def check_checkpoint(self, folder: Path, manifest: Manifest) -> None:
        """Refuse a checkpoint of another model."""
        ...

    def make_learner(
        self, config: RunConfig, group: Group, device: torch.device, at: Callable[[StepPart, int], None]
    ) -> Learner:
        """The learner of these parts; every rank enters."""
        ...


class Framework(Protocol):
    """How ranks meet, build their parts and train in some framework, in this order."""

    def joined(
        self, config: RunConfig, placement: Placement, check: RankCheck, examine: PreflightCheck
    ) -> AbstractContextManager[Joined]:
        """Set this rank up, check it, and meet the others, who are examined before connections are made."""
        ...

    def check(self, config: RunConfig, world_size: int) -> None:
        """Refuse what is wrong with a recipe before anything is built."""
        ...

    def prepare_data(self, config: RunConfig) -> None:
        """Make or fetch the recipe's data, on rank 0 alone."""
        ...

    def build_parts(self, config: RunConfig, placement: Placement, device: torch.device) -> RankParts:
        """What a rank can build alone."""
        ...

    def train(self, job: Job[Any]) -> None:
        """Train to the end of the recipe."""
        ...

    def results(self, job: Job[Any]) -> dict[str, Any]:
        """What the record says of a finished run besides the results of all frameworks."""
        ...


def build_job(
    framework: Framework,
    config: RunConfig,
    group: Group,
    monitor: Monitor,
    device: torch.device,
    folder: RunFolder,
    resume: Path | None,
) -> Job[Any]:
    """A job at its first step, or restored from a checkpoint; ranks agree after each part that can fail on one."""
    agreed(group, functools.partial(check_workers, config.data.workers))
    agreed(group, functools.partial(framework.prepare_data, config) if group.is_first else lambda: None)
    parts = agreed(group, functools.partial(framework.build_parts, config, group.placement, device))
    manifest, order = agreed(group, functools.partial(_check_resume, resume, config, parts, group))
    later = agreed(group, functools.partial(_go_back, folder, resume, manifest) if group.is_first else list)
    group.barrier("the start of training")
    plan, data, prefetch = parts.plan, parts.train_data, choose_prefetch(config, device)
    screen = None
    if group.is_first:
        on_terminal = group.placement.launcher in ("none", "torchrun")  # mpirun and srun pass lines on, no terminal
        first_step = manifest.step if manifest else 0
        screen = Screen(plan.total_steps, config.epochs, group.world_size, first_step, on_terminal)
    wish = config.checkpoint
    is_saved = wish.every_steps is not None or wish.every_epochs is not None or wish.best is not None
    journal = Journal(folder, screen, config.log.loggers, commits_all=not is_saved)
    learner = parts.make_learner(config, group, device, monitor.enter)
    loader = Loader(data, plan, order, group.rank, device, config.data.workers, prefetch)
    sets = {} if parts.valid_data is None else {"": parts.valid_data}
    sets |= {f"{name}_": each for name, each in parts.valid_sets.items()}
    job = Job(config, plan, parts.schedule, group, folder, journal, learner, loader, sets, monitor)
    if resume is None and config.init is not None:
        job.starting_point = agreed(group, functools.partial(learner.start_from, config.init))
    if resume and manifest:
        job.later_steps = later
        job.restore(resume, manifest)
    return job


def _go_back(folder: RunFolder, resume: Path | None, manifest: Manifest | None) -> list[int]:
    """Have the folder end where a run continues, on rank 0; return the steps of checkpoints after it."""
    later = store.resume_from(resume) if resume else []  # first: with a crash here, both are of the same run
    unvalidated = bool(manifest and manifest.progress.get("unvalidated"))
    rewind(folder, manifest.step if manifest else -1, unvalidated)
    return later


def build_data(config: RunConfig, placement: Placement, device: torch.device) -> tuple[Any, Any]:
    """The recipe's training and validation data."""
    factory, options = config.data.locate(), config.data.options()
    offered = offered_to_data(config, placement, device)
    train_data = call(factory, "data", options, split="train", **offered)
    return train_data, call(factory, "data", options, split="valid", **offered)


def offered_to_data(config: RunConfig, placement: Placement, device: torch.device) -> dict[str, Any]:
    """What a dataset is given besides its options, where it has parameters of these names."""
    return {"device": device, "local_ranks": placement.local_size, "precision": config.precision}


def build_valid_sets(config: RunConfig, placement: Placement, device: torch.device, train_data: Any) -> dict[str, Any]:
    """The further validation data of a recipe, by name."""
    offered = offered_to_data(config, placement, device)
    found = {}
    for name, data in config.valid_sets().items():
        found[name] = call(data.locate(), f"valid.{name}", data.options(), split="valid", **offered)
        check_classes(train_data, found[name])
    return found


def prepare_data(config: RunConfig) -> None:
    """Make or fetch the recipe's data, on rank 0 alone."""
    for data in (config.data, *config.valid_sets().values()):
        data.prepare()


def choose_prefetch(config: RunConfig, device: torch.device) -> int:
    """Beside a GPU batches are made ahead; on a CPU the thread that makes them takes from the step what it saves."""
    if config.data.prefetch is not None:
        return config.data.prefetch
    return 2 if device.type == "cuda" else 0


def agreed(group: Group, build: Callable[[], Built]) -> Built:
    """Build on every rank, or raise on every rank."""
    error: TuttiError | None = None
    built: list[Built] = []
    try:
        built.append(build())
    except TuttiError as found:
        error = found
    group.agree(error)
    return built[0]


def _check_resume(
    resume: Path | None, config: RunConfig, parts: RankParts, group: Group
) -> tuple[Manifest | None, SampleOrder]:
    """The manifest of the checkpoint if there is one, and the order in which samples follow; every rank enters."""
    manifest = _verified_on_first(resume, group) if resume else None
    order = make_order(config, parts.plan, parts.train_data, manifest.order if manifest else None)
    if resume and manifest:
        check_samples(resume, manifest, config, parts.plan, order)
        parts.check_checkpoint(resume, manifest)
    return manifest, order


def _verified_on_first(resume: Path, group: Group) -> Manifest:
    """The manifest of a checkpoint whose every byte rank 0 has read; every rank enters."""
    problem: str | None = None
    manifest: Manifest | None = None
    try:
        manifest = verify(resume) if group.is_first else None
    except CheckpointError as found:
        problem = str(found)
    problem, manifest = group.from_first((problem, manifest), tuple[str | None, Manifest | None])
    if problem or manifest is None:
        raise CheckpointError(problem or f"checkpoint {resume} cannot be read.")
    return manifest


def check_samples(resume: Path, manifest: Manifest, config: RunConfig, plan: Plan, order: SampleOrder) -> None:
    """Refuse a checkpoint after which other samples would follow than those that are missing."""
    here = {
        "seed": config.seed,
        "global batch": plan.global_batch,
        "batch.micro": config.batch.micro,
        "number of training samples": plan.train_samples,
        "sample order": order.name,
    }
    there = (manifest.seed, manifest.global_batch, manifest.micro_batch, manifest.train_samples, manifest.order)
    for (name, now), then in zip(here.items(), there, strict=True):
        if now != then:
            fixes = {"global batch": f" Set batch.global={then}.", "sample order": " Set data.shuffle as in its run."}
            raise CheckpointError(
                f"checkpoint {resume} was made with {name} {then}, this run has {now}: "
                f"its samples would not be the ones that are missing.{fixes.get(name, '')}"
            )
    if manifest.step > plan.total_steps:
        raise CheckpointError(f"checkpoint {resume} is at step {manifest.step}, this run ends at {plan.total_steps}.")
