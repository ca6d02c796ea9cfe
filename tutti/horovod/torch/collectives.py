"""Collectives that wait for their result and are differentiable, and batch norm over all ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tutti.horovod import basics
from tutti.horovod.basics import ProcessSet, global_process_set
from tutti.horovod.gradients import Compression
from tutti.horovod.torch import ops
from tutti.horovod.torch.arguments import same_arguments
from tutti.horovod.torch.ops import Average, Sum, allgather_async, allreduce_async_, synchronize

# fmt: off
__all__ = [  # in the namespace horovod.torch
    "SyncBatchNorm", "allgather", "allreduce", "allreduce_", "alltoall", "broadcast", "broadcast_",
    "grouped_allgather", "grouped_allreduce", "grouped_allreduce_", "grouped_reducescatter", "reducescatter",
]
# fmt: on


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
    """Reduce a tensor over ranks; the gradient is reduced the same way."""
    rest = ops.reduce_op(op, average), prescale_factor, postscale_factor, process_set
    return _compressed([tensor], compression, lambda given: _Allreduce.apply(False, name, rest, *given))[0]


@same_arguments(ops.allreduce_async)
def allreduce_(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Reduce a tensor over ranks, in place."""
    return synchronize(ops.allreduce_async_(*args, **kwargs))


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
    """Reduce several tensors as one unit."""
    rest = ops.reduce_op(op, average), prescale_factor, postscale_factor, process_set
    return _compressed(tensors, compression, lambda given: _Allreduce.apply(True, name, rest, *given))


@same_arguments(ops.grouped_allreduce_async)
def grouped_allreduce_(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Reduce several tensors as one unit, in place."""
    return list(synchronize(ops.grouped_allreduce_async_(tensors, *args, **kwargs))) if tensors else []


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the rows of all ranks; a rank's gradient is the mean over ranks for its rows."""
    return _Allgather.apply(False, name, process_set, tensor)  # pyright: ignore[reportReturnType]


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Concatenate the rows of all ranks for several tensors, as one unit."""
    if not tensors:
        return []
    return list(_Allgather.apply(True, name, process_set, *tensors))  # pyright: ignore[reportArgumentType]


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Broadcast a rank's tensor to all ranks."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)  # pyright: ignore[reportReturnType]


@same_arguments(ops.broadcast_async)
def broadcast_(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Broadcast a rank's tensor to all ranks, in place."""
    return synchronize(ops.broadcast_async_(*args, **kwargs))


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to each rank; return the received rows, and with splits also how many came from each rank."""
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
    """Reduce over ranks, and return this rank's rows."""
    rest = op, process_set, prescale_factor, postscale_factor
    return _compressed([tensor], compression, lambda given: _Reducescatter.apply(False, name, rest, *given))[0]


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce several tensors as one unit, and return this rank's rows of each."""
    rest = op, process_set, prescale_factor, postscale_factor
    return _compressed(tensors, compression, lambda given: _Reducescatter.apply(True, name, rest, *given))


def _compressed(tensors: Sequence[torch.Tensor], compression: Any, collective: Callable[[Any], Any]) -> list[Any]:
    """Compress tensors, apply a collective to them, and decompress its results."""
    if not tensors:
        return []
    compressed, contexts = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    results = collective(compressed)
    pairs = zip(results if isinstance(results, tuple) else [results], contexts, strict=True)
    return [compression.decompress(tensor, context) for tensor, context in pairs]


def _wait_for(grouped: bool, of_several: Callable[..., int], of_one: Callable[..., int], given: Any, *rest: Any) -> Any:
    """Start an operation on a group of tensors or on one tensor, and wait for its results or result."""
    return synchronize(of_several(given, *rest) if grouped else of_one(given[0], *rest))


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grouped: bool, name: str | None, rest: tuple[Any, ...], *tensors: Any) -> Any:
        ctx.grouped, ctx.rest = grouped, rest
        start = ops.grouped_allreduce_async, ops.allreduce_async
        return _wait_for(grouped, *start, tensors, None, name, *rest)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        start = ops.grouped_allreduce_async, ops.allreduce_async
        reduced = _wait_for(ctx.grouped, *start, _contiguous(grads), None, None, *ctx.rest)
        return None, None, None, *(reduced if ctx.grouped else [reduced])


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grouped: bool, name: str | None, process_set: ProcessSet, *tensors: Any) -> Any:
        ctx.rows, ctx.process_set = [len(tensor) if tensor.ndim else 0 for tensor in tensors], process_set
        start = ops.grouped_allgather_async, ops.allgather_async
        return _wait_for(grouped, *start, tensors, name, process_set)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        means = synchronize(ops.grouped_allreduce_async(_contiguous(grads), op=Average, process_set=ctx.process_set))
        rows = torch.tensor([ctx.rows])
        counts = synchronize(ops.allgather_async(rows, process_set=ctx.process_set))
        begins = counts[: ctx.process_set.rank()].sum(0).tolist()
        parts = zip(means, begins, ctx.rows, strict=True)
        return None, None, None, *(mean[begin : begin + count] for mean, begin, count in parts)


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
        whole[: len(grad)] = grad  # rows that were not sent have no gradient
        return whole, None, None, None


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grouped: bool, name: str | None, rest: tuple[Any, ...], *tensors: Any) -> Any:
        ctx.grouped, ctx.rest = grouped, rest
        start = ops.grouped_reducescatter_async, ops.reducescatter_async
        return _wait_for(grouped, *start, tensors, name, *rest)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        op, process_set, prescale, postscale = ctx.rest
        start = ops.grouped_allgather_async, ops.allgather_async
        gathered = _wait_for(ctx.grouped, *start, _contiguous(grads), None, process_set)
        factor = prescale * postscale * (process_set.size() if op == Sum else 1)
        scaled = (grad * factor if factor != 1 else grad for grad in (gathered if ctx.grouped else [gathered]))
        return None, None, None, *scaled


def _contiguous(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [grad.contiguous() for grad in grads]


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm with the statistics of all ranks in training; on one rank, or in evaluation, torch's own."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"expected at least 2D input (got {input.ndim}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise a batch on a GPU."""
        if not input.is_cuda:
            raise ValueError("SyncBatchNorm expected input tensor to be on GPU. Use torch.nn.BatchNorm on a CPU.")
        self._check_input_dim(input)
        return self.normalize(input)

    def normalize(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise a batch wherever it is."""
        uses_batch = self.training or self.running_mean is None
        factor = self._count_batch() if self.training else 0.0
        running = self.running_mean, self.running_var
        if not uses_batch or basics.size() == 1:
            return functional.batch_norm(input, *running, self.weight, self.bias, uses_batch, factor, self.eps)
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps)  # pyright: ignore
        if self.training and self.running_mean is not None and self.running_var is not None:
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
            unbiased = variance * (count / (count - 1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        return output

    def _count_batch(self) -> float:
        """Return the weight of this batch in the running statistics; without momentum they are means."""
        if self.num_batches_tracked is None:
            return 0.0
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum


class _Normalize(torch.autograd.Function):
    """Sends the moments in one message in the forward pass, and sums of gradients in one in the backward pass."""

    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any, bias: Any, eps: float) -> Any:
        mean, variance, count = _moments_over_ranks(input)
        inverse_deviation = (variance + eps).rsqrt()
        scale = inverse_deviation if weight is None else inverse_deviation * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        ctx.save_for_backward(input, weight, mean, inverse_deviation, count)
        ctx.mark_non_differentiable(mean, variance, count)
        output = torch.addcmul(_along_channels(shift, input), input, _along_channels(scale, input))
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        input, weight, mean, inverse_deviation, count = ctx.saved_tensors
        grad = grads[0].to(mean.dtype)
        normalized = (input - _along_channels(mean, input)) * _along_channels(inverse_deviation, input)
        other = _other_dims(input)
        sums = torch.stack([grad.sum(other), (grad * normalized).sum(other)])
        grad_bias, grad_weight = sums.clone()  # local to this rank: the optimizer reduces them
        synchronize(allreduce_async_(sums, name="sync_batch_norm.sum_dy", op=Sum))
        means = sums / count
        centered = grad - _along_channels(means[0], input) - normalized * _along_channels(means[1], input)
        scale = inverse_deviation if weight is None else inverse_deviation * weight
        grad_input = (centered * _along_channels(scale, input)).to(input.dtype)
        if weight is None:
            return grad_input, None, None, None
        return grad_input, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None


def _moments_over_ranks(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean, variance and number of values of each channel, at least in single precision."""
    dtype = torch.promote_types(input.dtype, torch.float32)
    channels = input.shape[1]
    own = torch.zeros(1, 3, channels, dtype=dtype, device=input.device)  # a rank without samples adds nothing
    if input.numel():
        own[0, 1], own[0, 0] = torch.var_mean(input.to(dtype), _other_dims(input), correction=0)
        own[0, 2] = input.numel() // channels
    means, variances, counts = synchronize(allgather_async(own, "sync_batch_norm.mean")).unbind(1)
    count = counts.sum(0)
    mean = (means * counts).sum(0) / count
    variance = ((variances + (means - mean) ** 2) * counts).sum(0) / count
    return mean, variance, count


def _other_dims(input: torch.Tensor) -> list[int]:
    return [dim for dim in range(input.ndim) if dim != 1]


def _along_channels(values: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *[1] * (input.ndim - 2))
