"""Collectives on torch tensors, by Horovod's names: synchronous, asynchronous, in place and grouped."""

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from tutti.hvd import basics
from tutti.hvd.basics import global_process_set
from tutti.hvd.engine import Pending
from tutti.hvd.execute import DTYPES, Work
from tutti.hvd.messages import ADASUM, AVERAGE, MAX, MIN, OP_NAMES, PRODUCT, SUM, Kind, Request
from tutti.hvd.process_sets import ProcessSet

Average, Sum, Adasum, Min, Max, Product = AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT

_REDUCED = {
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
}
_handles: dict[int, "_Handle"] = {}
_numbers = itertools.count()


class _Handle:
    """Operations under one number, and whether their result is one tensor or several."""

    def __init__(self, pending: list[Pending], grouped: bool) -> None:
        self.pending = pending
        self.grouped = grouped

    def result(self) -> Any:
        results = [_value(each) for each in self.pending]
        return tuple(results) if self.grouped else results[0]


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the other ranks; handles of an earlier job are forgotten."""
    if not basics.is_initialized():
        _handles.clear()
    basics.init(comm, process_sets)


def poll(handle: int) -> bool:
    """Whether an operation is done."""
    if handle not in _handles:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return all(each.done.is_set() for each in _handles[handle].pending)


def synchronize(handle: int) -> Any:
    """The result of an operation when it is done; None for a handle that was synchronised before."""
    found = _handles.pop(handle, None)
    return None if found is None else found.result()


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
    _check_reduced(tensor)
    scales = prescale_factor, postscale_factor
    return _reduce([tensor], [torch.empty_like(tensor)], average, name, op, scales, process_set, grouped=False)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to reduce a tensor over ranks, in place."""
    _check_reduced(tensor)
    scales = prescale_factor, postscale_factor
    return _reduce([tensor], [tensor], average, name, op, scales, process_set, grouped=False)


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
    for tensor in tensors:
        _check_reduced(tensor)
    outputs = [torch.empty_like(tensor) for tensor in tensors]
    scales = prescale_factor, postscale_factor
    return _reduce(list(tensors), outputs, average, name, op, scales, process_set, grouped=True)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to reduce several tensors as one unit, in place."""
    for tensor in tensors:
        _check_reduced(tensor)
    scales = prescale_factor, postscale_factor
    return _reduce(list(tensors), list(tensors), average, name, op, scales, process_set, grouped=True)


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start to put the rows of all ranks after each other."""
    _check_moved(tensor)
    return _submit("allgather", name, process_set, [(tensor, None)], grouped=False)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to send a rank's tensor to all, into new tensors."""
    _check_moved(tensor)
    _check_root(root_rank, process_set)
    return _submit("broadcast", name, process_set, [(tensor, torch.empty_like(tensor))], root=root_rank, grouped=False)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to send a rank's tensor to all, in place."""
    _check_moved(tensor)
    _check_root(root_rank, process_set)
    return _submit("broadcast", name, process_set, [(tensor, tensor)], root=root_rank, grouped=False)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to send some of the rows to each rank."""
    _check_moved(tensor)
    rows = _splits(tensor, splits, _members(process_set).size)
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
    _check_reduced(tensor)
    if op not in (Average, Sum):
        raise RuntimeError(f"reducescatter with op={op} is not supported: expected Average or Sum.")
    scales = {"prescale": prescale_factor, "postscale": postscale_factor}
    return _submit("reducescatter", name, process_set, [(tensor, None)], op=op, grouped=False, **scales)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait for all ranks of a set."""
    request = Request("barrier", "noname", _members_number(process_set))
    (pending,) = basics.engine().submit((request, Work(torch.empty(0), None)))
    pending.result()


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and lend zeros until all have; the rank that came last."""
    request = Request("join", f"rank{basics.engine().rank}")
    (pending,) = basics.engine().submit((request, Work(torch.empty(0), None)))
    pending.result()
    return pending.last_joined


def _reduce(
    tensors: list[torch.Tensor],
    outputs: list[torch.Tensor],
    average: bool | None,
    name: str | None,
    op: int | None,
    scales: tuple[float, float],
    process_set: ProcessSet,
    grouped: bool,
) -> int:
    op = reduce_op(op, average)
    if op == Adasum and _members(process_set).size > 1:
        raise NotImplementedError("op=Adasum is not there yet for more than one rank: expected another reduction.")
    pairs = list(zip(tensors, outputs, strict=True))
    return _submit(
        "allreduce", name, process_set, pairs, op=op, prescale=scales[0], postscale=scales[1], grouped=grouped
    )


def _submit(
    kind: Kind,
    name: str | None,
    process_set: ProcessSet,
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    grouped: bool,
    **rest: Any,
) -> int:
    """Submit tensors under one handle; each has the name with its place behind it where they are several."""
    engine, number = basics.engine(), _members_number(process_set)
    handle = next(_numbers)
    base = name if name is not None else engine.next_name(number)
    operations = []
    for place, (tensor, output) in enumerate(pairs):
        own = f"{base}_{place + 1}of{len(pairs)}" if grouped else base
        group = {"group": base, "group_size": len(pairs)} if grouped else {}
        request = Request(kind, own, number, _dtype(tensor), tuple(tensor.shape), tensor.device.type, **rest, **group)
        own_memory = tensor.detach()
        into = own_memory if output is tensor else output
        operations.append((request, Work(own_memory, into)))
    _handles[handle] = _Handle(engine.submit(*operations), grouped)
    for each, (_, output) in zip(_handles[handle].pending, pairs, strict=True):
        each.given = output  # what the caller holds: the same memory as the engine's view of it
    return handle


def _value(pending: Pending) -> Any:
    work = pending.result()
    given = pending.given if pending.given is not None else work.output
    return (given, work.received_splits) if pending.request.kind == "alltoall" else given


def reduce_op(op: int | None, average: bool | None) -> int:
    """The operation that is meant; `average` is the old way to say it."""
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("Parameter `average` has been replaced with `op`", DeprecationWarning, stacklevel=4)
        return Average if average else Sum
    op = Average if op is None else op
    if op not in range(len(OP_NAMES)):
        raise ValueError(
            f"op={op} is not a reduction: expected one of {', '.join(f'hvd.{each}' for each in OP_NAMES)}."
        )
    return op


def _members(process_set: ProcessSet) -> Any:
    return basics.engine().sets[_members_number(process_set)]


def _members_number(process_set: ProcessSet) -> int:
    engine = basics.engine()
    number = process_set.process_set_id
    if number is None or number not in engine.sets:
        raise ValueError(f"{process_set} is not registered, or has been removed.")
    if engine.rank not in engine.sets[number].ranks:
        raise ValueError(f"rank {engine.rank} is not a member of {process_set}: expected one of its ranks.")
    return number


def _check_root(root_rank: int, process_set: ProcessSet) -> None:
    ranks = _members(process_set).ranks
    if root_rank not in ranks:
        raise ValueError(f"root_rank={root_rank} is not in {process_set}: expected one of {list(ranks)}.")


def _check_reduced(tensor: torch.Tensor) -> None:
    if tensor.dtype not in _REDUCED:
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    _check_contiguous(tensor)


def _check_moved(tensor: torch.Tensor) -> None:
    if _dtype(tensor) not in DTYPES:
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    _check_contiguous(tensor)


def _check_contiguous(tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")


def _splits(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, size: int) -> tuple[int, ...]:
    count = len(tensor) if tensor.ndim else 0  # without dimensions it is refused on all ranks together
    if splits is None:
        if count % size:
            raise ValueError(
                f"alltoall of {count} rows without splits: expected a multiple of {size}, the ranks of the set."
            )
        return (count // size,) * size
    if isinstance(splits, torch.Tensor) and splits.dtype != torch.int32:
        raise ValueError(f"splits are {splits.dtype}: expected torch.int32.")
    rows = tuple(int(each) for each in splits)
    if len(rows) != size or min(rows) < 0 or sum(rows) > count:
        raise ValueError(
            f"splits {list(rows)} for {count} rows and {size} ranks: expected {size} numbers of rows, "
            f"0 or more, {count} in all at most."
        )
    return rows


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
