"""Triton kernels of 3-D convolutions with kernel 4, stride 2 and padding 1, channels innermost, for GPUs with TMA.

Of a large volume L (B x 2D x 2H x 2W x C), a small one S (B x D x H x W x O) and a weight W (O x 4 x 4 x 4 x C), three
products give all passes of a convolution that halves a volume and of a transposed one that doubles it:

- gather:  S[i, o] = sum over taps t and channels c of L[2 i + t - 1, c] W[o, t, c]
- scatter: its transpose, L[2 i + t - 1, c] = sum over t and o of S[i, o] W[o, t, c]
- weight:  W[o, t, c] = sum over positions i of S[i, o] L[2 i + t - 1, c]

A cell 2 i + t - 1 of L is the cell i + shift of one of two parities. A descriptor of L has the positions i as its
dimensions and the parities as offsets along the innermost one. The hardware then reads any tap of a box of positions as
one block, with zeros outside of the volume.

A tap of few channels is too small a block. A volume with few channels is therefore folded first (`strided.fold`): the
taps of a window along the height lie beside each other as channels, and those along the width follow, so that a tap
along the depth is one block.
"""

# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportAssignmentType=false
# (Triton compiles its kernels; as Python they cannot be called)

import math
from typing import NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from triton.tools.tensor_descriptor import TensorDescriptor  # pyright: ignore[reportMissingImports]


class Tiling(NamedTuple):
    """How a kernel divides its work."""

    channels: int  # of a tile of the result; of S, where the result is a weight
    positions: int  # of a tile of the result, or of one step where the sum is over positions
    depth: int = 64  # channels of one step of the sum
    warps: int = 8
    stages: int = 4
    splits: int = 1  # parts of a sum over positions


@triton.jit
def _corner(tile, DEPTH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BOX: tl.constexpr):
    """The first sample and cell of a box of positions."""
    w = tile % (WIDTH // BOX[3]) * BOX[3]
    tile //= WIDTH // BOX[3]
    h = tile % (HEIGHT // BOX[2]) * BOX[2]
    tile //= HEIGHT // BOX[2]
    return tile // (DEPTH // BOX[1]) * BOX[0], tile % (DEPTH // BOX[1]) * BOX[1], h, w


@triton.jit
def _gather_kernel(
    large,
    weight,
    small,
    bias,
    slope,
    DEPTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    OUT: tl.constexpr,
    BOX: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    FOLDED: tl.constexpr,
):
    """One tile of S; its transpose is accumulated, so that blocks of L are operands in shared memory."""
    POSITIONS: tl.constexpr = BOX[0] * BOX[1] * BOX[2] * BOX[3]
    ROW: tl.constexpr = 2 * WIDTH * CHANNELS
    PLANE: tl.constexpr = HEIGHT * (2 * WIDTH + 2) * (CHANNELS // 4)  # of a folded volume
    BLOCKS: tl.constexpr = CHANNELS // STEP
    TAPS: tl.constexpr = 4 if FOLDED else 64
    number = tl.program_id(0)
    o, tile = number % (OUT // TILE) * TILE, number // (OUT // TILE)
    b, d, h, w = _corner(tile, DEPTH, HEIGHT, WIDTH, BOX)
    total = tl.full((TILE, POSITIONS), 0.0, tl.float32)
    for k in tl.range(TAPS * BLOCKS, num_stages=STAGES):
        tap = k // BLOCKS
        if FOLDED:
            cells = large.load([b, d + tap // 2, h, w, tap % 2 * PLANE + k % BLOCKS * STEP])
        else:
            z, y, x = tap // 16 + 1, tap // 4 % 4 + 1, tap % 4 + 1
            offset = z % 2 * (2 * HEIGHT * ROW) + y % 2 * ROW + x % 2 * CHANNELS + k % BLOCKS * STEP
            cells = large.load([b, d + z // 2 - 1, h + y // 2 - 1, w + x // 2 - 1, offset])
        factors = weight.load([o, k * STEP])
        total = tl.dot(factors, tl.reshape(cells, (POSITIONS, STEP)).T, total)
    if bias is not None:
        total += tl.load(bias + o + tl.arange(0, TILE)).to(tl.float32)[:, None]
    total = tl.where(total > 0, total, total * slope)
    small.store([tile * POSITIONS, o], total.T.to(small.dtype))


@triton.jit
def _reaching(number, odd):
    """Along an axis, one of two cells of S that reach a cell of L of this parity: its relative place, and the tap."""
    return number * (2 * odd - 1), 1 + odd + 2 * number * (1 - 2 * odd)


@triton.jit
def _scatter_kernel(
    small,
    weight,
    large,
    bias,
    slope,
    DEPTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    IN: tl.constexpr,
    BOX: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The cells of L of given parities over a box of S."""
    POSITIONS: tl.constexpr = BOX[0] * BOX[1] * BOX[2] * BOX[3]
    ROW: tl.constexpr = 2 * WIDTH * CHANNELS
    BLOCKS: tl.constexpr = IN // STEP
    number = tl.program_id(0)
    odd_d, odd_h, odd_w = number // 4 % 2, number // 2 % 2, number % 2
    number //= 8
    c, tile = number % (CHANNELS // TILE) * TILE, number // (CHANNELS // TILE)
    b, d, h, w = _corner(tile, DEPTH, HEIGHT, WIDTH, BOX)
    total = tl.full((TILE, POSITIONS), 0.0, tl.float32)
    for k in tl.range(8 * BLOCKS, num_stages=STAGES):
        z, tap_d = _reaching(k // BLOCKS // 4, odd_d)
        y, tap_h = _reaching(k // BLOCKS // 2 % 2, odd_h)
        x, tap_w = _reaching(k // BLOCKS % 2, odd_w)
        o = k % BLOCKS * STEP
        cells = small.load([b, d + z, h + y, w + x, o])
        factors = weight.load([o, (tap_d * 16 + tap_h * 4 + tap_w) * CHANNELS + c])
        total = tl.dot(factors.T, tl.reshape(cells, (POSITIONS, STEP)).T, total)
    if bias is not None:
        total += tl.load(bias + c + tl.arange(0, TILE)).to(tl.float32)[:, None]
    total = tl.where(total > 0, total, total * slope)
    offset = odd_d * (2 * HEIGHT * ROW) + odd_h * ROW + odd_w * CHANNELS + c
    BLOCK: tl.constexpr = (BOX[0], BOX[1], BOX[2], BOX[3], TILE)
    large.store([b, d, h, w, offset], tl.reshape(total.T.to(large.dtype), BLOCK))


@triton.jit
def _add(one, other):
    return one + other


@triton.jit
def _weight_kernel(
    small,
    large,
    parts,
    sums,
    DEPTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    OUT: tl.constexpr,
    BOX: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    FOLDED: tl.constexpr,
):
    """Four taps along the width, summed over STEPS boxes of positions.

    Of a folded volume, the four taps along the depth, and the sums of the small volume.
    """
    POSITIONS: tl.constexpr = BOX[0] * BOX[1] * BOX[2] * BOX[3]
    ROW: tl.constexpr = 2 * WIDTH * CHANNELS
    PLANE: tl.constexpr = HEIGHT * (2 * WIDTH + 2) * (CHANNELS // 4)  # of a folded volume
    QUARTETS: tl.constexpr = 1 if FOLDED else 16
    number = tl.program_id(0)
    quartet = number % QUARTETS
    z, y = quartet // 4 + 1, quartet % 4 + 1
    number //= QUARTETS
    c, number = number % (CHANNELS // WIDE) * WIDE, number // (CHANNELS // WIDE)
    o, part = number % (OUT // TILE) * TILE, number // (OUT // TILE)
    offset = z % 2 * (2 * HEIGHT * ROW) + y % 2 * ROW + c
    first = tl.full((TILE, WIDE), 0.0, tl.float32)
    second = tl.full((TILE, WIDE), 0.0, tl.float32)
    third = tl.full((TILE, WIDE), 0.0, tl.float32)
    fourth = tl.full((TILE, WIDE), 0.0, tl.float32)
    total = tl.full((POSITIONS, TILE), 0.0, tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        tile = part * STEPS + step
        b, d, h, w = _corner(tile, DEPTH, HEIGHT, WIDTH, BOX)
        rows = small.load([tile * POSITIONS, o])
        factors = rows.T
        if FOLDED:
            total += rows.to(tl.float32)
            cells = large.load([b, d, h, w, c])
            first = tl.dot(factors, tl.reshape(cells, (POSITIONS, WIDE)), first)
            cells = large.load([b, d, h, w, PLANE + c])
            second = tl.dot(factors, tl.reshape(cells, (POSITIONS, WIDE)), second)
            cells = large.load([b, d + 1, h, w, c])
            third = tl.dot(factors, tl.reshape(cells, (POSITIONS, WIDE)), third)
            cells = large.load([b, d + 1, h, w, PLANE + c])
            fourth = tl.dot(factors, tl.reshape(cells, (POSITIONS, WIDE)), fourth)
        else:
            d, h = d + z // 2 - 1, h + y // 2 - 1
            cells = large.load([b, d, h, w - 1, offset + CHANNELS])
            first = tl.dot(factors, tl.reshape(cells, (POSITIONS, WIDE)), first)
            cells = large.load([b, d, h, w, offset])
            second = tl.dot(factors, tl.reshape(cells, (POSITIONS, WIDE)), second)
            cells = large.load([b, d, h, w, offset + CHANNELS])
            third = tl.dot(factors, tl.reshape(cells, (POSITIONS, WIDE)), third)
            cells = large.load([b, d, h, w + 1, offset])
            fourth = tl.dot(factors, tl.reshape(cells, (POSITIONS, WIDE)), fourth)
    row = (part * OUT + o).to(tl.int64) + tl.arange(0, TILE)[:, None]
    out = parts + row * (4 * QUARTETS * CHANNELS) + quartet * 4 * CHANNELS + c + tl.arange(0, WIDE)[None, :]
    tl.store(out, first)
    tl.store(out + CHANNELS, second)
    tl.store(out + 2 * CHANNELS, third)
    tl.store(out + 3 * CHANNELS, fourth)
    if FOLDED:
        tl.store(sums + part * OUT + o + tl.arange(0, TILE), tl.reduce(total, 0, _add))


def _box(shape: tuple[int, ...], positions: int) -> tuple[int, int, int, int]:
    """The samples, depth, height and width of a box of positions that are neighbours in memory."""
    box = []
    for size in reversed(shape[1:]):
        box.append(min(size, positions))
        positions //= box[-1]
    return positions, *reversed(box)  # pyright: ignore[reportReturnType]


def _describe_large(large: torch.Tensor, box: tuple[int, ...], channels: int) -> TensorDescriptor:
    """Every second cell of a large volume, from any of the first eight."""
    batch, depth, height, width, count = large.shape
    row = width * count
    shape = [batch, depth // 2, height // 2, width // 2, height * row + row + 2 * count]
    strides = [depth * height * row, 2 * height * row, 2 * row, 2 * count, 1]
    return TensorDescriptor(large, shape, strides, [*box, channels])


def _describe_folded(folded: torch.Tensor, box: tuple[int, ...], channels: int) -> TensorDescriptor:
    """Four cells along the width at every second place of a folded volume, from either of its first two planes."""
    batch, depth, height, width, count = folded.shape
    row = width * count
    shape = [batch, depth // 2, height, width // 2 - 1, height * row + 4 * count]
    strides = [depth * height * row, 2 * height * row, row, 2 * count, 1]
    return TensorDescriptor(folded, shape, strides, [*box, channels])


def _describe_small(small: torch.Tensor, box: tuple[int, ...], channels: int) -> TensorDescriptor:
    strides = [math.prod(small.shape[dim + 1 :]) for dim in range(5)]
    return TensorDescriptor(small, list(small.shape), strides, [*box, channels])


def _matrix(tensor: torch.Tensor, rows: int, columns: int, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(tensor, [rows, columns], [columns, 1], block)


def positions_of(large: torch.Tensor, folded: bool) -> tuple[int, int, int, int]:
    """The samples, depth, height and width of the small volume that belongs to a large one."""
    batch, depth, height, width, _ = large.shape
    return (batch, depth // 2 - 1, height, width // 2 - 1) if folded else (batch, depth // 2, height // 2, width // 2)


def gather(
    large: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    slope: float,
    tiling: Tiling,
    folded: bool = False,
) -> torch.Tensor:
    """S from B x 2D x 2H x 2W x C and O x 4 x 4 x 4 x C; or from a folded volume and O x 4 x 16 C."""
    shape, channels = positions_of(large, folded), weight.shape[-1]
    out, columns = len(weight), weight[0].numel()
    small = large.new_empty(*shape, out)
    box = _box(shape, tiling.positions)
    describe = _describe_folded if folded else _describe_large
    grid = (math.ceil(shape[0] / box[0]) * math.prod(shape[1:]) // math.prod(box[1:]) * (out // tiling.channels),)
    _gather_kernel[grid](  # pyright: ignore[reportIndexIssue]
        describe(large, box, tiling.depth),
        _matrix(weight, out, columns, [tiling.channels, tiling.depth]),
        _matrix(small, math.prod(shape), out, [tiling.positions, tiling.channels]),
        bias,
        slope,
        *shape[1:],
        CHANNELS=channels,
        OUT=out,
        BOX=box,
        TILE=tiling.channels,
        STEP=tiling.depth,
        STAGES=tiling.stages,
        FOLDED=folded,
        num_warps=tiling.warps,
    )
    return small


def scatter(
    small: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slope: float, tiling: Tiling
) -> torch.Tensor:
    """L from B x D x H x W x O and O x 4 x 4 x 4 x C."""
    batch, *sizes, count = small.shape
    channels = weight.shape[-1]
    large = small.new_empty(batch, *(2 * size for size in sizes), channels)
    box = _box((batch, *sizes), tiling.positions)
    grid = (8 * math.ceil(batch / box[0]) * math.prod(sizes) // math.prod(box[1:]) * (channels // tiling.channels),)
    _scatter_kernel[grid](  # pyright: ignore[reportIndexIssue]
        _describe_small(small, box, tiling.depth),
        _matrix(weight, count, 64 * channels, [tiling.depth, tiling.channels]),
        _describe_large(large, box, tiling.channels),
        bias,
        slope,
        *sizes,
        CHANNELS=channels,
        IN=count,
        BOX=box,
        TILE=tiling.channels,
        STEP=tiling.depth,
        STAGES=tiling.stages,
        num_warps=tiling.warps,
    )
    return large


def weight_gradient(
    small: torch.Tensor, large: torch.Tensor, tiling: Tiling, sums: torch.Tensor | None = None
) -> torch.Tensor:
    """W from B x D x H x W x O and B x 2D x 2H x 2W x C; or O x 4 x 16 C from a folded volume.

    With a folded volume belong `sums`, parts x O, which is filled with parts of the sums of the small volume.
    """
    folded = sums is not None
    batch, *sizes, out = small.shape
    channels = 4 * large.shape[-1] if folded else large.shape[-1]
    wide = 64
    parts = large.new_empty(tiling.splits, out, *([4] if folded else [4, 4, 4]), channels, dtype=torch.float32)
    box = _box((batch, *sizes), tiling.positions)
    describe = _describe_folded if folded else _describe_large
    boxes = math.ceil(batch / box[0]) * math.prod(sizes) // math.prod(box[1:])
    grid = ((1 if folded else 16) * (channels // wide) * (out // tiling.channels) * tiling.splits,)
    _weight_kernel[grid](  # pyright: ignore[reportIndexIssue]
        _matrix(small, batch * math.prod(sizes), out, [tiling.positions, tiling.channels]),
        describe(large, box, wide),
        parts,
        sums,
        *sizes,
        CHANNELS=channels,
        OUT=out,
        BOX=box,
        TILE=tiling.channels,
        WIDE=wide,
        STEPS=math.ceil(boxes / tiling.splits),
        STAGES=tiling.stages,
        FOLDED=folded,
        num_warps=tiling.warps,
    )
    return parts.sum(0).to(large.dtype)
