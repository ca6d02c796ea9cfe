"""Asynchronous collectives on torch tensors, by Horovod's names: into new tensors, in place, and grouped."""

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from tutti.horovod import basics
from tutti.horovod.basics import ProcessSet, global_process_set
from tutti.horovod.engine import Pending
from tutti.horovod.engine.execute import OperationTensors
from tutti.horovod.engine.messages import ADASUM, AVERAGE, MAX, MIN, PRODUCT, SUM, Kind, TensorRequest
from tutti.horovod.torch.arguments import (
    check_adasum,
    check_moved,
    check_reduced,
    check_root,
    dtype_name,
    members_of,
    number_of,
    reduce_op,
    same_arguments,
    split_rows,
)

# fmt: off
__all__ = [  # in the namespace horovod.torch
    "Adasum", "Average", "Max", "Min", "Product", "Sum", "allgather_async", "allreduce_async", "allreduce_async_",
    "alltoall_async", "barrier", "broadcast_async", "broadcast_async_", "grouped_allgather_async",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter_async", "init", "join", "poll",
    "reducescatter_async", "shutdown", "synchronize",
]
# fmt: on

Average, Sum, Adasum, Min, Max, Product = AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT

_basics = basics  # some programs for Horovod use it
_handles: dict[int, "_Handle"] = {}
_numbers = itertools.count()


class _Handle:
    """The operations of one handle, and whether their result is one tensor or several."""

    def __init__(self, pending: list[Pending], grouped: bool) -> None:
        self.pending = pending
        self.grouped = grouped

    def result(self) -> Any:
        results = [_value(each) for each in self.pending]
        return tuple(results) if self.grouped else results[0]


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the other ranks, and drop the handles of an earlier job."""
    if not basics.is_initialized():
        _handles.clear()
    basics.init(comm, process_sets)


def shutdown() -> None:
    """End the job on all ranks, and number handles from 0 again."""
    global _numbers
    basics.shutdown()
    _numbers = itertools.count()


def poll(handle: int) -> bool:
    """Return whether an operation is done."""
    if handle not in _handles:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    done = all(each.done for each in _handles[handle].pending)
    if not done:
        basics.engine().hurry(others=True)
    return done


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result; None for a handle that was synchronized before."""
    found = _handles.pop(handle, None)
    return None if found is None else found.result()


def settle(handle: int) -> None:
    """Wait until an operation is done or has failed; its result can still be taken."""
    found = _handles.get(handle)
    for each in found.pending if found is not None else ():
        if not each.done:
            each.engine.wait_for(each)


def forget(handle: int) -> None:
    """Drop a result that is not needed."""
    _handles.pop(handle, None)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to reduce a tensor over ranks into a new one."""
    rest = average, name, op, prescale_factor, postscale_factor, process_set
    return _reduce([tensor], *rest, in_place=False, grouped=False)


@same_arguments(allreduce_async)
def allreduce_async_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """Start to reduce a tensor over ranks, in place."""
    return _reduce([tensor], *args, **kwargs, in_place=True, grouped=False)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to reduce several tensors as one unit into new ones."""
    rest = average, name, op, prescale_factor, postscale_factor, process_set
    return _reduce(tensors, *rest, in_place=False, grouped=True)


@same_arguments(grouped_allreduce_async)
def grouped_allreduce_async_(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> int:
    """Start to reduce several tensors as one unit, in place."""
    return _reduce(tensors, *args, **kwargs, in_place=True, grouped=True)


def packed_allreduce_async(
    tensor: torch.Tensor,
    parts: Sequence[torch.Size],
    name: str | None,
    op: int,
    scales: tuple[float, float],
    process_set: ProcessSet,
    filled: Future[None],
    divided: bool,
) -> int:
    """Start to reduce a tensor over ranks, in place; other tensors are packed in it once `filled` is done."""
    check_reduced(tensor)
    pre, post = scales
    rest = {"op": op, "prescale": pre, "postscale": post, "parts": tuple(tuple(shape) for shape in parts)}
    return _submit(
        "allreduce", name, process_set, [(tensor, tensor)], grouped=False, filled=filled, divided=divided, **rest
    )


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start to concatenate the rows of all ranks."""
    check_moved(tensor)
    return _submit("allgather", name, process_set, [(tensor, None)], grouped=False)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to concatenate the rows of all ranks, for several tensors as one unit."""
    check_moved(*tensors)
    return _submit("allgather", name, process_set, [(tensor, None) for tensor in tensors], grouped=True)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to broadcast a rank's tensor into new tensors."""
    return _broadcast([(tensor, torch.empty_like(tensor))], root_rank, name, process_set)


@same_arguments(broadcast_async)
def broadcast_async_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """Start to broadcast a rank's tensor, in place."""
    return _broadcast([(tensor, tensor)], *args, **kwargs)


def grouped_broadcast_async(
    tensors: Sequence[torch.Tensor],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to broadcast a rank's tensors as one unit, into new tensors."""
    pairs = [(tensor, torch.empty_like(tensor)) for tensor in tensors]
    return _broadcast(pairs, root_rank, name, process_set, grouped=True)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to send some of the rows to each rank."""
    check_moved(tensor)
    rows = split_rows(tensor, splits, members_of(process_set).size)
    return _submit("alltoall", name, process_set, [(tensor, None)], splits=rows, grouped=False)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start to reduce over ranks and give each rank some of the rows."""
    return _scatter([tensor], name, op, process_set, (prescale_factor, postscale_factor), grouped=False)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start to reduce several tensors as one unit and give each rank some of the rows of each."""
    return _scatter(tensors, name, op, process_set, (prescale_factor, postscale_factor), grouped=True)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait for all ranks of a process set."""
    basics.engine().agree(TensorRequest("barrier", "noname", number_of(process_set)))


def join(device: int = -1) -> int:
    """Contribute zeros until all ranks have joined, since this rank has no more data; return the last rank to join."""
    return basics.engine().agree(TensorRequest("join", f"rank{basics.engine().rank}")).last_joined


def _reduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    in_place: bool,
    grouped: bool,
) -> int:
    check_reduced(*tensors)
    op = reduce_op(op, average)
    if op == Adasum:
        check_adasum(tensors, process_set)
    pairs = [(tensor, tensor if in_place else torch.empty_like(tensor)) for tensor in tensors]
    rest = {"op": op, "prescale": prescale_factor, "postscale": postscale_factor}
    return _submit("allreduce", name, process_set, pairs, grouped, **rest)


def _broadcast(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    grouped: bool = False,
) -> int:
    check_moved(*(tensor for tensor, _ in pairs))
    check_root(root_rank, process_set)
    return _submit("broadcast", name, process_set, pairs, root=root_rank, grouped=grouped)


def _scatter(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    scales: tuple[float, float],
    grouped: bool,
) -> int:
    check_reduced(*tensors)
    if op not in (Average, Sum):
        raise RuntimeError(f"reducescatter with op={op} is not supported: expected Average or Sum.")
    pairs = [(tensor, None) for tensor in tensors]
    return _submit(
        "reducescatter", name, process_set, pairs, op=op, prescale=scales[0], postscale=scales[1], grouped=grouped
    )


def _submit(
    kind: Kind,
    name: str | None,
    process_set: ProcessSet,
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    grouped: bool,
    filled: Future[None] | None = None,
    divided: bool = False,
    **rest: Any,
) -> int:
    """Submit tensors under one handle; several tensors have numbered names."""
    engine, number = basics.engine(), number_of(process_set)
    handle = next(_numbers)
    base = name if name is not None else engine.next_name(number)
    operations = []
    for place, (tensor, output) in enumerate(pairs):
        own = f"{base}_{place + 1}of{len(pairs)}" if grouped else base
        group = {"group": base, "group_size": len(pairs)} if grouped else {}
        request = TensorRequest(
            kind, own, number, dtype_name(tensor), tuple(tensor.shape), tensor.device.type, **rest, **group
        )
        own_memory = tensor.detach()
        into = own_memory if output is tensor else output
        operations.append((request, OperationTensors(own_memory, into, filled=filled, divided=divided)))
    _handles[handle] = _Handle(engine.submit(*operations), grouped)
    for each, (_, output) in zip(_handles[handle].pending, pairs, strict=True):
        each.given = output  # the caller's tensor, of which the engine has a view
    return handle


def _value(pending: Pending) -> Any:
    work = pending.result()
    given = pending.given if pending.given is not None else work.output
    return (given, work.received_splits) if pending.request.kind == "alltoall" else given
