"""Keras on torch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tutti.horovod.basics import ProcessSet
from tutti.horovod.engine.messages import MIN
from tutti.horovod.torch import collectives, ops
from tutti.horovod.torch.functions import broadcast_parameters

Tensors = list[torch.Tensor]


@torch.no_grad()
def exchange(distribution: Any, gradients: Tensors, are_local: list[bool]) -> tuple[bool, Tensors]:
    """Return whether a step is due, and its gradients: reduced, or scaled where a variable is local to this rank."""
    options = distribution.options
    if distribution.accumulates:
        if not distribution.sums:
            distribution.sums = [torch.zeros_like(gradient) for gradient in gradients]
        for total, gradient in zip(distribution.sums, gradients, strict=True):
            total.add_(gradient)
        distribution.counter = (distribution.counter + 1) % options.backward_passes_per_step
        if distribution.counter:
            return False, gradients
        gradients, distribution.sums = distribution.sums, []
        if options.average_aggregated_gradients:
            gradients = [gradient / options.backward_passes_per_step for gradient in gradients]
    if not options.is_active:
        return True, gradients
    shared = [gradient for gradient, local in zip(gradients, are_local, strict=True) if not local]
    found = _reduced(shared, distribution)
    if distribution.observe is not None:
        distribution.observe(shared, found)
    reduced, factor = iter(found), options.local_factor
    pairs = zip(gradients, are_local, strict=True)
    return True, [gradient * factor if local else next(reduced) for gradient, local in pairs]


def choose(due: bool, step: Callable[[], Any], skip: Callable[[], Any]) -> Any:
    """Call one of two functions."""
    return step() if due else skip()


def agree(flag: Any, process_set: ProcessSet) -> torch.Tensor:
    """Return whether a flag is true on all ranks."""
    found = torch.as_tensor(flag)
    votes = found.to("cpu", torch.int32)
    return collectives.allreduce(votes, op=MIN, process_set=process_set).bool().to(found.device)


@torch.no_grad()
def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Broadcast one rank's values to the variables of all ranks."""
    values = [variable.value for variable in variables]
    broadcast_parameters([(f"variable_{place}", value.data) for place, value in enumerate(values)], root_rank)


def call(collective: str, value: Any, **options: Any) -> torch.Tensor:
    """Apply a collective to a value that torch can convert to a tensor."""
    tensor = torch.as_tensor(value)
    return getattr(collectives, collective)(tensor.contiguous(), **options)


def _reduced(gradients: Tensors, distribution: Any) -> Tensors:
    """Reduce gradients in one operation, in buffers that are reused; the results are valid until the next step."""
    options = distribution.options
    compressed = [options.compression.compress(gradient) for gradient in gradients]
    kinds = [(tensor.dtype, tensor.device) for tensor, _ in compressed]
    parts: dict[Any, Tensors] = {}  # of each buffer, in their order
    for place, kind in enumerate(dict.fromkeys(kinds)):
        own = [tensor for (tensor, _), other in zip(compressed, kinds, strict=True) if other == kind]
        parts[kind] = _gathered(distribution, place, own)
    if not parts:
        return []
    buffers = distribution.buffers[: len(parts)]
    factor = options.gradient_predivide_factor
    rest = None, distribution.name, options.op, 1.0 / factor, factor, options.process_set
    ops.synchronize(ops.grouped_allreduce_async_(buffers, *rest))
    views = {kind: iter(own) for kind, own in parts.items()}
    contexts = (context for _, context in compressed)
    return [options.compression.decompress(next(views[kind]), next(contexts)) for kind in kinds]


def _gathered(distribution: Any, place: int, tensors: Tensors) -> Tensors:
    """Copy tensors of one dtype and device into one buffer, and return views of it."""
    sizes = [tensor.numel() for tensor in tensors]
    buffers = distribution.buffers
    if place == len(buffers) or buffers[place].numel() != sum(sizes) or buffers[place].dtype != tensors[0].dtype:
        buffers[place:] = [torch.empty(sum(sizes), dtype=tensors[0].dtype, device=tensors[0].device)]
    torch.cat([tensor.detach().reshape(-1) for tensor in tensors], out=buffers[place])
    copies = buffers[place].split(sizes)
    return [copy.view(tensor.shape) for copy, tensor in zip(copies, tensors, strict=True)]
