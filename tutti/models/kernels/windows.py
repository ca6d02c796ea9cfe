"""Triton kernels between volumes with few channels and their windows, which read and write memory in sequence.

The 4 x 4 x 4 windows with stride 2 of a B x C x 2D x 2H x 2W volume are a matrix of C 64 x B D H W: a row has one tap
of all windows in one channel. Cells that are neighbours along the width are neighbours in a row.
"""

# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# (Triton compiles its kernels; as Python they cannot be called)

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

_TAPS = 64
_CELLS = 1024  # places of a program that adds windows
_PAIRS = 128  # pairs of windows of a program that writes them: one a thread
_WORDS = {
    torch.bfloat16: (torch.int32, tl.bfloat16),
    torch.float16: (torch.int32, tl.float16),
    torch.float32: (torch.int64, tl.float32),
}


@triton.jit
def _add(one, other):
    return one + other


@triton.jit
def _first(word, BITS: tl.constexpr):
    """The first of the two numbers of a word, as bits."""
    return word & ((1 << BITS) - 1)


@triton.jit
def _second(word, BITS: tl.constexpr):
    return _first(word >> BITS, BITS)


@triton.jit
def _as_numbers(bits, DTYPE: tl.constexpr, BITS: tl.constexpr):
    whole = bits.to(tl.int16) if BITS == 16 else bits.to(tl.int32)
    return whole.to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _windows_kernel(
    volume,
    rows,
    sums,
    channels,
    depth,
    height,
    half,
    DTYPE: tl.constexpr,
    BITS: tl.constexpr,
    LINES: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The taps at one depth of the windows of LINES lines, in one channel; and the sum of their inner cells.

    Volume and rows are words of two numbers, and a thread has two windows beside each other: what it reads and writes
    are whole words, although windows begin at odd cells.
    """
    plane, tap_d, channel = tl.program_id(0) // 4, tl.program_id(0) % 4, tl.program_id(1)
    batch, z = plane // depth, 2 * (plane % depth) + tap_d - 1
    words = (tl.num_programs(0) // 4 * height * half).to(tl.int64)  # of a row
    rows += (channel * 64 + tap_d * 16) * words + plane.to(tl.int64) * height * half
    volume += (batch.to(tl.int64) * channels + channel) * (8 * depth * height * half)
    pair = tl.arange(0, PAIRS)[None, :]
    h = tl.program_id(2) * LINES + tl.arange(0, LINES)[:, None]
    here = (h < height) & (pair < half)
    total = tl.full((LINES, PAIRS), 0.0, tl.float32)
    for tap_h in tl.static_range(4):
        y = 2 * h + tap_h - 1
        inside = here & (y >= 0) & (y < 2 * height) & (z >= 0) & (z < 2 * depth)
        place = volume + (z * 2 * height + y) * (2 * half) + 2 * pair
        before = tl.load(place - 1, mask=inside & (pair > 0), other=0)
        one = tl.load(place, mask=inside, other=0)
        two = tl.load(place + 1, mask=inside, other=0)
        after = tl.load(place + 2, mask=inside & (pair < half - 1), other=0)
        out = rows + tap_h * 4 * words + h * half + pair
        tl.store(out, _second(before, BITS) | (_second(one, BITS) << BITS), mask=here)
        tl.store(out + words, _first(one, BITS) | (_first(two, BITS) << BITS), mask=here)
        tl.store(out + 2 * words, _second(one, BITS) | (_second(two, BITS) << BITS), mask=here)
        tl.store(out + 3 * words, _first(two, BITS) | (_first(after, BITS) << BITS), mask=here)
        if tap_h == 1 or tap_h == 2:  # inner taps of all windows are every cell once
            total += _as_numbers(_first(one, BITS), DTYPE, BITS) + _as_numbers(_second(one, BITS), DTYPE, BITS)
            total += _as_numbers(_first(two, BITS), DTYPE, BITS) + _as_numbers(_second(two, BITS), DTYPE, BITS)
    sum = tl.where((tap_d == 1) | (tap_d == 2), tl.reduce(total, None, _add), 0.0)
    tl.store(sums + (tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)) * channels + channel, sum)


@triton.jit
def _reaching(number, odd):
    """Along an axis, one of two windows over a cell of this parity: its relative place, and the tap."""
    return number * (2 * odd - 1), 1 + odd + 2 * number * (1 - 2 * odd)


@triton.jit
def _overlap_add_kernel(rows, bias, volume, channels, depth, height, width, LINES: tl.constexpr, PLACES: tl.constexpr):
    """The cells of LINES pairs of lines at one depth of the volume, in one channel."""
    plane, channel = tl.program_id(0), tl.program_id(1)
    batch, z = plane // (2 * depth), plane % (2 * depth)
    positions = (tl.num_programs(0) // 2 * height * width).to(tl.int64)
    rows += channel * 64 * positions + batch.to(tl.int64) * depth * height * width
    volume += ((batch.to(tl.int64) * channels + channel) * 2 * depth + z) * (4 * height * width)
    line, cell = tl.arange(0, LINES)[:, None], tl.arange(0, PLACES)[None, :]
    h = tl.program_id(2) * LINES + line
    pair = tl.arange(0, 2 * PLACES)[None, :]
    shift = tl.load(bias + channel).to(tl.float32)
    for odd_h in tl.static_range(2):
        even = tl.full((LINES, PLACES), 0.0, tl.float32)
        odd = tl.full((LINES, PLACES), 0.0, tl.float32)
        for number in tl.static_range(4):
            near_d, tap_d = _reaching(number // 2, z % 2)
            near_h, tap_h = _reaching(number % 2, odd_h)
            d, y = z // 2 + near_d, h + near_h
            inside = (y >= 0) & (y < height) & (h < height) & (cell < width) & (d >= 0) & (d < depth)
            place = rows + (tap_d * 16 + tap_h * 4) * positions + (d * height + y) * width + cell
            even += tl.load(place + positions, mask=inside, other=0.0).to(tl.float32)
            odd += tl.load(place + 2 * positions, mask=inside, other=0.0).to(tl.float32)
            even += tl.load(place + 3 * positions - 1, mask=inside & (cell > 0), other=0.0).to(tl.float32)
            odd += tl.load(place + 1, mask=inside & (cell < width - 1), other=0.0).to(tl.float32)
        cells = tl.reshape(tl.join(even, odd), (LINES, 2 * PLACES)) + shift
        out = volume + (2 * h + odd_h) * 2 * width + pair
        tl.store(out, cells.to(volume.dtype.element_ty), mask=(h < height) & (pair < 2 * width))


@torch.library.custom_op("tutti::windows_by_tap", mutates_args=())
def windows_by_tap(volume: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the windows of a volume, C 64 x B D H W with W even, and parts of the sums over the cells of channels."""
    volume = volume.contiguous()
    rows, sums = _make_results(volume)
    batch, channels, *sizes = volume.shape
    depth, height, half = sizes[0] // 2, sizes[1] // 2, sizes[2] // 4
    lines, pairs = _block(half, _PAIRS)
    word, dtype = _WORDS[volume.dtype]
    _windows_kernel[(batch * depth * 4, channels, triton.cdiv(height, lines))](  # pyright: ignore[reportIndexIssue]
        volume.view(word), rows.view(word), sums, channels, depth, height, half,
        DTYPE=dtype, BITS=8 * volume.itemsize, LINES=lines, PAIRS=pairs,
    )  # fmt: skip
    return rows, sums


@windows_by_tap.register_fake
def _make_results(volume: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, channels, depth, height, width = volume.shape
    rows = volume.new_empty(channels * _TAPS, batch * (depth // 2) * (height // 2) * (width // 2))
    parts = batch * (depth // 2) * 4 * -(-(height // 2) // _block(width // 4, _PAIRS)[0])
    return rows, volume.new_empty(parts, channels, dtype=torch.float32)


@torch.library.custom_op("tutti::overlap_add", mutates_args=())
def overlap_add(rows: torch.Tensor, bias: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """The transpose of `windows_by_tap`, plus a bias: C 64 x B D H W, with these sizes, to B x C x 2D x 2H x 2W."""
    volume = _make_volume(rows, bias, sizes)
    batch, depth, height, width = sizes
    lines, places = _block(width, _CELLS)
    grid = (batch * 2 * depth, len(bias), triton.cdiv(height, lines))
    _overlap_add_kernel[grid](  # pyright: ignore[reportIndexIssue]
        rows.contiguous(), bias, volume, len(bias), depth, height, width, LINES=lines, PLACES=places
    )
    return volume


@overlap_add.register_fake
def _make_volume(rows: torch.Tensor, bias: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    batch, *cells = sizes
    return rows.new_empty(batch, len(bias), *(2 * size for size in cells))


def _block(width: int, size: int) -> tuple[int, int]:
    """The lines of a program and the places in a line, each a power of two, together about a given number."""
    places = 1 << (width - 1).bit_length()
    return max(1, size // places), places
