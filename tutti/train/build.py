"""From a frozen configuration to a job: first what each rank can do alone, then what all do together."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tutti.checkpoint.manifest import Manifest
from tutti.checkpoint.store import check_model, model_shape
from tutti.config import parts
from tutti.config.plan import Plan, make_plan
from tutti.config.run import RunConfig
from tutti.data.dataset import check_classes
from tutti.data.loader import Loader
from tutti.data.order import SampleOrder
from tutti.errors import ConfigError
from tutti.models.layout import put_channels_last
from tutti.optim.optimizers import build_optimizer
from tutti.optim.schedule import Schedule, make_schedule
from tutti.ranks.device import applies
from tutti.ranks.group import Group
from tutti.ranks.hang_detection import Watch
from tutti.ranks.placement import Placement
from tutti.runs.folder import RunFolder
from tutti.runs.journal import Journal, rewind
from tutti.runs.screen import Screen
from tutti.train.check import check_best, check_stop
from tutti.train.job import Job
from tutti.train.learner import Learner
from tutti.train.meters import Metrics
from tutti.train.resume import agreed, check_samples, verified_on_first

_ADAPTED_SAMPLES = 5000


@dataclass(frozen=True)
class Objects:
    """Parts given as Python objects instead of by name; None leaves the recipe's."""

    model: nn.Module | None = None
    train_data: Any = None
    valid_data: Any = None
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    metrics: Metrics | None = None


@dataclass(frozen=True)
class Pieces:
    """What a rank builds alone."""

    plan: Plan
    schedule: Schedule
    model: nn.Module
    criterion: Callable[[Any, Any], torch.Tensor]
    metrics: Metrics
    optimizer: torch.optim.Optimizer
    train_data: Any
    valid_data: Any


def build_job(
    config: RunConfig,
    objects: Objects,
    group: Group,
    watch: Watch,
    device: torch.device,
    folder: RunFolder,
    resume: Path | None,
) -> Job:
    """A job at its first step, or where a checkpoint left it; ranks agree after each part that can fail on one."""
    agreed(group, config.data.prepare if group.is_first and objects.train_data is None else lambda: None)
    pieces = agreed(group, functools.partial(build_pieces, config, objects, group.placement, device))
    manifest = agreed(group, functools.partial(_check_resume, resume, config, pieces, group)) if resume else None
    last_step = manifest.step if manifest else -1
    agreed(group, functools.partial(rewind, folder, last_step) if group.is_first else lambda: None)
    group.barrier("the start of training")
    screen = None
    if group.is_first:
        live = group.placement.launcher in ("none", "torchrun")  # mpirun and srun pass lines on, not a terminal
        first_step = manifest.step if manifest else 0
        screen = Screen(pieces.plan.total_steps, config.epochs, group.world_size, first_step, live)
    journal = Journal(folder, screen, config.log.tensorboard)
    learner = Learner(config, pieces.plan, group, device, pieces.model, pieces.criterion, pieces.optimizer, watch.at)
    order = SampleOrder(pieces.plan, config.seed)
    prefetch = choose_prefetch(config, device)
    job = Job(
        config=config,
        plan=pieces.plan,
        group=group,
        device=device,
        folder=folder,
        journal=journal,
        learner=learner,
        metrics=pieces.metrics,
        schedule=pieces.schedule,
        loader=Loader(pieces.train_data, pieces.plan, order, group.rank, device, config.data.workers, prefetch),
        valid_data=pieces.valid_data,
        watch=watch,
    )
    if resume and manifest:
        job.restore(resume, manifest)
    return job


def build_pieces(config: RunConfig, objects: Objects, placement: Placement, device: torch.device) -> Pieces:
    """What a rank can build alone."""
    train_data, valid_data = objects.train_data, objects.valid_data
    if train_data is None:
        factory, options = config.data.locate(), config.data.options()
        offered = {"device": device, "local_ranks": placement.local_size}
        train_data = parts.call(factory, "data", options, split="train", **offered)
        valid_data = parts.call(factory, "data", options, split="valid", **offered)
    plan = make_plan(config, placement.world_size, len(train_data))
    schedule = make_schedule(config, plan)
    torch.manual_seed(config.seed)  # the same first weights on every rank
    model = objects.model
    if model is None:
        shapes = {
            name: value
            for name in ("input_shape", "num_classes")
            if (value := getattr(train_data, name, None)) is not None
        }
        check_classes(train_data, valid_data)
        model = parts.call(config.model.locate(), "model", config.model.options(), **shapes)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.name={config.model.name!r} gave a {type(model).__name__}: expected a torch.nn.Module."
        )
    model.to(device)
    if applies(config.speed.channels_last, device):
        put_channels_last(model)
    if isinstance(getattr(model, "fold", None), bool):
        model.fold = applies(config.speed.fold, device)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    if hasattr(model, "adapt_to_data"):
        _adapt(model, train_data, device)
    metrics = config.metric_functions() if objects.metrics is None else objects.metrics
    check_best(config, metrics)
    check_stop(config, metrics, validates=valid_data is not None)
    criterion = objects.loss or _build_loss(config)
    if isinstance(criterion, nn.Module):
        criterion.to(device)
    optimizer = build_optimizer(config.optim, model.parameters())
    return Pieces(plan, schedule, model, criterion, metrics, optimizer, train_data, valid_data)


def _adapt(model: Any, train_data: Any, device: torch.device) -> None:
    """Show a model that begins with what it knows of the data its first training samples, the same on every rank."""
    if not hasattr(train_data, "batch"):
        raise ConfigError(
            f"{type(model).__name__} adapts to training samples before the first step, for which it needs a dataset "
            f"with the method batch: {type(train_data).__name__} has none. Choose another dataset, or another model."
        )
    ids = torch.arange(min(_ADAPTED_SAMPLES, len(train_data)))
    model.adapt_to_data(train_data.batch(ids, None)[0].to(device))


def _build_loss(config: RunConfig) -> Callable[[Any, Any], torch.Tensor]:
    """A loss class is built with the recipe's options; a function gets them in every call."""
    target, options = config.loss.locate(), config.loss.options()
    if isinstance(target, type):
        return parts.call(target, "loss", options)
    return functools.partial(target, **options) if options else target


def _check_resume(resume: Path, config: RunConfig, pieces: Pieces, group: Group) -> Manifest:
    manifest = verified_on_first(resume, group)
    check_samples(resume, manifest, config, pieces.plan)
    check_model(resume, manifest, model_shape(pieces.model))
    return manifest


def choose_prefetch(config: RunConfig, device: torch.device) -> int:
    """Beside a GPU batches are made ahead; on a CPU the thread that makes them takes from the step what it saves."""
    if config.data.prefetch is not None:
        return config.data.prefetch
    return 2 if device.type == "cuda" else 0
