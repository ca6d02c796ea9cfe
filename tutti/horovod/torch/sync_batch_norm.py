"""Batch norm whose statistics are those of the batches of all ranks."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tutti.horovod import basics
from tutti.horovod.torch.ops import Sum, allgather_async, allreduce_async_, synchronize


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm over all ranks while it trains; on one rank, or when it evaluates, torch's own."""

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
        """The weight of this batch in the running statistics; without momentum, they are means over all batches."""
        if self.num_batches_tracked is None:
            return 0.0
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum


class _Normalize(torch.autograd.Function):
    """Each rank's moments travel in one message forwards, the sums of the gradient in one backwards."""

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
        grad_bias, grad_weight = sums.clone()  # of this rank alone: the optimizer reduces them
        synchronize(allreduce_async_(sums, name="sync_batch_norm.sum_dy", op=Sum))
        means = sums / count
        centered = grad - _along_channels(means[0], input) - normalized * _along_channels(means[1], input)
        scale = inverse_deviation if weight is None else inverse_deviation * weight
        grad_input = (centered * _along_channels(scale, input)).to(input.dtype)
        if weight is None:
            return grad_input, None, None, None
        return grad_input, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None


def _moments_over_ranks(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, variance and number of the values of each channel, at least in single precision."""
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
