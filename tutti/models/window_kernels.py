"""A Triton kernel that lays out the windows of volumes with few channels, faster than compiled code.

The rows of a matrix, (B D H W) x (C 64), are the 4 x 4 x 4 windows with stride 2 of a B x C x 2D x 2H x 2W volume. The
channels come before the taps, as in the weight of a transposed convolution. Beside them come sums over the cells of
each channel, the gradient of a bias: the inner taps of all windows are every cell once.
"""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

_TAPS = 64
_LINES = 4  # rows of windows per program


@triton.jit
def _windows_kernel(volume, rows, sums, channels, depth, height, width, LINES: tl.constexpr, PLACES: tl.constexpr):
    """Copies the windows of LINES rows in one channel, four neighbours along x at a time."""
    plane, channel = tl.program_id(0), tl.program_id(1)
    d = plane % depth
    number = (plane // depth).to(tl.int64) * channels + channel
    volume += number * (8 * depth * height * width)  # from here on, offsets fit in 32 bits
    rows += (plane.to(tl.int64) * height * width * channels + channel) * 64
    cell, tap = tl.arange(0, LINES * PLACES)[:, None], tl.arange(0, 16)[None, :]
    h, w = tl.program_id(2) * LINES + cell // PLACES, cell % PLACES
    z, y = 2 * d + tap // 4 - 1, 2 * h + tap % 4 - 1
    here = (h < height) & (w < width)
    inside = here & (z >= 0) & (z < 2 * depth) & (y >= 0) & (y < 2 * height)
    place = volume + (z * 2 * height + y) * 2 * width + 2 * w
    first = tl.load(place - 1, mask=inside & (w > 0), other=0.0)
    second = tl.load(place, mask=inside, other=0.0)
    third = tl.load(place + 1, mask=inside, other=0.0)
    fourth = tl.load(place + 2, mask=inside & (w < width - 1), other=0.0)
    value = tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))
    out = rows + (h * width + w) * (channels * 64) + tl.arange(0, 64)[None, :]
    tl.store(out, value, mask=here)
    # Of the four neighbours the second and the third are inner ones; outside of the volume they are zero.
    is_inner = (tap // 4 % 3 > 0) & (tap % 4 % 3 > 0)
    total = tl.sum(tl.where(is_inner, second.to(tl.float32) + third.to(tl.float32), 0.0))
    tl.store(sums + (plane * tl.num_programs(2) + tl.program_id(2)) * channels + channel, total)


@torch.library.custom_op("tutti::windows_first", mutates_args=())
def windows_first(volume: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the windows of a volume as rows of a matrix, and parts of the sums over its cells."""
    volume = volume.contiguous()
    rows, sums = _make_results(volume)
    batch, channels, depth, height, width = volume.shape
    depth, height, width = depth // 2, height // 2, width // 2
    grid = (batch * depth, channels, _blocks(height))
    sizes = (channels, depth, height, width)
    _windows_kernel[grid](volume, rows, sums, *sizes, LINES=_LINES, PLACES=triton.next_power_of_2(width))  # pyright: ignore
    return rows, sums


@windows_first.register_fake
def _make_results(volume: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, channels, depth, height, width = volume.shape
    rows = volume.new_empty(batch * (depth // 2) * (height // 2) * (width // 2), channels * _TAPS)
    return rows, volume.new_empty(batch * (depth // 2) * _blocks(height // 2), channels, dtype=torch.float32)


def _blocks(height: int) -> int:
    return -(-height // _LINES)
