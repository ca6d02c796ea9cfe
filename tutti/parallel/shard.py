"""Sharded weights: every rank holds a part of each parameter, of its gradient and of the optimizer's state (FSDP2)."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tutti.ranks.device import mix


def find_units(model: nn.Module) -> list[nn.Module]:
    """The parts of a model that are gathered, computed and freed one after another, or computed again in backward.

    These are the modules in its lists and sequences, outermost first: blocks of a transformer, levels of a U-Net. What
    is outside of them belongs to the whole model. A model may name others in `units()`.
    """
    named: Callable[[], list[str]] | None = getattr(model, "units", None)
    if named is not None:
        return [model.get_submodule(name) for name in named()]
    return list(_elements(model))


def _elements(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            inner = [each for each in child if isinstance(each, nn.ModuleList | nn.Sequential)]
            if len(inner) == len(child):
                yield from _elements(child)
            else:
                yield from (each for each in child if any(True for _ in each.parameters()))
        else:
            yield from _elements(child)


def find_compiled(model: nn.Module) -> list[nn.Module]:
    """What is compiled of a model in shards, each for itself: its units, and the largest modules outside of them."""
    units = set(find_units(model))

    def inside(module: nn.Module) -> Iterator[nn.Module]:
        if module in units or units.isdisjoint(module.modules()):
            yield module
        else:
            for child in module.children():
                yield from inside(child)

    return list(inside(model)) if units else []


def shard_model(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace the parameters of a model by this rank's shards of them; every rank enters.

    The parameters of a unit are gathered before its forward pass and freed after it, and again in the backward pass.
    """
    keeps = False if mesh.size() == 1 else None  # one rank has nothing to free
    for unit in find_units(model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=keeps)
    fully_shard(model, mesh=mesh)


def allocate(model: nn.Module, device: torch.device, seed: int) -> None:
    """Give a model that was built on the meta device its parameters, as far as this rank holds them; others stay."""
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=device)
        init_parameters(model, seed)


@torch.no_grad()
def init_parameters(model: Any, seed: int) -> None:
    """Fill the parameters of a model that has the method `init_parameter`, or this rank's parts of them.

    The first values depend on the seed and the name of a parameter alone, so that all layouts begin with the same. One
    parameter at a time is whole, on the CPU.
    """
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, dtype=parameter.dtype)
        model.init_parameter(name, whole, torch.Generator().manual_seed(mix(seed, *name.encode())))
        if isinstance(parameter, DTensor):
            parameter.to_local().copy_(_own_part(whole, parameter))
        else:
            parameter.copy_(whole)


def _own_part(whole: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """The part of a tensor that this rank has of a parameter of the same shape."""
    mesh, rank_at = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert rank_at is not None
    splits = list(zip(parameter.placements, mesh.shape, rank_at, strict=True))
    # A strided shard is a part of what the later dimensions of the mesh have left.
    for placement, size, index in sorted(splits, key=lambda each: isinstance(each[0], _StridedShard)):
        if isinstance(placement, Shard | _StridedShard):
            parts = whole.chunk(size, placement.dim)
            whole = parts[index] if index < len(parts) else whole.narrow(placement.dim, 0, 0)
    return whole


def without_reduction(model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Returns the context manager for a backward pass that accumulates gradients on this rank only."""
    assert isinstance(model, FSDPModule)

    @contextmanager
    def silence() -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    return silence
