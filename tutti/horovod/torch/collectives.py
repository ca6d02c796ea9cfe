"""Collectives that wait for their result, and through which gradients flow."""

from collections.abc import Sequence
from typing import Any

import torch

from tutti.horovod.basics import global_process_set
from tutti.horovod.process_sets import ProcessSet
from tutti.horovod.torch import ops
from tutti.horovod.torch.compression import Compression
from tutti.horovod.torch.ops import Average, Sum, synchronize


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """A tensor reduced over ranks; the gradient is reduced the same way."""
    op = ops.reduce_op(op, average)
    compressed, context = compression.compress(tensor)
    reduced = _Allreduce.apply(compressed, name, op, prescale_factor, postscale_factor, process_set)
    return compression.decompress(reduced, context)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """A tensor reduced over ranks, in place."""
    op = ops.reduce_op(op, average)
    return synchronize(ops.allreduce_async_(tensor, None, name, op, prescale_factor, postscale_factor, process_set))


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Several tensors reduced as one unit."""
    if not tensors:
        return list(tensors)
    op = ops.reduce_op(op, average)
    compressed, contexts = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    reduced = _GroupedAllreduce.apply(name, op, prescale_factor, postscale_factor, process_set, *compressed)
    pairs = zip(reduced, contexts, strict=True)  # pyright: ignore[reportArgumentType]
    return [compression.decompress(tensor, context) for tensor, context in pairs]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Several tensors reduced as one unit, in place."""
    if not tensors:
        return list(tensors)
    op = ops.reduce_op(op, average)
    scales = prescale_factor, postscale_factor
    return list(synchronize(ops.grouped_allreduce_async_(tensors, None, name, op, *scales, process_set)))


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The rows of all ranks after each other; a rank's gradient is the mean over ranks of that of its rows."""
    return _Allgather.apply(tensor, name, process_set)  # pyright: ignore[reportReturnType]


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """The rows of all ranks for several tensors, as one unit."""
    if not tensors:
        return list(tensors)
    return list(_GroupedAllgather.apply(name, process_set, *tensors))  # pyright: ignore[reportArgumentType]


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """A rank's tensor on all ranks."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)  # pyright: ignore[reportReturnType]


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """A rank's tensor on all ranks, in place."""
    return synchronize(ops.broadcast_async_(tensor, root_rank, name, process_set))


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Some of the rows to each rank: what came here, and with splits also how many rows came from each."""
    output, received = _Alltoall.apply(tensor, splits, name, process_set)  # pyright: ignore[reportGeneralTypeIssues]
    return output if splits is None else (output, received)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduced over ranks, some of the rows on each."""
    compressed, context = compression.compress(tensor)
    reduced = _Reducescatter.apply(compressed, name, op, process_set, prescale_factor, postscale_factor)
    return compression.decompress(reduced, context)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Several tensors reduced as one unit, some of the rows of each on each rank."""
    if not tensors:
        return list(tensors)
    compressed, contexts = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    reduced = _GroupedReducescatter.apply(name, op, process_set, prescale_factor, postscale_factor, *compressed)
    pairs = zip(reduced, contexts, strict=True)  # pyright: ignore[reportArgumentType]
    return [compression.decompress(tensor, context) for tensor, context in pairs]


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, name: Any, op: int, pre: float, post: float, process_set: ProcessSet) -> Any:
        ctx.rest = op, pre, post, process_set
        return synchronize(ops.allreduce_async(tensor, None, name, op, pre, post, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        op, pre, post, process_set = ctx.rest
        grad = synchronize(ops.allreduce_async(grads[0].contiguous(), None, None, op, pre, post, process_set))
        return grad, None, None, None, None, None


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, op: int, pre: float, post: float, process_set: ProcessSet, *tensors: Any) -> Any:
        ctx.rest = op, pre, post, process_set
        return synchronize(ops.grouped_allreduce_async(tensors, None, name, op, pre, post, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        op, pre, post, process_set = ctx.rest
        whole = [grad.contiguous() for grad in grads]
        reduced = synchronize(ops.grouped_allreduce_async(whole, None, None, op, pre, post, process_set))
        return None, None, None, None, None, *reduced


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, name: Any, process_set: ProcessSet) -> Any:
        ctx.rows, ctx.process_set = len(tensor) if tensor.ndim else 0, process_set
        return synchronize(ops.allgather_async(tensor, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        mean = synchronize(ops.allreduce_async(grads[0].contiguous(), op=Average, process_set=ctx.process_set))
        rows = torch.tensor([ctx.rows])
        counts = synchronize(ops.allgather_async(rows, process_set=ctx.process_set)).tolist()
        begin = sum(counts[: ctx.process_set.rank()])
        return mean[begin : begin + ctx.rows], None, None


class _GroupedAllgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, process_set: ProcessSet, *tensors: Any) -> Any:
        ctx.rows, ctx.process_set = [len(tensor) if tensor.ndim else 0 for tensor in tensors], process_set
        return synchronize(ops.grouped_allgather_async(tensors, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        whole = [grad.contiguous() for grad in grads]
        means = synchronize(ops.grouped_allreduce_async(whole, op=Average, process_set=ctx.process_set))
        rows = torch.tensor([ctx.rows])
        counts = synchronize(ops.allgather_async(rows, process_set=ctx.process_set))
        begins = counts[: ctx.process_set.rank()].sum(0).tolist()
        parts = zip(means, begins, ctx.rows, strict=True)
        return None, None, *(mean[begin : begin + count] for mean, begin, count in parts)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, root_rank: int, name: Any, process_set: ProcessSet) -> Any:
        ctx.rest = root_rank, process_set
        return synchronize(ops.broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        root_rank, process_set = ctx.rest
        mean = synchronize(ops.allreduce_async(grads[0].contiguous(), op=Average, process_set=process_set))
        here = process_set.ranks[process_set.rank()]
        return mean if here == root_rank else torch.zeros_like(mean), None, None, None


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, splits: Any, name: Any, process_set: ProcessSet) -> Any:
        output, received = synchronize(ops.alltoall_async(tensor, splits, name, process_set))
        ctx.received, ctx.process_set, ctx.shape = received, process_set, tensor.shape
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, _ = synchronize(ops.alltoall_async(grads[0].contiguous(), ctx.received, None, ctx.process_set))
        whole = grad.new_zeros(ctx.shape)
        whole[: len(grad)] = grad  # rows that were sent to nobody have none
        return whole, None, None, None


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, name: Any, op: int, process_set: ProcessSet, pre: float, post: float) -> Any:
        ctx.rest = op, process_set, pre * post
        return synchronize(ops.reducescatter_async(tensor, name, op, process_set, pre, post))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        op, process_set, scale = ctx.rest
        grad = synchronize(ops.allgather_async(grads[0].contiguous(), None, process_set))
        factor = scale * (process_set.size() if op == Sum else 1)
        return grad * factor if factor != 1 else grad, None, None, None, None, None


class _GroupedReducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, op: int, process_set: ProcessSet, pre: float, post: float, *tensors: Any) -> Any:
        ctx.rest = op, process_set, pre * post
        return synchronize(ops.grouped_reducescatter_async(tensors, name, op, process_set, pre, post))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        op, process_set, scale = ctx.rest
        whole = [grad.contiguous() for grad in grads]
        gathered = synchronize(ops.grouped_allgather_async(whole, None, process_set))
        factor = scale * (process_set.size() if op == Sum else 1)
        return None, None, None, None, None, *(grad * factor if factor != 1 else grad for grad in gathered)
