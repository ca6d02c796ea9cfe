"""Normalisation on parts: means and variances are those of the whole, in the forward and in the backward pass."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tutti.parallel.space.halo import group_of
from tutti.parallel.space.marks import Parts, dims_of, mark


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums are made."""
    return dtype if dtype == torch.float64 else torch.float32


@torch.library.custom_op("tutti::standardize", mutates_args=())
def standardize(
    part: torch.Tensor, dims: list[int], eps: float, grid: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A part with the mean 0 and the variance 1 of the whole over `dims`; then that mean and variance."""
    group, parts = group_of(grid)
    values = part.to(_wide(part.dtype))
    count = parts * math.prod(part.shape[dim] for dim in dims)
    mean = values.sum(dims, keepdim=True)
    dist.all_reduce(mean, group=group)
    mean /= count
    centred = values - mean
    variance = centred.square().sum(dims, keepdim=True)
    dist.all_reduce(variance, group=group)
    variance /= count
    return centred.mul_((variance + eps).rsqrt()).to(part.dtype), mean, variance


@standardize.register_fake
def _(part: torch.Tensor, dims: list[int], eps: float, grid: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = [1 if dim in dims else size for dim, size in enumerate(part.shape)]
    mean, variance = (part.new_empty(shape, dtype=_wide(part.dtype)) for _ in range(2))
    return torch.empty_like(part), mean, variance


@torch.library.custom_op("tutti::standardize_backward", mutates_args=())
def standardize_backward(
    grad: torch.Tensor, standard: torch.Tensor, variance: torch.Tensor, dims: list[int], eps: float, grid: int
) -> torch.Tensor:
    """The gradient of a part, from that of its standardized values and these values."""
    group, parts = group_of(grid)
    wide, values = grad.to(variance.dtype), standard.to(variance.dtype)
    count = parts * math.prod(grad.shape[dim] for dim in dims)
    sums = torch.stack([wide.sum(dims, keepdim=True), (wide * values).sum(dims, keepdim=True)])
    dist.all_reduce(sums, group=group)
    sums /= count
    out = (wide - sums[0]).sub_(values.mul(sums[1])).mul_((variance + eps).rsqrt())
    return out.to(grad.dtype)


@standardize_backward.register_fake
def _(
    grad: torch.Tensor, standard: torch.Tensor, variance: torch.Tensor, dims: list[int], eps: float, grid: int
) -> torch.Tensor:
    return torch.empty_like(grad)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(output[0], output[2])
    ctx.options = inputs[1:]
    ctx.mark_non_differentiable(output[1], output[2])


def _gradient(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    return torch.ops.tutti.standardize_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None


standardize.register_autograd(_gradient, setup_context=_keep)


def _scaled(
    values: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, shape: list[int]
) -> torch.Tensor:
    """Values times a weight plus a bias, in the type of the values."""
    if weight is not None:
        values = values * weight.reshape(shape).to(values.dtype)
    return values if bias is None else values + bias.reshape(shape).to(values.dtype)


def batch_norm(
    parts: Parts,
    func: Callable[..., torch.Tensor],
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Batch norm: statistics over the samples of this rank and all cells of the whole."""
    dims = dims_of(input)
    if not training:
        return mark(func(input, running_mean, running_var, weight, bias, False, momentum, eps), dims)
    reduced = [dim for dim in range(input.ndim) if dim != 1]
    values, mean, variance = standardize(input, reduced, eps, parts.number)
    if running_mean is not None and running_var is not None:
        _update(running_mean, running_var, mean, variance, momentum, parts.grid.size * input.numel() // input.shape[1])
    return mark(_scaled(values, weight, bias, [-1, *[1] * (input.ndim - 2)]), dims)


def _update(
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    momentum: float,
    count: int,
) -> None:
    """Move running statistics towards those of a batch; torch keeps the unbiased variance."""
    with torch.no_grad():
        running_mean.mul_(1 - momentum).add_(mean.detach().view(-1).to(running_mean.dtype), alpha=momentum)
        unbiased = variance.detach().view(-1).to(running_var.dtype) * (count / max(1, count - 1))
        running_var.mul_(1 - momentum).add_(unbiased, alpha=momentum)


def group_norm(
    parts: Parts,
    func: Callable[..., torch.Tensor],
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Group norm: statistics over the channels of a group and all cells of a sample."""
    groups = input.reshape(input.shape[0], num_groups, -1)
    values = standardize(groups, [2], eps, parts.number)[0].view(input.shape)
    return mark(_scaled(values, weight, bias, [-1, *[1] * (input.ndim - 2)]), dims_of(input))


def instance_norm(
    parts: Parts,
    func: Callable[..., torch.Tensor],
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Instance norm: statistics over all cells of a channel of a sample."""
    dims = dims_of(input)
    if not use_input_stats:
        return mark(func(input, running_mean, running_var, weight, bias, False, momentum, eps), dims)
    reduced = list(range(2, input.ndim))
    values, mean, variance = standardize(input, reduced, eps, parts.number)
    if running_mean is not None and running_var is not None:
        count = parts.grid.size * math.prod(input.shape[2:])
        _update(running_mean, running_var, mean.mean(0), variance.mean(0), momentum, count)
    return mark(_scaled(values, weight, bias, [-1, *[1] * (input.ndim - 2)]), dims)


def layer_norm(
    parts: Parts,
    func: Callable[..., torch.Tensor],
    input: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Layer norm over the last dimensions, those that are cut among them or not."""
    dims, count = dims_of(input), len(normalized_shape)
    assert dims is not None
    reduced = [dim for dim in range(input.ndim) if dim >= input.ndim - count]
    inside = [dim for dim in dims if dim in reduced]
    if not inside:
        return mark(func(input, normalized_shape, weight, bias, eps), dims)
    if len(inside) < len(dims):
        parts.refuse(func, "is over some of the dimensions that are cut, and not over all")
    own = tuple(dim - (input.ndim - count) for dim in dims)
    weight, bias = (each if each is None else parts.cut(each, own) for each in (weight, bias))
    values = standardize(input, reduced, eps, parts.number)[0]
    return mark(_scaled(values, weight, bias, list(input.shape[-count:])), dims)


OPERATORS: dict[Any, Callable[..., Any]] = {
    F.batch_norm: batch_norm,
    F.group_norm: group_norm,
    F.instance_norm: instance_norm,
    F.layer_norm: layer_norm,
}
