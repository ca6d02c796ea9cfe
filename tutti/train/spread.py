"""What a recipe's model needs where it is not only copied to every rank: units to recompute, samples split in space."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from tutti.config.plan import Plan
from tutti.config.run import RunConfig
from tutti.data.dataset import Part, find_part
from tutti.data.loader import evaluation_batches
from tutti.errors import ConfigError
from tutti.parallel.dropout import Locate, PartsByShape, is_whole
from tutti.parallel.mesh import Mesh
from tutti.parallel.recompute import choose_recomputed, fake_pass, measure_activations, recompute
from tutti.parallel.shard import allocate, find_units, shard_model
from tutti.parallel.space.halo import SpaceGrid
from tutti.parallel.space.mode import SpaceMode, check_loss, check_space
from tutti.ranks.device import applies
from tutti.train.learner import autocast


def spread_model(
    model: nn.Module, config: RunConfig, plan: Plan, mesh: Mesh, data: Any, space: SpaceMode | None
) -> Locate:
    """Leave this rank its parts of a whole model's parameters, and have units computed again; every rank enters.

    Stages are left out: their learner measures the whole model. Returns where the inputs of dropout layers lie.
    """
    layout = mesh.layout
    run = functools.partial(fake_forward, model, config, plan, data, mesh.device, space)
    again = [] if config.parallel.recompute == "none" else recomputed_units(model, config, run)
    locate = is_whole
    if layout.sequence > 1:
        locate = PartsByShape(_find_dropped(model, run), layout.sequence, layout.space_rank(mesh.rank))
    if layout.tensor > 1:
        from tutti.parallel.tensor import split_layers

        locate = PartsByShape(_find_dropped(model, run), layout.tensor, layout.tensor_rank(mesh.rank))
        split_layers(model, mesh.tensor)
    if layout.uses_fsdp:
        shard_model(model, mesh.weights)
    if layout.splits_weights:
        allocate(model, mesh.device, config.seed)
    recompute(again)
    return locate


def recomputed_units(model: nn.Module, config: RunConfig, run: Callable[[], Any]) -> list[nn.Module]:
    """The units of a model whose activations are computed again: all, or those beyond the recipe's budget.

    `run` is a forward pass of a micro-batch without data.
    """
    units, budget = find_units(model), config.parallel.recompute
    if not units:
        raise ConfigError(
            f"parallel.recompute={budget} with model.name={config.model.name!r}: expected a model with layers in a "
            "ModuleList or a Sequential, or with the method units(). Add it, or leave parallel.recompute out."
        )
    if isinstance(budget, str):
        return units
    return [units[index] for index in choose_recomputed(measure_activations(units, run), budget)]


def fake_forward(
    model: nn.Module, config: RunConfig, plan: Plan, data: Any, device: torch.device, space: SpaceMode | None
) -> Any:
    """A forward pass of a micro-batch that allocates nothing."""
    part = find_part(plan.layout, 0)
    sample, _ = next(evaluation_batches(data, 0, len(data), 1, device, 0, config.seed, part))
    if not isinstance(sample, torch.Tensor):
        layout = plan.layout
        given = "sequence" if layout.sequence > 1 else "tensor" if layout.tensor > 1 else "recompute"
        raise ConfigError(
            f"parallel.{given}={getattr(config.parallel, given)} with inputs of type {type(sample).__name__}: expected "
            f"a tensor, from which the sizes of activations follow. Leave parallel.{given} out."
        )
    with autocast(config.precision, device):
        forward = model if space is None else functools.partial(space.run, model)
        return fake_pass(forward, sample, plan.micro_batch)()


def _find_dropped(model: nn.Module, run: Callable[[], Any]) -> dict[str, set[tuple[int, ...]]]:
    """The shapes of the inputs of a whole model's dropout layers in a forward pass, by the names of the layers."""
    found: dict[str, set[tuple[int, ...]]] = {}
    layers = [(name, each) for name, each in model.named_modules() if isinstance(each, _DropoutNd) and each.p > 0]

    def note(name: str, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        found.setdefault(name, set()).add(tuple(inputs[0].shape))

    hooks = [layer.register_forward_pre_hook(functools.partial(note, name)) for name, layer in layers]
    try:
        if hooks:
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def split_model(
    config: RunConfig, model: nn.Module, criterion: Any, train_data: Any, part: Part, device: torch.device
) -> SpaceMode:
    """What a model needs to compute on parts of samples; raises ConfigError if it cannot."""
    sample, _ = next(evaluation_batches(train_data, 0, len(train_data), 1, torch.device("cpu"), 0, config.seed))
    space = prepare_space(config, model, sample, part, device)
    if space.gives_parts:
        check_loss(criterion, part.parts)
    return space


def prepare_space(config: RunConfig, model: nn.Module, sample: Any, part: Part, device: torch.device) -> SpaceMode:
    """The mode in which a model computes on parts of samples like this one; raises ConfigError if it cannot."""
    if not isinstance(sample, torch.Tensor):
        raise ConfigError(
            f"parallel.space with inputs of type {type(sample).__name__}: expected a tensor, which can be split. "
            "Set parallel.space=1."
        )
    space = SpaceMode(SpaceGrid(part.parts, part.place))
    check_space(model, space, tuple(sample.shape[1:]), device, applies(config.speed.compile, device))
    return space
