"""3-D convolutions with kernel 4, stride 2 and padding 1, which halve a volume (`down`) or double it (`up`).

Each has several forms that compute the same function:

- "convolution": torch's convolution. A compiled model calls it as an opaque operator, because the compiler of torch
  2.11 assumes a wrong memory layout for the gradients of a channels-last convolution. On a GPU the operator computes
  sums over many channels and few cells as a product, because cuDNN has no kernels that split them. On a Hopper GPU
  it calls the kernels of `kernels.convolution` in bf16, where the table below says that they are faster than cuDNN.
- "product": one matrix product with the 4 x 4 x 4 windows of the volume as rows. It moves eight times the data, and
  is still faster with few channels, for which cuDNN has no good kernels. On a Hopper GPU `down` calls kernels of
  `kernels.convolution` instead.
- "mixed" (`up` only): a convolution forward, products backward. Where our kernels are faster in all three products, the
  same as "convolution".

The results pass through a leaky ReLU with a given slope: 0 is a ReLU, 1 none. Our kernels do that on the way.
"""

import contextlib
from collections.abc import Iterator
from itertools import product
from typing import Any, Literal

import torch
import torch.nn.functional as F

_KERNELS = False
if torch.cuda.is_available():
    with contextlib.suppress(ImportError):  # triton is installed with torch where it supports the GPU
        import tutti.models.kernels.operators
        import tutti.models.kernels.windows  # noqa: F401 (they register operators)

        _KERNELS = True

Form = Literal["convolution", "product", "mixed"]
Product = Literal["gather", "scatter", "weight"]  # see tutti.models.kernels.convolution
_LAYOUT = torch.channels_last_3d
_FEW_CHANNELS = 16
_FEW_WINDOWS = 8  # of a sample
_HOPPER = 9

# What our kernels compute in less time than cuDNN on an H200, by the channels of the large and of the small volume.
FASTER_THAN_CUDNN: dict[tuple[int, int], tuple[Product, ...]] = {
    (64, 128): ("gather", "scatter", "weight"),
    (128, 256): ("gather",),
    (256, 512): ("gather",),
    (256, 1024): ("gather",),
    (128, 512): ("gather",),
    (64, 256): ("gather", "scatter", "weight"),
}


def down(
    volume: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, form: Form, slope: float = 1.0
) -> torch.Tensor:
    """B x C x 2D x 2H x 2W to B x O x D x H x W, with a weight of O x C x 4 x 4 x 4."""
    volume, weight, bias = _cast(volume, weight, bias)
    if form == "convolution":
        return _convolve(volume, weight, bias, slope, doubles=False)
    if _folds(volume, weight):
        return _Folded.apply(volume, weight, bias, slope)
    rows = _Windows.apply(volume.permute(0, 2, 3, 4, 1))
    out = torch.addmm(bias, rows.flatten(0, 3).flatten(1), weight.permute(2, 3, 4, 1, 0).flatten(0, 3))
    return _activate(out.view(*rows.shape[:4], -1).permute(0, 4, 1, 2, 3), slope)


def up(volume: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, form: Form, slope: float = 1.0) -> torch.Tensor:
    """B x C x D x H x W to B x O x 2D x 2H x 2W, with a weight of C x O x 4 x 4 x 4."""
    volume, weight, bias = _cast(volume, weight, bias)
    if form == "convolution" or (form == "mixed" and len(_kernel_products(volume, weight)) == 3):
        return _convolve(volume, weight, bias, slope, doubles=True)
    return _activate(_ByProducts.apply(volume, weight, bias, form == "mixed"), slope)


def _activate(total: torch.Tensor, slope: float) -> torch.Tensor:
    if slope == 0:
        return F.relu(total, inplace=True)
    return total if slope == 1 else F.leaky_relu(total, slope, inplace=True)


def _has_kernels(volume: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns whether our Triton kernels of windows are available and apply: for few channels after `up`."""
    applies = weight.shape[1] <= _FEW_CHANNELS and volume.shape[-1] % 2 == 0 and volume.itemsize <= 4
    return _KERNELS and volume.is_cuda and applies


@torch.compiler.assume_constant_result
def _is_hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == _HOPPER


def _has_conv_kernels(volume: torch.Tensor) -> bool:
    """Returns whether our kernels of convolutions are available and apply to a volume."""
    whole_boxes = all(size >= 4 and size & (size - 1) == 0 for size in volume.shape[2:])  # powers of two
    return whole_boxes and _KERNELS and volume.is_cuda and volume.dtype == torch.bfloat16 and _is_hopper()


def _kernel_products(volume: torch.Tensor, weight: torch.Tensor) -> tuple[Product, ...]:
    """The products that our kernels compute for a layer with this weight, and a volume before or after it."""
    return FASTER_THAN_CUDNN.get((weight.shape[1], weight.shape[0]), ()) if _has_conv_kernels(volume) else ()


def _folds(volume: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns whether our kernels compute `down` from few channels; they read blocks of 64 numbers."""
    out, channels = weight.shape[:2]
    return _has_conv_kernels(volume) and channels <= _FEW_CHANNELS and channels % 4 == 0 and out % 64 == 0


def windows(volume: torch.Tensor) -> torch.Tensor:
    """The 4 x 4 x 4 windows with stride 2 of a B x 2D x 2H x 2W x C volume: B x D x H x W x 4 x 4 x 4 x C."""
    padded = F.pad(volume, (0, 0, 1, 1, 1, 1, 1, 1))
    return padded.unfold(1, 4, 2).unfold(2, 4, 2).unfold(3, 4, 2).permute(0, 1, 2, 3, 5, 6, 7, 4).contiguous()


def fold(volume: torch.Tensor) -> torch.Tensor:
    """B x C x 2D x 2H x 2W, with a margin of zeros, to B x 2D + 2 x H x 2W + 2 x 4C."""
    padded = F.pad(volume.permute(0, 2, 3, 4, 1), (0, 0, 1, 1, 1, 1, 1, 1))
    return padded.unfold(2, 4, 2).transpose(4, 5).flatten(4).contiguous()


def overlap_add(rows: torch.Tensor) -> torch.Tensor:
    """The transpose of `windows`: adds every window to its position.

    Two windows overlap in each direction, so each cell of the volume is a sum of eight numbers.
    """
    batch, depth, height, width = rows.shape[:4]
    total = rows.new_zeros(batch, 2 * depth, 2 * height, 2 * width, rows.shape[-1])
    choices = (_windows_over(size, rows.device) for size in (depth, height, width))
    for (cell_d, tap_d, in_d), (cell_h, tap_h, in_h), (cell_w, tap_w, in_w) in product(*choices):
        d, h = (slice(None), None, None), (slice(None), None)
        term = rows[:, cell_d[d], cell_h[h], cell_w, tap_d[d], tap_h[h], tap_w]
        inside = (in_d[d] & in_h[h] & in_w).unsqueeze(-1)
        total = total + torch.where(inside, term, 0)
    return total


def _windows_over(size: int, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yields for every position along one axis the two windows over it: their index, their tap, and if they exist."""
    place = torch.arange(2 * size, device=device)
    for first in (0, 2):
        tap = (place + 1) % 2 + first
        cell = (place + 1 - tap) // 2
        yield cell.clamp(0, size - 1), tap, (cell >= 0) & (cell < size)


class _Windows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, volume: torch.Tensor) -> torch.Tensor:
        return windows(volume)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return overlap_add(grads[0])


class _ByProducts(torch.autograd.Function):
    """`up`: forward a convolution or a product, backward products."""

    @staticmethod
    def forward(
        ctx: Any, volume: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, convolves: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(volume, weight)
        if convolves:
            return _plain(volume, weight, doubles=True) + bias.view(-1, 1, 1, 1)
        inner = volume.permute(0, 2, 3, 4, 1)
        if _has_kernels(volume, weight):
            rows = weight.flatten(1).t() @ inner.reshape(-1, inner.shape[-1]).t()
            return torch.ops.tutti.overlap_add(rows, bias, inner.shape[:4])
        rows = inner.reshape(-1, inner.shape[-1]) @ weight.permute(0, 2, 3, 4, 1).flatten(1)
        return overlap_add(rows.view(*inner.shape[:4], 4, 4, 4, -1)).permute(0, 4, 1, 2, 3) + bias.view(-1, 1, 1, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        volume, weight = ctx.saved_tensors
        inner = volume.permute(0, 2, 3, 4, 1)
        positions = inner.reshape(-1, len(weight))
        if _has_kernels(volume, weight):
            rows, sums = torch.ops.tutti.windows_by_tap(grads[0].contiguous())
            grad_volume = rows.t() @ weight.flatten(1).t()
            grad_weight = (positions.t() @ rows.t()).view(weight.shape)
            grad_bias = sums.sum(0).to(weight.dtype)
        else:
            rows = windows(grads[0].permute(0, 2, 3, 4, 1)).view(-1, weight[0].numel())
            grad_volume = rows @ weight.permute(0, 2, 3, 4, 1).flatten(1).t()
            grad_weight = (positions.t() @ rows).view(len(weight), 4, 4, 4, -1).permute(0, 4, 1, 2, 3)
            grad_bias = grads[0].sum((0, 2, 3, 4))
        return grad_volume.view(inner.shape).permute(0, 4, 1, 2, 3), grad_weight, grad_bias, None


class _Folded(torch.autograd.Function):
    """`down` from few channels by our kernels."""

    @staticmethod
    def forward(ctx: Any, volume: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, slope: float) -> torch.Tensor:
        cells = fold(volume)
        out = torch.ops.tutti.folded_gather(cells, weight, bias, slope)
        ctx.save_for_backward(cells, weight, out)
        ctx.slope = slope
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cells, weight, out = ctx.saved_tensors
        grad = _before_activation(grads[0], out, ctx.slope)
        inner = grad.permute(0, 2, 3, 4, 1)
        grad_volume = None
        if ctx.needs_input_grad[0]:
            rows = inner.reshape(-1, len(weight)) @ weight.permute(0, 2, 3, 4, 1).flatten(1)
            grad_volume = overlap_add(rows.view(*inner.shape[:4], 4, 4, 4, -1)).permute(0, 4, 1, 2, 3)
        return grad_volume, *torch.ops.tutti.folded_weight(grad, cells), None


def _before_activation(grad: torch.Tensor, out: torch.Tensor, slope: float) -> torch.Tensor:
    """The gradient of what became `out` by a leaky ReLU."""
    return grad if slope == 1 else torch.where(out > 0, grad, grad * slope)


def _convolve(
    volume: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, slope: float, doubles: bool
) -> torch.Tensor:
    products = _kernel_products(volume, weight)
    if _forward_product(doubles) in products:
        return torch.ops.tutti.strided_convolution(volume, weight, bias, slope, doubles)
    if torch.compiler.is_compiling() or products:  # the compiler joins bias and slope to what follows
        total = torch.ops.tutti.strided_convolution(volume, weight, None, 1.0, doubles) + bias.view(-1, 1, 1, 1)
    else:
        total = (F.conv_transpose3d if doubles else F.conv3d)(volume, weight, bias, stride=2, padding=1)
    return _activate(total, slope)


def _plain(volume: torch.Tensor, weight: torch.Tensor, doubles: bool) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return torch.ops.tutti.strided_convolution(volume, weight, None, 1.0, doubles)
    return strided_convolution(volume, weight, None, 1.0, doubles)


def _forward_product(doubles: bool) -> Product:
    return "scatter" if doubles else "gather"


@torch.library.custom_op("tutti::strided_convolution", mutates_args=())
def strided_convolution(
    volume: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slope: float, doubles: bool
) -> torch.Tensor:
    """torch's channels-last convolution, or that of our kernels, as one opaque operator."""
    if not doubles and _reduces_to_few(volume):
        out = _gather(volume, weight)
        out = out if bias is None else out + bias.view(-1, 1, 1, 1)
    elif _forward_product(doubles) in _kernel_products(volume, weight):
        return (torch.ops.tutti.conv_scatter if doubles else torch.ops.tutti.conv_gather)(volume, weight, bias, slope)
    else:
        out = torch.ops.aten.convolution(volume, weight, bias, [2] * 3, [1] * 3, [1] * 3, doubles, [0] * 3, 1)
    return _activate(out.contiguous(memory_format=_LAYOUT), slope)


@strided_convolution.register_fake
def _(
    volume: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slope: float, doubles: bool
) -> torch.Tensor:
    sizes = [2 * size if doubles else size // 2 for size in volume.shape[2:]]
    channels = weight.shape[1] if doubles else weight.shape[0]
    return volume.new_empty((len(volume), channels, *sizes)).contiguous(memory_format=_LAYOUT)


@torch.library.custom_op("tutti::strided_convolution_backward", mutates_args=())
def strided_convolution_backward(
    grad: torch.Tensor, volume: torch.Tensor, weight: torch.Tensor, doubles: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of volume and weight, in channels-last format."""
    grad = grad.contiguous(memory_format=_LAYOUT)
    products = _kernel_products(volume, weight)
    grad_volume = grad_weight = None
    if doubles and _reduces_to_few(grad):
        grad_volume = _gather(grad, weight)
    elif ("gather" if doubles else "scatter") in products:
        grad_volume = (torch.ops.tutti.conv_gather if doubles else torch.ops.tutti.conv_scatter)(
            grad, weight, None, 1.0
        )
    if "weight" in products:
        grad_weight = torch.ops.tutti.conv_weight(*((volume, grad) if doubles else (grad, volume)))
    if grad_volume is None or grad_weight is None:
        missing = [grad_volume is None, grad_weight is None, False]
        by_torch = torch.ops.aten.convolution_backward(
            grad, volume, weight, None, [2] * 3, [1] * 3, [1] * 3, doubles, [0] * 3, 1, missing
        )
        grad_volume = by_torch[0] if grad_volume is None else grad_volume
        grad_weight = by_torch[1] if grad_weight is None else grad_weight
    return grad_volume.contiguous(memory_format=_LAYOUT), grad_weight.contiguous(memory_format=_LAYOUT)


@strided_convolution_backward.register_fake
def _(
    grad: torch.Tensor, volume: torch.Tensor, weight: torch.Tensor, doubles: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(volume, memory_format=_LAYOUT), torch.empty_like(weight, memory_format=_LAYOUT)


def _reduces_to_few(volume: torch.Tensor) -> bool:
    """Returns whether the windows of a volume are few."""
    return volume.is_cuda and volume.shape[2:].numel() <= 8 * _FEW_WINDOWS


def _gather(volume: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The sums over the windows of a volume, with a weight of O x C x 4 x 4 x 4, as one product."""
    rows = windows(volume.permute(0, 2, 3, 4, 1))
    sums = rows.flatten(0, 3).flatten(1) @ weight.permute(2, 3, 4, 1, 0).flatten(0, 3)
    return sums.view(*rows.shape[:4], -1).permute(0, 4, 1, 2, 3)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    volume, weight, bias, ctx.slope, ctx.doubles = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(volume, weight, output)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    volume, weight, out = ctx.saved_tensors
    grad = _before_activation(grad, out, ctx.slope)
    both = torch.ops.tutti.strided_convolution_backward(grad, volume, weight, ctx.doubles)
    return *both, grad.sum((0, 2, 3, 4)) if ctx.has_bias else None, None, None


strided_convolution.register_autograd(_backward, setup_context=_save)


def _cast(volume: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Casts to the precision of autocast if it is enabled; autocast does not apply to custom operators.

    A contiguous weight, such as one in shards, takes the layout of the volume in the same pass over it.
    """
    kind = volume.device.type
    if not torch.is_autocast_enabled(kind):
        return volume, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    layout = _LAYOUT if volume.is_contiguous(memory_format=_LAYOUT) else torch.preserve_format
    return volume.to(dtype), weight.to(dtype, memory_format=layout), bias.to(dtype)
