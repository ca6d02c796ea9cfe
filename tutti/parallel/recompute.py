"""Activation checkpointing: activations of layers are not kept from forward to backward, but computed again."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tutti.errors import ConfigError
from tutti.parallel.dropout import calls_of

GIB = 1 << 30


def recompute(units: Iterable[nn.Module]) -> None:
    """Have each unit keep its inputs alone, and compute its activations again in the backward pass.

    Random numbers are the same again, and running statistics of batch norm are not updated twice. Names of parameters
    do not change.
    """
    for unit in units:
        unit.forward = Recomputed(unit, unit.forward)


class Recomputed:
    """The forward pass of a unit whose activations are computed again in backward."""

    def __init__(self, unit: nn.Module, forward: Callable[..., Any]) -> None:
        self._unit, self._forward = unit, forward
        norms = [each for each in unit.modules() if isinstance(each, _NormBase) and each.track_running_stats]
        self._buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*inputs, **options)
        contexts = {}
        if not torch.compiler.is_compiling():  # a compiled graph updates statistics once; its compiler has no contexts
            contexts = {"context_fn": functools.partial(self._contexts, calls_of(self._unit))}
        return checkpoint(self._forward, *inputs, use_reentrant=False, **contexts, **options)

    def _contexts(
        self, calls: list[tuple[Any, int]]
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What surrounds the first forward pass, and the second."""
        return nullcontext(), self._unchanged(calls, _get_current_function_mode_stack())

    @contextmanager
    def _unchanged(self, calls: list[tuple[Any, int]], modes: list[TorchFunctionMode]) -> Iterator[None]:
        """The modes and dropout masks of the first pass, and the same statistics after it as before."""
        before = [buffer.clone() for buffer in self._buffers]
        for layer, number in calls:
            layer.calls = number
        try:
            with ExitStack() as entered:
                for mode in modes:
                    entered.enter_context(mode)
                yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(self._buffers, before, strict=True):
                    buffer.copy_(value)


@dataclass(frozen=True)
class Activations:
    """The bytes that the forward pass of a micro-batch keeps for the backward pass."""

    units: list[int]  # inside each unit, without its inputs and outputs
    outside: int  # what units pass to each other, and what is computed between them


def measure_activations(units: Sequence[nn.Module], run: Callable[[], Any]) -> Activations:
    """Find what the forward pass `run` keeps; with fake tensors, nothing is computed or allocated."""
    found: dict[int, tuple[int, int | None]] = {}  # the bytes of each storage, and the unit that it is inside of
    entered: list[int] = []  # the units that are running

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        source, storage = tensor if tensor._base is None else tensor._base, tensor.untyped_storage()
        if not (source.is_leaf and source.requires_grad):
            found.setdefault(storage._cdata, (storage.nbytes(), entered[-1] if entered else None))
        return tensor

    def enter(index: int, _: nn.Module, inputs: Any) -> None:
        entered.append(index)

    def leave(_: nn.Module, inputs: Any, outputs: Any) -> None:
        entered.pop()
        for tensor in tree_leaves((inputs, outputs)):
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) in found:
                found[key] = (found[key][0], None)

    hooks = [unit.register_forward_pre_hook(functools.partial(enter, index)) for index, unit in enumerate(units)]
    hooks += [unit.register_forward_hook(leave) for unit in units]
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            kept = run()  # held, so that no storage is freed and its address used for another
    finally:
        for hook in hooks:
            hook.remove()
    del kept
    inside = [0] * len(units)
    for size, unit in found.values():
        if unit is not None:
            inside[unit] += size
    return Activations(inside, sum(size for size, unit in found.values() if unit is None))


def choose_recomputed(activations: Activations, budget_gib: float) -> list[int]:
    """The units to compute again, largest first, until the kept activations are within a budget."""
    kept = activations.outside + sum(activations.units)
    chosen: list[int] = []
    for index in sorted(range(len(activations.units)), key=lambda each: -activations.units[each]):
        if kept <= budget_gib * GIB:
            return chosen
        kept -= activations.units[index]
        chosen.append(index)
    if kept > budget_gib * GIB:
        raise ConfigError(
            f"parallel.recompute={budget_gib:g}: a micro-batch keeps {kept / GIB:.3g} GiB of activations with all "
            f"{len(activations.units)} layers computed again; expected a budget of that or more. Set "
            f"parallel.recompute={kept / GIB * 1.01:.3g}, or a smaller batch.micro."
        )
    return chosen


def fake_pass(forward: Callable[[Any], Any], sample: torch.Tensor, samples: int) -> Callable[[], Any]:
    """A forward pass of a number of samples like a given one, which allocates nothing."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fake = torch.empty((samples, *sample.shape[1:]), dtype=sample.dtype, device=sample.device)

    def run() -> Any:
        with mode:
            return forward(fake)

    return run
