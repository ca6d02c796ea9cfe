"""Triton kernels that copy crops of a box on a GPU under their symmetries; importing this needs triton.

A program copies a block of a few cells on each side. Along whichever axis of the box a line of a crop runs, such a
block uses most of the memory sectors that it reads, and it writes whole ones.
"""

# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# (Triton compiles its kernels; as Python they cannot be called)

import math
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

_NUMBERS_BLOCK = (4, 4, 64)  # planes, lines, and numbers of a line, in which the channels of a cell are adjacent
_WORDS_BLOCK = (8, 8, 16)  # planes, lines, cells
_SIGN = 0x8000  # of a number of 16 bits


@triton.jit
def _positions(length, height, PLANES: tl.constexpr, LINES: tl.constexpr, ITEMS: tl.constexpr):
    """The planes, lines and items of this program's block, where a line of a crop has `length` items."""
    block = tl.program_id(0)
    across, down = tl.cdiv(length, ITEMS), tl.cdiv(height, LINES)
    item = (block % across * ITEMS + tl.arange(0, ITEMS))[None, None, :]
    line = (block // across % down * LINES + tl.arange(0, LINES))[None, :, None]
    plane = (block // across // down * PLANES + tl.arange(0, PLANES))[:, None, None]
    return plane, line, item


@triton.jit
def _cells(strides, sample, plane, line, cell):
    """Where cells of a crop are in the box: a first cell, and a stride along each axis of the crop."""
    along = strides + 4 * sample
    return tl.load(along) + plane * tl.load(along + 1) + line * tl.load(along + 2) + cell * tl.load(along + 3)


@triton.jit
def _copy_numbers(
    field,
    crops,
    strides,
    channels,
    samples,
    depth,
    height,
    width,
    CHANNELS: tl.constexpr,
    INDEX: tl.constexpr,
    PLANES: tl.constexpr,
    LINES: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """A block of a crop, number by number."""
    sample, length = tl.program_id(1), width * CHANNELS
    plane, line, number = _positions(length, height, PLANES, LINES, ITEMS)
    channel = number % CHANNELS
    source = tl.load(channels + sample * CHANNELS + channel)
    sign = tl.load(channels + (samples + sample) * CHANNELS + channel)
    inside = (plane < depth) & (line < height) & (number < length)
    place = _cells(strides, sample, plane, line, number // CHANNELS) * CHANNELS + source
    values = tl.load(field + place, mask=inside)
    crop = crops + sample.to(tl.int64) * depth * height * length
    tl.store(crop + (plane.to(INDEX) * height + line) * length + number, (values * sign).to(values.dtype), mask=inside)


@triton.jit
def _copy_words(
    field,
    crops,
    strides,
    channels,
    samples,
    depth,
    height,
    width,
    SIGN: tl.constexpr,
    INDEX: tl.constexpr,
    PLANES: tl.constexpr,
    LINES: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """A block of a crop, cell by cell: the four channels of a cell are one word of 64 bits."""
    sample = tl.program_id(1)
    plane, line, cell = _positions(width, height, PLANES, LINES, ITEMS)
    inside = (plane < depth) & (line < height) & (cell < width)
    words = tl.load(field + _cells(strides, sample, plane, line, cell), mask=inside)
    found = tl.zeros_like(words)
    for channel in tl.static_range(4):
        source = tl.load(channels + sample * 4 + channel)
        sign = tl.load(channels + (samples + sample) * 4 + channel)
        number = (words >> (16 * source)) & 0xFFFF
        found |= (number ^ tl.where(sign < 0, SIGN, 0)) << (16 * channel)
    crop = crops + sample.to(tl.int64) * depth * height * width
    tl.store(crop + (plane.to(INDEX) * height + line) * width + cell, found, mask=inside)


def gather(field: torch.Tensor, strides: torch.Tensor, channels: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """The same as `device_source.gather`."""
    samples, width = len(strides), field.shape[-1]
    crops = field.new_empty(samples, *sizes, width)
    tensors = strides, channels, samples, *sizes
    if width == 4 and field.itemsize == 2:
        words = field.view(torch.int64), crops.view(torch.int64)
        blocks, constants = _divide(sizes[0], sizes[1], sizes[2], _WORDS_BLOCK)
        _copy_words[blocks, samples](*words, *tensors, _SIGN, **constants, num_warps=4)
    else:
        blocks, constants = _divide(sizes[0], sizes[1], sizes[2] * width, _NUMBERS_BLOCK)
        _copy_numbers[blocks, samples](field, crops, *tensors, width, **constants, num_warps=2)
    return crops.permute(0, 4, 1, 2, 3)


def _divide(depth: int, height: int, length: int, block: tuple[int, int, int]) -> tuple[int, dict[str, Any]]:
    """The number of blocks of a crop, and the constants of a kernel: the type of its indices, and the block's size."""
    planes, lines, items = block
    sizes = depth, height, length
    blocks = math.prod(-(-size // side) for size, side in zip(sizes, block, strict=True))
    index = tl.int32 if math.prod(sizes) < 2**31 else tl.int64  # within a crop
    return blocks, {"INDEX": index, "PLANES": planes, "LINES": lines, "ITEMS": items}
