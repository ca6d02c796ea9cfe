"""Operators over windows of cells on parts: convolutions, pooling, padding, resampling.

Along a cut, a part is widened by the cells of its neighbours that its windows reach, and computed without padding.
Where parts do not split evenly, or are smaller than what their neighbours reach, the whole is gathered and computed by
every rank.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import tutti.models.strided  # noqa: F401 (registers the operator)
from tutti.parallel.space.marks import Parts, dims_of, mark, padding_of

Numbers = int | tuple[int, ...] | list[int]


def each(value: Any, count: int) -> list[int]:
    """One number for each dimension."""
    if isinstance(value, int):
        return [value] * count
    return list(value) * count if len(value) == 1 else list(value)


def cuts(parts: Parts, part: torch.Tensor, spatial: int) -> list[tuple[int, int, int, tuple[int, int]]]:
    """For each cut: its index, its dimension in space, its cells, and its padding that has yet to be added."""
    dims, padding = dims_of(part), padding_of(part)
    assert dims is not None
    places = [dim - (part.ndim - spatial) for dim in dims]
    if min(places, default=0) < 0:
        parts.refuse("a window", f"is over {spatial} dimensions, but the cut is along another")
    pads = padding[0] if padding is not None else ((0, 0),) * len(dims)
    return [(index, place, part.shape[dims[index]], pads[index]) for index, place in enumerate(places)]


def halo_sizes(cells: int, kernel: int, stride: int, before: int, after: int, dilation: int) -> tuple[int, int] | None:
    """How many cells windows reach below and above a part; None if the parts of the output would be uneven."""
    reach = dilation * (kernel - 1) + 1
    if cells % stride or not 0 <= before + after - reach + stride < stride:
        return None
    low, high = before, max(0, reach - stride - before)
    return (low, high) if 0 <= low <= cells and high <= cells else None


def _boundary(part: torch.Tensor) -> tuple[float, bool] | None:
    """The value beyond the ends and whether they are joined, from padding that has yet to be added."""
    padding = padding_of(part)
    return None if padding is None else (padding[1], padding[2])


def _widened(
    parts: Parts,
    part: torch.Tensor,
    spatial: int,
    kernel: list[int],
    stride: list[int],
    padding: list[tuple[int, int]],
    dilation: list[int],
    fill: float = 0.0,
) -> tuple[torch.Tensor, list[tuple[int, int]]] | None:
    """A part with what its windows reach, and the padding that is left; None where it has to be gathered."""
    boundary = _boundary(part)
    value, periodic = (fill, False) if boundary is None else boundary
    left, halos = list(padding), []
    for index, place, cells, (below, above) in cuts(parts, part, spatial):
        own = padding[place]
        if own != (0, 0) and boundary is not None and (periodic or value != fill):
            return None
        before, after = own[0] + below, own[1] + above
        found = halo_sizes(cells, kernel[place], stride[place], before, after, dilation[place])
        if found is None:
            return None
        halos.append((index, *found))
        left[place] = (0, 0)
    for index, low, high in halos:
        part = parts.widen(part, index, low, high, value, periodic)
    return part, left


def convolution(
    parts: Parts,
    func: Callable[..., torch.Tensor],
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers | str = 0,
    dilation: Numbers = 1,
    groups: int = 1,
) -> torch.Tensor:
    """A convolution of any kernel, stride, padding, dilation and groups."""
    spatial, dims = weight.ndim - 2, dims_of(input)
    kernel, strides, dilations = list(weight.shape[2:]), each(stride, spatial), each(dilation, spatial)
    if isinstance(padding, str):
        spans = [step * (size - 1) if padding == "same" else 0 for size, step in zip(kernel, dilations, strict=True)]
        pads = [(span // 2, span - span // 2) for span in spans]
    else:
        pads = [(size, size) for size in each(padding, spatial)]
    found = _widened(parts, input, spatial, kernel, strides, pads, dilations)
    if found is None:
        whole = parts.gather(input, func, "with kernel", kernel, "stride", strides, "padding", padding)
        return func(whole, weight, bias, stride, padding, dilation, groups)
    widened, left = found
    if any(low != high for low, high in left):
        widened, left = F.pad(widened, [size for pair in reversed(left) for size in pair]), [(0, 0)] * spatial
    out = func(widened, weight, bias, strides, [low for low, _ in left], dilations, groups)
    return parts.note(mark(out, dims), spatial)


def transposed(
    parts: Parts,
    func: Callable[..., torch.Tensor],
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers = 0,
    output_padding: Numbers = 0,
    groups: int = 1,
    dilation: Numbers = 1,
) -> torch.Tensor:
    """A transposed convolution; a part borrows the input cells that reach into its output."""
    spatial, dims = weight.ndim - 2, dims_of(input)
    if dims is None:
        out = func(input, weight, bias, stride, padding, output_padding, groups, dilation)
        return parts.cut_again(out, spatial)
    kernel, strides, pads = list(weight.shape[2:]), each(stride, spatial), each(padding, spatial)
    extra, dilations = each(output_padding, spatial), each(dilation, spatial)
    boundary, plan = _boundary(input) or (0.0, False), []
    for index, place, cells, (below, above) in cuts(parts, input, spatial):
        step, reach = strides[place], dilations[place] * (kernel[place] - 1) + 1
        begin = pads[place] - below * step
        low, high = (reach - 1 - begin) // step, -(-begin // step)
        grows = (below + above - 1) * step + reach - 2 * pads[place] + extra[place]
        if grows or begin < 0 or low < 0 or max(low, high) > cells:
            whole = parts.gather(input, func, "with kernel", kernel, "stride", strides, "padding", padding)
            out = func(whole, weight, bias, stride, padding, output_padding, groups, dilation)
            return parts.cut_again(out, spatial)
        total = (cells + low + high - 1) * step + reach + extra[place]
        plan.append((index, place, low, high, low * step + begin, total, cells * step))
    narrow = []
    for index, place, low, high, start, total, size in plan:
        input = parts.widen(input, index, low, high, *boundary)
        # The convolution itself cuts as far as the layer does: with more, oneDNN writes beyond its tensors.
        pads[place] = min(pads[place], start, total - start - size)
        narrow.append((dims[index], start - pads[place], size))
    out = func(input, weight, bias, strides, pads, extra, groups, dilations)
    for dim, start, size in narrow:
        out = out.narrow(dim, start, size) if start or out.shape[dim] != size else out
    return parts.note(mark(out, dims), spatial)


def strided(
    parts: Parts,
    func: Any,
    volume: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    slope: float,
    doubles: bool,
) -> torch.Tensor:
    """The opaque convolution of compiled models, with kernel 4, stride 2 and padding 1, as torch's."""
    if doubles:
        out = transposed(parts, torch.conv_transpose3d, volume, weight, bias, 2, 1)
    else:
        out = convolution(parts, torch.conv3d, volume, weight, bias, 2, 1)
    return out if slope == 1 else mark(F.leaky_relu(out, slope), dims_of(out))


def _ends_evenly(cells: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> bool:
    """Whether the last window is the same whether the size of the output is rounded up or down."""
    return not ceil_mode or (cells + 2 * padding - dilation * (kernel - 1) - 1) % stride == 0


def max_pool(
    parts: Parts,
    func: Callable[..., torch.Tensor],
    input: torch.Tensor,
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers = 0,
    dilation: Numbers = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> torch.Tensor:
    """Max pooling; beyond the ends of the whole is minus infinity."""
    dims, spatial = dims_of(input), POOLS[func]
    kernel, steps = each(kernel_size, spatial), each(stride or kernel_size, spatial)
    pads, dilations = each(padding, spatial), each(dilation, spatial)
    if return_indices:
        parts.refuse(func, "returns places in the whole sample")
    shape = parts.shape(input)[-spatial:]
    even = all(_ends_evenly(*row, ceil_mode) for row in zip(shape, kernel, steps, pads, dilations, strict=True))
    both = [(pad, pad) for pad in pads]
    found = _widened(parts, input, spatial, kernel, steps, both, dilations, float("-inf")) if even else None
    if found is None:
        whole = parts.gather(input, func, "with kernel", kernel, "stride", steps, "padding", padding)
        return func(whole, kernel_size, stride, padding, dilation, ceil_mode)
    widened, left = found
    out = func(widened, kernel, steps, [low for low, _ in left], dilations)
    return parts.note(mark(out, dims), spatial)


def average_pool(
    parts: Parts,
    func: Callable[..., torch.Tensor],
    input: torch.Tensor,
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> torch.Tensor:
    """Average pooling; zeros beyond the ends of the whole count as cells."""
    dims, spatial = dims_of(input), POOLS[func]
    kernel, steps, pads = each(kernel_size, spatial), each(stride or kernel_size, spatial), each(padding, spatial)
    rest = (divisor_override,) if spatial > 1 else ()
    shape, ones = parts.shape(input)[-spatial:], [1] * spatial
    even = all(_ends_evenly(*row, ceil_mode) for row in zip(shape, kernel, steps, pads, ones, strict=True))
    even = even and (count_include_pad or not any(pads))
    found = _widened(parts, input, spatial, kernel, steps, [(pad, pad) for pad in pads], ones) if even else None
    if found is None:
        whole = parts.gather(input, func, "with kernel", kernel, "stride", steps, "padding", padding)
        return func(whole, kernel_size, stride, padding, ceil_mode, count_include_pad, *rest)
    widened, left = found
    out = func(widened, kernel, steps, [low for low, _ in left], False, True, *rest)
    return parts.note(mark(out, dims), spatial)


def adaptive_pool(
    parts: Parts, func: Callable[..., torch.Tensor], input: torch.Tensor, output_size: Any, return_indices: bool = False
) -> torch.Tensor:
    """Adaptive pooling: to one cell as a mean or a maximum over parts, to more where windows lie within parts."""
    if return_indices:
        parts.refuse(func, "returns places in the whole sample")
    spatial, largest = ADAPTIVE[func]
    dims, whole_shape = dims_of(input), parts.shape(input)[-spatial:]
    assert dims is not None
    given = [output_size] * spatial if output_size is None or isinstance(output_size, int) else list(output_size)
    sizes = [own if size is None else size for own, size in zip(whole_shape, given, strict=True)]
    places = [dim - (input.ndim - spatial) for dim in dims]
    if all(sizes[place] == 1 for place in places):
        return _pool_all(parts, func, input, sizes, largest)
    for index, place in enumerate(places):
        if sizes[place] % parts.degrees[index] or whole_shape[place] % sizes[place]:
            return func(parts.gather(input, func, "to", sizes), output_size)
    for index, place in enumerate(places):
        sizes[place] //= parts.degrees[index]
    return parts.note(mark(func(input, sizes), dims), spatial)


def _pool_all(
    parts: Parts, func: Callable[..., torch.Tensor], input: torch.Tensor, sizes: list[int], largest: bool
) -> torch.Tensor:
    """Pooling to one cell along each cut: whole on every rank."""
    local, dims = func(input, sizes), dims_of(input)
    assert dims is not None
    if not largest:
        return parts.sum(local) / parts.grid.size
    return parts.gather(mark(local, dims)).amax(dims, keepdim=True)


def pad(
    parts: Parts,
    func: Callable[..., torch.Tensor],
    input: torch.Tensor,
    pad: list[int] | tuple[int, ...],
    mode: str = "constant",
    value: float | None = None,
) -> torch.Tensor:
    """Padding: along a cut it is left to the next layer, which exchanges it with its halo."""
    parts.note_unseen("pad")
    dims = dims_of(input)
    assert dims is not None
    sizes = {input.ndim - 1 - place // 2: (pad[place], pad[place + 1]) for place in range(0, len(pad), 2)}
    along = tuple(sizes.get(dim, (0, 0)) for dim in dims)
    if not any(map(any, along)):
        return mark(func(input, pad, mode, value), dims)
    if mode not in ("constant", "circular") or any(size < 0 for pair in along for size in pair):
        whole = parts.gather(input, func, "of", list(pad), "with mode", mode)
        return func(whole, pad, mode, value)
    for dim, pair in sizes.items():
        if dim not in dims and any(pair):
            input = _pad_one(input, dim, pair, mode, value or 0.0)
    input = mark(input.view_as(input), dims)
    input.tutti_padding = (along, float(value or 0.0), mode == "circular")  # pyright: ignore[reportAttributeAccessIssue]
    return input


def _pad_one(tensor: torch.Tensor, dim: int, pair: tuple[int, int], mode: str, value: float) -> torch.Tensor:
    """Padding along a dimension that is not cut."""
    low, high = pair
    size = tensor.shape[dim]
    if mode == "circular":
        return torch.cat([tensor.narrow(dim, size - low, low), tensor, tensor.narrow(dim, 0, high)], dim)
    pads = [0, 0] * (tensor.ndim - 1 - dim) + [low, high]
    return F.pad(tensor, pads, "constant", value)


def interpolate(
    parts: Parts,
    func: Callable[..., torch.Tensor],
    input: torch.Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> torch.Tensor:
    """Resampling: by whole factors to the nearest cell on parts, else of the whole."""
    spatial, dims = input.ndim - 2, dims_of(input)
    more = (mode, align_corners, recompute_scale_factor, antialias)
    if dims is None:
        return parts.cut_again(func(input, size, scale_factor, *more), spatial)
    whole_shape = parts.shape(input)[2:]
    if size is None:
        factors = [scale_factor] * spatial if isinstance(scale_factor, int | float) else list(scale_factor)
        wanted = [int(cells * factor) for cells, factor in zip(whole_shape, factors, strict=True)]
    else:
        wanted = [size] * spatial if isinstance(size, int) else list(size)
    exact = mode == "nearest" and all(
        _is_factor(input.shape[2 + place], whole, new)
        for place, (whole, new) in enumerate(zip(whole_shape, wanted, strict=True))
    )
    if not exact:
        out = func(parts.gather(input, func, "to", wanted, "with mode", mode), size, scale_factor, *more)
        return parts.cut_again(out, spatial)
    sizes = [cells * new // whole for cells, whole, new in zip(input.shape[2:], whole_shape, wanted, strict=True)]
    return parts.note(mark(func(input, sizes, None, mode), dims), spatial)


def _is_factor(cells: int, whole: int, new: int) -> bool:
    """Whether a part of this many cells grows or shrinks by a whole number with its whole."""
    return new % whole == 0 or (whole % new == 0 and cells % (whole // new) == 0)


def shuffle(parts: Parts, func: Callable[..., torch.Tensor], input: torch.Tensor, factor: int) -> torch.Tensor:
    """Pixel shuffle, which moves channels into blocks of cells and stays within parts, and its inverse."""
    dims = dims_of(input)
    assert dims is not None
    if func is torch.pixel_unshuffle and any(input.shape[dim] % factor for dim in dims):
        return func(parts.gather(input, func), factor)
    if min(dims) < input.ndim - 2:
        parts.refuse(func)
    return parts.note(mark(func(input, factor), dims), 2)


# A whole tensor that one of these brings to the size of a level in parts is cut again.
GROWS = (*(getattr(torch, f"conv_transpose{n}d") for n in (1, 2, 3)), F.interpolate)
_MAX_POOLS = {getattr(F, f"max_pool{n}d"): n for n in (1, 2, 3)}
_AVERAGE_POOLS = {getattr(F, f"avg_pool{n}d"): n for n in (1, 2, 3)}
POOLS = _MAX_POOLS | _AVERAGE_POOLS  # dimensions in space
ADAPTIVE = {  # dimensions in space, and whether the largest value is taken
    **{getattr(F, f"adaptive_avg_pool{n}d"): (n, False) for n in (1, 2, 3)},
    **{getattr(F, f"adaptive_max_pool{n}d"): (n, True) for n in (1, 2, 3)},
    torch.adaptive_avg_pool1d: (1, False),
}
OPERATORS: dict[Any, Callable[..., Any]] = {
    **{getattr(torch, f"conv{n}d"): convolution for n in (1, 2, 3)},
    **{getattr(torch, f"conv_transpose{n}d"): transposed for n in (1, 2, 3)},
    **dict.fromkeys(_MAX_POOLS, max_pool),
    **dict.fromkeys(_AVERAGE_POOLS, average_pool),
    **dict.fromkeys(ADAPTIVE, adaptive_pool),
    F.pad: pad,
    F.interpolate: interpolate,
    torch.ops.tutti.strided_convolution: strided,
    torch.ops.tutti.strided_convolution.default: strided,
    torch.pixel_shuffle: shuffle,
    torch.pixel_unshuffle: shuffle,
}
