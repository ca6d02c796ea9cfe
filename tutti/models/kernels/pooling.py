"""Triton kernels of max-pooling with windows of 3 x 3, stride 2 and padding 1, for channels-last images of even sides.

The compiler's own code for the gradient takes ten times as long as its memory traffic. Here a window keeps which of its
nine pixels was the largest, and the gradient of four pixels is gathered from the four windows over them.
"""

# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# (Triton compiles its kernels; as Python they cannot be called)

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

_ELEMENTS = 2048  # windows times channels per program


@triton.jit
def _pool_kernel(images, pooled, choices, height, width, CHANNELS: tl.constexpr, PLACES: tl.constexpr):
    """Pools PLACES windows of one row."""
    row, rows = tl.program_id(0), height // 2
    h, w = row % rows, tl.program_id(1) * PLACES + tl.arange(0, PLACES)[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    images += (row // rows).to(tl.int64) * height * width * CHANNELS
    here = w < width // 2
    best = tl.full((PLACES, CHANNELS), float("-inf"), tl.float32)
    choice = tl.full((PLACES, CHANNELS), 4, tl.int8)
    for place in tl.static_range(9):
        y, x = 2 * h - 1 + place // 3, 2 * w - 1 + place % 3
        inside = here & (y >= 0) & (x >= 0)  # the sides are even: no window passes the other ends
        value = tl.load(images + (y * width + x) * CHANNELS + channel, mask=inside, other=float("-inf")).to(tl.float32)
        larger = (value > best) | (value != value)
        best, choice = tl.where(larger, value, best), tl.where(larger, place, choice).to(tl.int8)
    out = (row.to(tl.int64) * (width // 2) + w) * CHANNELS + channel
    tl.store(pooled + out, best, mask=here)
    tl.store(choices + out, choice, mask=here)


@triton.jit
def _window_gradient(grads, choices, h, w, channel, height, width, CHANNELS: tl.constexpr):
    """The gradients and choices of windows; those outside of the image have chosen no pixel."""
    inside = (h < height) & (w < width)
    offset = (h * width + w) * CHANNELS + channel
    grad = tl.load(grads + offset, mask=inside, other=0.0).to(tl.float32)
    return grad, tl.load(choices + offset, mask=inside, other=9)


@triton.jit
def _gradient_kernel(grads, choices, out, height, width, CHANNELS: tl.constexpr, PLACES: tl.constexpr):
    """Gathers the gradients of PLACES squares of four pixels in one row of squares."""
    row = tl.program_id(0)
    h, w = row % height, tl.program_id(1) * PLACES + tl.arange(0, PLACES)[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    first = (row // height).to(tl.int64) * height * width * CHANNELS
    grads, choices, out = grads + first, choices + first, out + 4 * first
    here, here_at = _window_gradient(grads, choices, h, w, channel, height, width, CHANNELS)
    right, right_at = _window_gradient(grads, choices, h, w + 1, channel, height, width, CHANNELS)
    below, below_at = _window_gradient(grads, choices, h + 1, w, channel, height, width, CHANNELS)
    both, both_at = _window_gradient(grads, choices, h + 1, w + 1, channel, height, width, CHANNELS)
    pixel = out + (4 * h * width + 2 * w) * CHANNELS + channel
    inside = w < width
    tl.store(pixel, tl.where(here_at == 4, here, 0.0), mask=inside)
    value = tl.where(here_at == 5, here, 0.0) + tl.where(right_at == 3, right, 0.0)
    tl.store(pixel + CHANNELS, value, mask=inside)
    pixel += 2 * width * CHANNELS
    value = tl.where(here_at == 7, here, 0.0) + tl.where(below_at == 1, below, 0.0)
    tl.store(pixel, value, mask=inside)
    value = tl.where(here_at == 8, here, 0.0) + tl.where(right_at == 6, right, 0.0)
    value += tl.where(below_at == 2, below, 0.0) + tl.where(both_at == 0, both, 0.0)
    tl.store(pixel + CHANNELS, value, mask=inside)


@torch.library.custom_op("tutti::max_pool", mutates_args=())
def max_pool(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the largest pixels of windows, and which of the nine each is."""
    images = images.contiguous(memory_format=torch.channels_last)
    batch, channels, height, width = images.shape
    pooled, choices = _make_results(images)
    places = max(1, _ELEMENTS // channels)
    grid = (batch * (height // 2), triton.cdiv(width // 2, places))
    _pool_kernel[grid](images, pooled, choices, height, width, CHANNELS=channels, PLACES=places)  # pyright: ignore
    return pooled, choices


@max_pool.register_fake
def _make_results(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    pooled = _empty(images, images.shape[2] // 2, images.shape[3] // 2)
    return pooled, torch.empty_like(pooled, dtype=torch.int8)


@torch.library.custom_op("tutti::max_pool_backward", mutates_args=())
def max_pool_backward(grad: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of the images."""
    grad = grad.contiguous(memory_format=torch.channels_last)
    batch, channels, height, width = grad.shape
    out = _make_gradient(grad, choices)
    places = max(1, _ELEMENTS // channels)
    grid = (batch * height, triton.cdiv(width, places))
    _gradient_kernel[grid](grad, choices, out, height, width, CHANNELS=channels, PLACES=places)  # pyright: ignore
    return out


@max_pool_backward.register_fake
def _make_gradient(grad: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    return _empty(grad, 2 * grad.shape[2], 2 * grad.shape[3])


def _empty(like: torch.Tensor, height: int, width: int) -> torch.Tensor:
    shape = (*like.shape[:2], height, width)
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _save(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[torch.Tensor], output: tuple[torch.Tensor, ...]
) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor, _: None) -> torch.Tensor:
    (choices,) = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue]
    return torch.ops.tutti.max_pool_backward(grad, choices)


max_pool.register_autograd(_backward, setup_context=_save)
