"""A GPU kernel for the windows of volumes with few channels, for which compiled code spends its time on indices."""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

_TAPS = 64


@triton.jit
def _windows_kernel(volume, rows, channels, depth, height, width, PLACES: tl.constexpr, TAPS: tl.constexpr):
    """The windows of one line of cells in one channel."""
    line, channel = tl.program_id(0), tl.program_id(1)
    h, d = line % height, line // height % depth
    number = (line // (height * depth)).to(tl.int64) * channels + channel
    volume += number * (8 * depth * height * width)  # from here on, places fit in 32 bits
    rows += (line.to(tl.int64) * width * channels + channel) * TAPS
    cell, tap = tl.arange(0, PLACES)[:, None], tl.arange(0, TAPS)[None, :]
    z, y, x = 2 * d + tap // 16 - 1, 2 * h + tap // 4 % 4 - 1, 2 * cell + tap % 4 - 1
    inside = (z >= 0) & (z < 2 * depth) & (y >= 0) & (y < 2 * height) & (x >= 0) & (x < 2 * width) & (cell < width)
    value = tl.load(volume + (z * 2 * height + y) * 2 * width + x, mask=inside, other=0.0)
    tl.store(rows + cell * (channels * TAPS) + tap, value, mask=cell < width)


@torch.library.custom_op("tutti::windows_first", mutates_args=())
def windows_first(volume: torch.Tensor) -> torch.Tensor:
    """The 4 x 4 x 4 windows of B x C x 2D x 2H x 2W as the rows of a matrix, (B D H W) x (C 64).

    The channels come before the taps, as they do in the weight of a transposed convolution.
    """
    volume = volume.contiguous()
    batch, channels, depth, height, width = volume.shape
    depth, height, width = depth // 2, height // 2, width // 2
    rows = volume.new_empty(batch * depth * height * width, channels * _TAPS)
    grid = (batch * depth * height, channels)
    places = triton.next_power_of_2(width)
    _windows_kernel[grid](volume, rows, channels, depth, height, width, PLACES=places, TAPS=_TAPS)  # pyright: ignore
    return rows


@windows_first.register_fake
def _(volume: torch.Tensor) -> torch.Tensor:
    batch, channels, depth, height, width = volume.shape
    return volume.new_empty(batch * (depth // 2) * (height // 2) * (width // 2), channels * _TAPS)
