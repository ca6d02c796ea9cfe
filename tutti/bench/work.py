"""What one step asks of its device: operations, bytes, operators, synchronisations, and the host's share."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

import tutti
from tutti.bench.host_share import host_share
from tutti.bench.results import Work

_INSIDE = tuple(f"{Path(each.__file__ or '').parent}/" for each in (torch, tutti))
_OPTIMIZERS = f"{_INSIDE[0]}optim/"
_ALLOCATE = ("empty", "new_empty")
_OVERWRITE = {"copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"}  # do not read what they write to
_PICK = {"embedding", "index", "index_select", "gather", "take", "index_put_", "index_add_", "scatter_", "scatter_add_"}
_SYNCHRONISE = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_dim", "_unique2", "bincount"}
_COPY = {"copy_", "_to_copy"}


def count_work(
    step: Callable[[], object],
    device: torch.device,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    cache_bytes: int,
    note: Callable[[str], None] = lambda _: None,
) -> Work:
    """Count a whole step on a batch that is there, without communication; what cannot be counted becomes a note."""
    share = _attempt(lambda: host_share(step, device), optimizer, "the host's share of a step", note)
    flops = FlopCounterMode(display=False, custom_mapping=_own_formulas())
    counter = OperatorCounter(device, cache_bytes)
    _attempt(lambda: _under(flops, step), optimizer, "operations", note)
    _attempt(lambda: _under(counter, step), optimizer, "bytes and operators", note)
    return Work(
        flops=float(flops.get_total_flops()),
        bytes_moved=float(counter.bytes_moved),
        least_bytes=float(least_bytes(model, optimizer, batch)),
        operators=counter.operators,
        synchronisations=sum(counter.places.values()),
        synchronises_at=tuple(f"{place}, {count} a step" for place, count in counter.places.most_common()),
        host_share=share,
    )


def least_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> int:
    """What a step must move however it is computed, if nothing stays in a cache."""
    weights = sum(each.nbytes for each in model.parameters())
    trained = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    state = sum(tensor.nbytes for values in optimizer.state.values() for tensor in tensors_in(values))
    read_in_passes, gradients, updates = 2 * weights, 2 * trained, 2 * trained
    return read_in_passes + gradients + updates + 2 * state + sum(each.nbytes for each in tensors_in(batch))


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict | list | tuple):
        for value in values.values() if isinstance(values, dict) else values:
            yield from tensors_in(value)


class OperatorCounter(TorchDispatchMode):
    """Counts what passes through torch's dispatcher, the backward pass included."""

    def __init__(self, device: torch.device, cache_bytes: int) -> None:
        super().__init__()
        self.operators = 0
        self.bytes_moved = 0
        self.places: Counter[str] = Counter()  # where the host waits for a number of the device
        self._device = device
        self._cache_bytes = cache_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = self._synchronises_at(func, args, kwargs)
        if place:
            self.places[place] += 1
        result = func(*args, **kwargs)
        if not is_view(func, args, result) and not _name(func).startswith(_ALLOCATE):
            self.operators += 1
            self.bytes_moved += moved_bytes(func, args, kwargs, result, self._cache_bytes)
        return result

    def _synchronises_at(self, func: Any, args: Any, kwargs: Any) -> str | None:
        """The line that makes the host wait, if this operator does; on a CPU only lines of the user count."""
        name, tensors = _name(func), list(tensors_in((args, kwargs)))
        if name in _COPY:
            source = tensors[-1] if tensors else None
            target = kwargs.get("device") or (tensors[0].device if name == "copy_" else None)
            if source is None or target is None or not source.is_cuda or torch.device(target).type != "cpu":
                return None
        elif name == "index":
            if not any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:]):
                return None
        elif name not in _SYNCHRONISE:
            return None
        if self._device.type == "cuda":
            return innermost_line() if any(tensor.is_cuda for tensor in tensors) else None
        return innermost_line() if name == "_local_scalar_dense" else None


def innermost_line() -> str | None:
    """The innermost line that is neither torch's nor tutti's, within the step that is counted.

    An optimizer that reads its own count of steps is torch's business.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OPTIMIZERS) or (frame.f_code is _under.__code__):
            return None
        if not name.startswith((*_INSIDE, "<")):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def is_view(func: Any, args: Any, result: Any) -> bool:
    """Whether an operator gives only another look at memory that is there."""
    schema = func._schema
    if any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns):
        return True
    if schema.is_mutable or not isinstance(result, torch.Tensor) or not args or not isinstance(args[0], torch.Tensor):
        return False
    return result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr() != 0


def moved_bytes(func: Any, args: Any, kwargs: Any, result: Any, cache_bytes: int) -> int:
    """Bytes that an operator reads and writes, or nothing where all of them fit into the cache together."""
    written = [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    writes = [_bytes(tensor) for tensor in tensors_in(written)]
    reads = [_bytes(tensor) for tensor in tensors_in((args, kwargs))]
    makes = 0 if func._schema.is_mutable else sum(_bytes(tensor) for tensor in tensors_in(result))
    if _name(func) in _OVERWRITE:
        reads = reads[len(writes) :]
    elif _name(func) in _PICK and reads:  # only the rows that are picked are touched
        picked = min(reads[0], sum(reads[1:]) + makes)
        reads, writes = [picked, *reads[1:]], [picked] if writes else []
    distinct = max(sum(reads), sum(writes)) + makes
    return sum(reads) + sum(writes) + makes if distinct > cache_bytes else 0


def _bytes(tensor: torch.Tensor) -> int:
    """What a tensor takes in memory; a repeated dimension takes nothing."""
    if tensor.layout != torch.strided:
        return tensor.nbytes
    count = tensor.itemsize
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count


def _name(func: Any) -> str:
    return func._schema.name.partition("::")[2]


def _under(mode: AbstractContextManager[Any], step: Callable[[], object]) -> None:
    """One step under a mode, as it is without a compiler."""
    with torch.compiler.set_stance("force_eager"), mode:
        step()


def _attempt(call: Callable[[], Any], optimizer: torch.optim.Optimizer, what: str, note: Callable[[str], None]) -> Any:
    """What a call gives; counting must not end what it looks at."""
    try:
        return call()
    except Exception as error:
        optimizer.zero_grad()
        note(f"{what} could not be counted: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        return None


def _own_formulas() -> dict[Any, Callable[..., int]]:
    """Operations of tutti's own operators, of which torch knows no formula."""

    def forward(volume: Any, weight: Any, doubles: bool, out_shape: Any = None, **_: Any) -> int:
        return conv_flop_count(volume, weight, out_shape, transposed=doubles)

    def backward(grad: Any, volume: Any, weight: Any, doubles: bool, **_: Any) -> int:
        return 2 * conv_flop_count(volume, weight, grad, transposed=doubles)

    if not hasattr(torch.ops.tutti, "strided_convolution"):
        return {}
    return {
        torch.ops.tutti.strided_convolution: forward,
        torch.ops.tutti.strided_convolution_backward: backward,
    }
