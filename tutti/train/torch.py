"""Training in torch: the parts of a recipe or the objects of a user, and the Python API `fit`."""

import functools
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tutti.checkpoint.manifest import Manifest
from tutti.checkpoint.store import check_model, check_optimizer, model_shape
from tutti.config import parts
from tutti.config.check import check_best, check_loggers, check_noise_scale, check_parts, check_stop
from tutti.config.load import resolve_values
from tutti.config.plan import Plan, make_plan
from tutti.config.run import RunConfig
from tutti.config.schedule import Schedule, make_schedule
from tutti.data.dataset import check_classes, find_part
from tutti.errors import ConfigError
from tutti.optim.optimizers import build_optimizer, build_optimizers
from tutti.parallel.dropout import is_whole
from tutti.parallel.mesh import Mesh
from tutti.ranks.device import applies
from tutti.ranks.environments import discover
from tutti.ranks.group import Group, Joined, PreflightCheck, RankCheck, joined
from tutti.ranks.placement import Placement
from tutti.runs.step_parts import StepPart
from tutti.train.build import build_data, build_valid_sets, prepare_data
from tutti.train.job import Job
from tutti.train.learner import TorchLearner, put_channels_last
from tutti.train.loop import train
from tutti.train.metrics import Metrics
from tutti.train.run import TrainingResult, run_rank

if TYPE_CHECKING:
    from tutti.parallel.space.mode import SpaceMode

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
class TorchParts:
    """What a rank of torch builds alone."""

    plan: Plan
    schedule: Schedule
    model: nn.Module
    criterion: Callable[[Any, Any], torch.Tensor]
    metrics: Metrics
    optimizer: torch.optim.Optimizer  # or what a step of the user's own gets
    optimizer_name: str
    train_data: Any
    valid_data: Any
    space: "SpaceMode | None" = None  # of samples that are split in space
    has_own_step: bool = False
    valid_sets: Mapping[str, Any] = field(default_factory=dict)  # further ones, by name

    def check_checkpoint(self, folder: Path, manifest: Manifest) -> None:
        """Refuse a checkpoint of another model or optimizer."""
        check_model(folder, manifest, model_shape(self.model))
        if self.has_own_step:
            from tutti.train.own_step import check_optimizers

            check_optimizers(folder, self.optimizer)
        elif not self.plan.layout.splits_weights:  # else the learner does it: here the state would be of all weights
            check_optimizer(folder, self.model, self.optimizer, self.optimizer_name)

    def make_learner(
        self,
        config: RunConfig,
        group: Group,
        device: torch.device,
        at: Callable[[StepPart, int], None] = lambda *_: None,
    ) -> TorchLearner:
        """The learner of these parts; every rank enters."""
        mesh = Mesh(self.plan.layout, group.rank, device)
        if self.has_own_step:
            from tutti.train.own_step import StepLearner

            parts = (self.model, self.criterion, self.optimizer, self.metrics)
            return StepLearner(config, self.plan, self.schedule, group, mesh, *parts, at)
        optimizer, locate = self.optimizer, is_whole
        if config.parallel.recompute != "none" or not mesh.layout.is_data_parallel:
            from tutti.train.spread import spread_model

            locate = spread_model(self.model, config, self.plan, mesh, self.train_data, self.space)
        if mesh.layout.stages > 1:
            from tutti.train.pipeline import build_staged_learner

            return build_staged_learner(
                config, self.plan, group, mesh, self.model, self.criterion, self.metrics, self.train_data, at
            )
        if mesh.layout.splits_weights:
            optimizer = build_optimizer(config.optim, self.model)
        if self.space is not None:
            self.space.connect(*mesh.neighbours)
        kind = TorchLearner
        if mesh.layout.sequence > 1:
            from tutti.train.sequence import SequenceLearner

            kind = SequenceLearner
        learner = kind(
            config, self.plan, group, mesh, self.model, self.criterion, optimizer, self.metrics, at, self.space
        )
        learner.masks.locate = locate
        return learner


class TorchFramework:
    """Training in torch: of a recipe's parts, or of a user's own objects."""

    def __init__(self, objects: Objects | None = None) -> None:
        self._objects = objects or Objects()
        self._is_recipe = objects is None

    def joined(
        self, config: RunConfig, placement: Placement, check: RankCheck, examine: PreflightCheck
    ) -> AbstractContextManager[Joined]:
        """Meet the other ranks in a process group of torch."""
        return joined(config.runtime, placement, check, examine)

    def check(self, config: RunConfig, world_size: int) -> None:
        """Refuse what is wrong with a recipe before anything is built."""
        check_noise_scale(config, world_size)
        check_loggers(config)
        if self._is_recipe:
            check_parts(config, world_size)
        elif config.valid:
            raise ConfigError(
                f"valid.{next(iter(config.valid))} with data that is given as objects: expected a recipe, whose data "
                "has a name. Leave valid out, or evaluate the returned model on the other data."
            )

    def prepare_data(self, config: RunConfig) -> None:
        """Make or fetch the recipe's data, on rank 0 alone."""
        if self._objects.train_data is None:
            prepare_data(config)

    def build_parts(self, config: RunConfig, placement: Placement, device: torch.device) -> TorchParts:
        """What a rank can build alone."""
        return build_parts(config, self._objects, placement, device)

    def train(self, job: Job[TorchLearner]) -> None:
        """Train to the end of the recipe."""
        train(job)

    def results(self, job: Job[TorchLearner]) -> dict[str, Any]:
        """What the record says of a finished run besides the results of all frameworks."""
        return {}


def fit(
    model: nn.Module,
    train_data: Any,
    valid_data: Any = None,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    metrics: Metrics | None = None,
    name: str = "fit",
    **recipe: Any,
) -> TrainingResult:
    """Train a model on a dataset with the keys of a recipe: `optim={...}, batch={...}, epochs=3`.

    Run the script with `python` for one rank, or with `tutti run -n 4`, `mpirun` or `srun` for more.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics={metrics!r:.60}: expected functions by their names, as in {{'error': error}}.")
    if loss is not None and not callable(loss):
        raise ConfigError(f"loss={loss!r:.60}: expected a function of outputs and targets, or a module.")
    values = {"model": {"name": _name(model)}, "recipe": name} | recipe
    if isinstance(data := recipe.get("data", {}), Mapping):
        values["data"] = {"name": _name(train_data), **data}
    if metrics is not None:
        values["metrics"] = [_name(metric) for metric in metrics.values()]
    if loss is not None:
        values["loss"] = {"name": _name(loss)}
    config = resolve_values(values)
    objects = Objects(model, train_data, valid_data, loss, metrics)
    return run_rank(TorchFramework(objects), config, discover(os.environ))


def _name(thing: Any) -> str:
    """`module:object`, so that the record says what was trained."""
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{kind.__module__}:{kind.__qualname__}"


def build_parts(config: RunConfig, objects: Objects, placement: Placement, device: torch.device) -> TorchParts:
    """What a rank can build alone: data, model, loss, metrics and optimizer."""
    train_data, valid_data, sets = objects.train_data, objects.valid_data, {}
    if train_data is None:
        train_data, valid_data = build_data(config, placement, device)
        sets = build_valid_sets(config, placement, device, train_data)
    plan = make_plan(config, placement.world_size, len(train_data), placement.local_size)
    schedule = make_schedule(config, plan)
    _check_graphs(config, plan, device)
    torch.manual_seed(config.seed)  # the same first weights on every rank
    model = objects.model
    if model is None:
        shapes = {
            name: value
            for name in ("input_shape", "num_classes")
            if (value := getattr(train_data, name, None)) is not None
        }
        check_classes(train_data, valid_data)
        model = _build_model(config, plan, shapes)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.name={config.model.name!r} gave a {type(model).__name__}: expected a torch.nn.Module."
        )
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.to(device)
    # FSDP2 takes contiguous weights only.
    if applies(config.speed.channels_last, device) and not plan.layout.splits_weights:
        put_channels_last(model)
    if isinstance(getattr(model, "fold", None), bool):
        model.fold = applies(config.speed.fold, device) and plan.layout.parts == 1  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    if hasattr(model, "adapt_to_data"):
        _adapt(model, train_data, device)
    metrics = config.metric_functions() if objects.metrics is None else objects.metrics
    check_best(config, metrics)
    check_stop(config, metrics, validates=valid_data is not None)
    criterion = objects.loss or build_loss(config)
    if isinstance(criterion, nn.Module):
        criterion.to(device)
    if plan.layout.stages > 1:
        from tutti.parallel.chain import check_chain

        check_chain(model, config.parallel, plan.layout.stages)
    if plan.layout.tensor > 1:
        from tutti.parallel.tensor import check_tensor

        check_tensor(model, plan.layout.tensor)
    if plan.layout.sequence > 1:
        from tutti.train.sequence import check_sequences

        check_sequences(config, plan, model, criterion, train_data, device)
    optimizer = (build_optimizer if config.step is None else build_optimizers)(config.optim, model)
    name, space = config.optim.name, None
    if (part := find_part(plan.layout, placement.rank)) is not None:
        from tutti.train.spread import split_model

        space = split_model(config, model, criterion, train_data, part, device)
        train_data, valid_data, *others = (
            data.for_part(part) if hasattr(data, "for_part") else data
            for data in (train_data, valid_data, *sets.values())
        )
        sets = dict(zip(sets, others, strict=True))
    own = config.step is not None
    return TorchParts(
        plan, schedule, model, criterion, metrics, optimizer, name, train_data, valid_data, space, own, sets
    )


def _build_model(config: RunConfig, plan: Plan, shapes: dict[str, Any]) -> Any:
    """The recipe's model: whole, or on the meta device if ranks share its weights and can make their parts of them."""
    target = config.model.locate()
    build = functools.partial(parts.call, target, "model", config.model.options(), **shapes)
    kind = target if isinstance(target, type) else getattr(target, "__annotations__", {}).get("return")
    if plan.layout.splits_weights and hasattr(kind, "init_parameter"):
        with torch.device("meta"):
            model = build()
        if not any(True for _ in model.buffers()):  # nothing would fill them
            return model
    model = build()
    if isinstance(model, nn.Module) and hasattr(model, "init_parameter"):
        from tutti.parallel.shard import init_parameters

        init_parameters(model, config.seed)
    return model


def _check_graphs(config: RunConfig, plan: Plan, device: torch.device) -> None:
    """Refuse to measure the noise scale on one rank from gradients in memory that the next pass writes over."""
    graphs = applies(config.speed.compile, device) and applies(config.speed.graphs, device)
    if config.log.noise_scale and graphs and plan.world_size == 1:
        raise ConfigError(
            f"log.noise_scale=true on 1 rank with speed.graphs={str(config.speed.graphs).lower()}: expected no CUDA "
            "graphs, whose gradients lie where the next pass writes. Set speed.graphs=false, or start more ranks."
        )


def _adapt(model: Any, train_data: Any, device: torch.device) -> None:
    """Show a model that begins with what it knows of the data its first training samples, the same on every rank."""
    if not hasattr(train_data, "batch"):
        raise ConfigError(
            f"{type(model).__name__} adapts to training samples before the first step, for which it needs a dataset "
            f"with the method batch: {type(train_data).__name__} has none. Choose another dataset, or another model."
        )
    ids = torch.arange(min(_ADAPTED_SAMPLES, len(train_data)))
    model.adapt_to_data(train_data.batch(ids, None)[0].to(device))


def build_loss(config: RunConfig) -> Callable[[Any, Any], torch.Tensor]:
    """A loss class is built with the recipe's options; a function gets them in every call."""
    target, options = config.loss.locate(), config.loss.options()
    if isinstance(target, type):
        return parts.call(target, "loss", options)
    return functools.partial(target, **options) if options else target
