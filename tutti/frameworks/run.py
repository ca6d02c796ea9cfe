"""Training in Keras or TensorFlow: ranks joined by the Horovod engine, and the parts of a recipe."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tutti.checkpoint.manifest import Manifest
from tutti.checkpoint.store import check_model
from tutti.config.check import check_best, check_noise_scale, check_parts
from tutti.config.plan import Plan, make_plan
from tutti.config.run import RunConfig
from tutti.config.schedule import Schedule, make_schedule
from tutti.config.schema import RuntimeConfig
from tutti.data.dataset import check_classes
from tutti.errors import CheckpointError, TuttiError
from tutti.frameworks.feed import CPU
from tutti.frameworks.machine import prepare
from tutti.horovod import basics
from tutti.horovod.torch.collectives import Sum, allreduce_
from tutti.ranks.device import bind_rank
from tutti.ranks.group import Group, Joined, Machine, PreflightCheck, RankCheck
from tutti.ranks.placement import Placement
from tutti.runs.step_parts import StepPart
from tutti.train.build import build_data, build_valid_sets, prepare_data
from tutti.train.job import Job

if TYPE_CHECKING:  # imports Keras, which must be set up before
    from tutti.frameworks.learner import KerasLearner


class EngineGroup(Group):
    """A group whose sums are matched by name over ranks, and may overlap with those of gradients."""

    def __init__(self, placement: Placement, timeout_seconds: float) -> None:
        self.placement = placement
        self.rank = placement.rank
        self.world_size = placement.world_size
        joined = basics.joined()
        self.hub, self.store, self.hosts = joined.hub, joined.store, joined.hosts
        self.timeout_seconds = timeout_seconds

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        total = values.detach().to("cpu", torch.float64)
        return allreduce_(total, name="run.sum", op=Sum) if self.world_size > 1 else total

    def leave(self) -> None:
        self.barrier("the end of the run")
        basics.shutdown()


def join(placement: Placement, config: RuntimeConfig) -> EngineGroup:
    """Rendezvous with the other ranks; missing ranks are named at the deadline, which later exchanges have as well."""
    os.environ.setdefault("HOROVOD_START_TIMEOUT", str(config.start_timeout_seconds))
    os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(config.timeout_seconds))
    basics.init()
    return EngineGroup(placement, config.timeout_seconds)


@dataclass(frozen=True)
class KerasParts:
    """The parts of Keras or TensorFlow that a rank builds without the others."""

    plan: Plan
    schedule: Schedule
    learner: "KerasLearner"
    train_data: Any
    valid_data: Any
    valid_sets: Mapping[str, Any]
    framework: str

    def check_checkpoint(self, folder: Path, manifest: Manifest) -> None:
        """Refuse a checkpoint of torch, or of another model."""
        from tutti.frameworks.learner import MODEL_FILE

        if MODEL_FILE not in manifest.files:
            raise CheckpointError(
                f"checkpoint {folder} was made with framework=torch, this run has framework={self.framework}. "
                "Resume it with framework=torch."
            )
        check_model(folder, manifest, self.learner.shape())

    def make_learner(
        self, config: RunConfig, group: Group, device: torch.device, at: Callable[[StepPart, int], None]
    ) -> "KerasLearner":
        """The learner, which is built already."""
        return self.learner


class KerasFramework:
    """Training in Keras by its `fit`, or in TensorFlow with a gradient tape; samples are prepared on the CPU."""

    @contextmanager
    def joined(
        self, config: RunConfig, placement: Placement, check: RankCheck, examine: PreflightCheck
    ) -> Iterator[Joined]:
        """Bind this rank, set up Keras, and join the others; an error of one rank is raised on all ranks."""
        binding = bind_rank(config.runtime, placement)
        error: TuttiError | None = None
        machine = Machine("cpu", "cpu", 1)
        try:
            machine = replace(prepare(config, placement), binding=binding)
            check()
        except TuttiError as found:
            error = found
        examine(None)
        group = join(placement, config.runtime)
        group.agree(error)
        yield Joined(group, CPU, machine)
        group.leave()

    def check(self, config: RunConfig, world_size: int) -> None:
        """Check a recipe before anything is built."""
        check_noise_scale(config, world_size)
        check_parts(config, world_size)

    def prepare_data(self, config: RunConfig) -> None:
        """Create missing data of the recipe; called on rank 0 only."""
        prepare_data(config)

    def build_parts(self, config: RunConfig, placement: Placement, device: torch.device) -> KerasParts:
        """Build the parts that need no other rank."""
        from tutti.frameworks.learner import KerasLearner

        train_data, valid_data = build_data(config, placement, device)
        plan = make_plan(config, placement.world_size, len(train_data))
        schedule = make_schedule(config, plan)
        check_best(config, config.metrics)
        check_classes(train_data, valid_data)
        learner = KerasLearner(config, plan, tuple(train_data.input_shape), train_data.num_classes)
        sets = build_valid_sets(config, placement, device, train_data)
        return KerasParts(plan, schedule, learner, train_data, valid_data, sets, config.framework)

    def train(self, job: Job[Any]) -> None:
        """Train to the end of the recipe."""
        from tutti.frameworks import loops

        (loops.train_by_tape if job.config.framework == "tensorflow" else loops.train_by_fit)(job)

    def results(self, job: Job[Any]) -> dict[str, Any]:
        """Results for the record that only this framework has."""
        from tutti.frameworks.loops import images_per_second

        speed = images_per_second(job)
        return {"images_per_second": speed} if speed else {}
