"""Sharded weights: every rank holds a part of each parameter, of its gradient and of the optimizer's state (FSDP2)."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tutti.errors import TrainingError
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


def shard_model(model: nn.Module, mesh: DeviceMesh, frees_all: bool = False) -> None:
    """Replace the parameters of a model by this rank's shards of them; every rank enters.

    The parameters of a unit are gathered before its forward pass and freed after it, and again in the backward pass.
    Those outside of units stay between the two, unless `frees_all`.
    """
    keeps = False if mesh.size() == 1 else None  # one rank has nothing to free
    for unit in find_units(model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=keeps)
    fully_shard(model, mesh=mesh, reshard_after_forward=True if frees_all else None)


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


class ShardedModel:
    """A model in shards in a loop of the user's own, and which gradients a backward pass leaves in it.

    FSDP reduces the gradients of all parameters that a pass reaches: those that are not asked for are dropped as they
    come. A graph of second derivatives refers to gathered parameters: with one, the model stays whole to the end of
    `backward`. At other times it is in shards, so that no pass meets parameters of an earlier step.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        shard_model(model, mesh, frees_all=True)
        self.model = model
        self._units = [each for each in model.modules() if isinstance(each, FSDPModule)]
        self._gathered: dict[str, nn.Parameter] = {}  # whole; tensors that FSDP keeps, without memory while in shards
        for unit in self._units:
            unit.unshard()
            self._gathered |= {name: each for name, each in model.named_parameters() if not isinstance(each, DTensor)}
            unit.reshard()
        for each in self._gathered.values():
            is_trained = each.requires_grad
            each.requires_grad_().register_post_accumulate_grad_hook(self._drop)  # refuses those that are not trained
            each.requires_grad_(is_trained)
        self._asked: set[torch.Tensor] | None = None  # for their gradients, in the backward pass under way
        self._is_whole = self._has_been_whole = False
        self._steps = 0  # of optimizers that move these parameters
        model.register_forward_hook(self._watch)

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether this is a parameter of the model, gathered or in shards."""
        return isinstance(parameter, DTensor) or any(parameter is each for each in self._gathered.values())

    @contextmanager
    def backward(self, loss: torch.Tensor, asked: set[torch.Tensor]) -> Iterator[None]:
        """Have a backward pass leave gradients in those of the parameters that it is asked for; every rank enters."""
        self._asked = {self._gathered[name] for name, each in self.model.named_parameters() if each in asked}
        if self._has_been_whole:
            for unit in self._units:
                unit.unshard()
            # A pass that meets no output of the model would not end with the reductions that are left, and their wait.
            loss.register_hook(self._units[0]._get_fsdp_state()._pre_backward)
        try:
            yield
            if left := [name for name, each in self._gathered.items() if each.grad is not None]:
                raise TrainingError(
                    f"FSDP has left the gradient of {left[0]} unreduced: expected a loss that depends on it through "
                    "outputs of the model. Train without parallel.shard."
                )
        finally:
            self._asked = None
            if self._has_been_whole:
                self.free()

    def before_step(self) -> None:
        """Have a step of an optimizer find shards, and no later backward pass of an earlier forward pass."""
        self._steps += 1
        self.free()

    def free(self) -> None:
        """Leave this rank its shards alone."""
        if self._has_been_whole:
            self._stay_whole(False)
            for unit in self._units:
                unit.reshard()

    def _stay_whole(self, stays: bool) -> None:
        self._is_whole = stays
        for unit in self._units:
            unit.set_reshard_after_forward(not stays, recurse=False)
            unit.set_reshard_after_backward(not stays, recurse=False)

    def _watch(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        """Have gradients of outputs looked at where a pass computes them."""
        for each in pytree.tree_leaves(outputs):
            if isinstance(each, torch.Tensor) and each.requires_grad:
                each.register_hook(functools.partial(self._look, self._steps))

    def _look(self, steps: int, gradient: torch.Tensor) -> None:
        """Keep the model whole if the graph of these gradients is kept; refuse those of other weights."""
        if steps != self._steps:  # autograd itself does not see it: FSDP hides from it what gathering writes
            raise TrainingError(
                "a backward pass meets a forward pass from before a step of the optimizer, with parallel.shard: "
                "expected one with the weights as they are. Call the model again after optimizer.step()."
            )
        if torch.is_grad_enabled() and not self._is_whole:
            self._has_been_whole = True
            self._stay_whole(True)

    def _drop(self, parameter: torch.Tensor) -> None:
        if self._asked is not None and parameter not in self._asked:
            parameter.grad = None
