"""From a frozen configuration to a job in Keras or TensorFlow: what a rank does alone, then what all do together."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.checkpoint.manifest import Manifest
from tutti.checkpoint.store import check_model
from tutti.config import parts
from tutti.config.plan import Plan, make_plan
from tutti.config.run import RunConfig
from tutti.data.dataset import check_classes
from tutti.data.loader import Loader
from tutti.data.order import SampleOrder
from tutti.errors import CheckpointError
from tutti.frameworks import checkpoint
from tutti.frameworks.feed import CPU
from tutti.frameworks.job import Job
from tutti.frameworks.network import Network
from tutti.optim.schedule import Schedule, make_schedule
from tutti.ranks.group import Group
from tutti.ranks.hang_detection import Watch
from tutti.ranks.placement import Placement
from tutti.runs.folder import RunFolder
from tutti.runs.journal import Journal, rewind
from tutti.runs.screen import Screen
from tutti.train.check import check_best
from tutti.train.resume import agreed, check_samples, verified_on_first


@dataclass(frozen=True)
class Pieces:
    """What a rank builds alone."""

    plan: Plan
    schedule: Schedule
    network: Network
    train_data: Any
    valid_data: Any


def build_job(config: RunConfig, group: Group, watch: Watch, folder: RunFolder, resume: Path | None) -> Job:
    """A job at its first step, or where a checkpoint left it; ranks agree after each part that can fail on one."""
    agreed(group, config.data.prepare if group.is_first else lambda: None)
    pieces = agreed(group, functools.partial(build_pieces, config, group.placement))
    manifest = agreed(group, functools.partial(_check_resume, resume, config, pieces, group)) if resume else None
    last_step = manifest.step if manifest else -1
    agreed(group, functools.partial(rewind, folder, last_step) if group.is_first else lambda: None)
    group.barrier("the start of training")
    plan, data = pieces.plan, pieces.train_data
    screen = None
    if group.is_first:
        live = group.placement.launcher in ("none", "torchrun")  # mpirun and srun pass lines on, not a terminal
        screen = Screen(plan.total_steps, config.epochs, group.world_size, manifest.step if manifest else 0, live)
    journal = Journal(folder, screen, config.log.tensorboard)
    prefetch = config.data.prefetch or 0
    loader = Loader(data, plan, SampleOrder(plan, config.seed), group.rank, CPU, config.data.workers, prefetch)
    network, valid_data = pieces.network, pieces.valid_data
    job = Job(config, plan, pieces.schedule, group, folder, journal, network, loader, valid_data, watch)
    if resume and manifest:
        job.restore(resume, manifest)
    return job


def build_pieces(config: RunConfig, placement: Placement) -> Pieces:
    """What a rank can build alone."""
    factory, options = config.data.locate(), config.data.options()
    offered = {"device": CPU, "local_ranks": placement.local_size}
    train_data = parts.call(factory, "data", options, split="train", **offered)
    valid_data = parts.call(factory, "data", options, split="valid", **offered)
    plan = make_plan(config, placement.world_size, len(train_data))
    schedule = make_schedule(config, plan)
    check_best(config, config.metrics)
    check_classes(train_data, valid_data)
    network = Network(config, tuple(train_data.input_shape), train_data.num_classes)
    return Pieces(plan, schedule, network, train_data, valid_data)


def _check_resume(resume: Path, config: RunConfig, pieces: Pieces, group: Group) -> Manifest:
    manifest = verified_on_first(resume, group)
    if checkpoint.MODEL not in manifest.files:
        raise CheckpointError(
            f"checkpoint {resume} was made with framework=torch, this run has framework={config.framework}. "
            "Resume it with framework=torch."
        )
    check_samples(resume, manifest, config, pieces.plan)
    check_model(resume, manifest, checkpoint.model_shape(pieces.network.core))
    return manifest
