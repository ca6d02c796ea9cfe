"""Communication between the ranks that share a sample: halos, sums and whole samples, as operators with gradients.

Each operator is the adjoint of the other's gradient, for the sum of the losses of all ranks: a cell that several ranks
use gets the gradients of all of them. The mean of the ranks' gradients is then that of the mean loss.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_DOWN, _UP = 0, 1  # tags of messages to the neighbour below and above


@dataclass(frozen=True)
class SpaceGrid:
    """The parts of a sample: how many along each dimension in space, and which one this rank has."""

    parts: tuple[int, ...]
    place: tuple[int, ...]
    group: dist.ProcessGroup | None = field(default=None, compare=False)
    ranks: tuple[int, ...] = ()  # of all parts, the last dimension fastest

    @property
    def axes(self) -> tuple[int, ...]:
        """The dimensions in space that are cut."""
        return tuple(axis for axis, parts in enumerate(self.parts) if parts > 1)

    @property
    def degrees(self) -> tuple[int, ...]:
        """The number of parts along each dimension that is cut."""
        return tuple(parts for parts in self.parts if parts > 1)

    @property
    def places(self) -> tuple[int, ...]:
        """Where this rank's part is along each dimension that is cut."""
        return tuple(place for place, parts in zip(self.place, self.parts, strict=True) if parts > 1)

    @property
    def size(self) -> int:
        """The number of parts."""
        return math.prod(self.parts)

    def neighbour(self, axis: int, step: int, periodic: bool) -> int | None:
        """The rank of the next part along a dimension; None beyond the end."""
        place = list(self.place)
        place[axis] += step
        if not periodic and not 0 <= place[axis] < self.parts[axis]:
            return None
        place[axis] %= self.parts[axis]
        return self.ranks[flat_place(self.parts, place)]


def flat_place(parts: tuple[int, ...], place: list[int]) -> int:
    """The number of a part, counted with the last dimension fastest."""
    number = 0
    for count, index in zip(parts, place, strict=True):
        number = number * count + index
    return number


def place_of(parts: tuple[int, ...], number: int) -> tuple[int, ...]:
    """Where a part is along each dimension."""
    place = []
    for count in reversed(parts):
        number, index = divmod(number, count)
        place.append(index)
    return tuple(reversed(place))


_GRIDS: list[SpaceGrid] = []


def register(grid: SpaceGrid) -> int:
    """Give a grid the number by which operators know it."""
    _GRIDS.append(grid)
    return len(_GRIDS) - 1


def group_of(grid: int) -> tuple[dist.ProcessGroup | None, int]:
    """The ranks of a registered grid, and the number of its parts."""
    return _GRIDS[grid].group, _GRIDS[grid].size


def through_host(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Returns whether messages pass through host memory: Gloo cannot send from a GPU."""
    return tensor.is_cuda and "nccl" not in dist.get_backend(group)


def _swap(
    grid: SpaceGrid,
    axis: int,
    periodic: bool,
    down: torch.Tensor | None,
    up: torch.Tensor | None,
    example: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Send `down` to the neighbour below and `up` to the one above; returns what comes from below and from above."""
    below, above = grid.neighbour(axis, -1, periodic), grid.neighbour(axis, 1, periodic)
    on_host = through_host(example, grid.group)
    sent: list[tuple[Any, torch.Tensor, int, int]] = []
    for piece, peer, tag in ((down, below, _DOWN), (up, above, _UP)):
        if piece is not None and peer is not None:
            sent.append((dist.isend, piece.cpu().contiguous() if on_host else piece.contiguous(), peer, tag))
    received: list[torch.Tensor | None] = []
    # A piece that goes down comes from above. Messages between two ranks are received in the order of sending.
    for piece, peer, tag in ((down, above, _DOWN), (up, below, _UP)):
        if piece is None or peer is None:
            received.append(None)
            continue
        received.append(torch.empty(piece.shape, dtype=piece.dtype, device="cpu" if on_host else piece.device))
        sent.append((dist.irecv, received[-1], peer, tag))  # pyright: ignore[reportArgumentType]
    if sent:
        operations = [dist.P2POp(kind, tensor, peer, grid.group, tag) for kind, tensor, peer, tag in sent]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
    from_above, from_below = (each if each is None else each.to(example.device) for each in received)
    return from_below, from_above


def _format(tensor: torch.Tensor) -> torch.memory_format:
    wanted = _FORMATS.get(tensor.ndim)
    if wanted is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=wanted):
        return torch.contiguous_format
    return wanted


def _resized(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """An empty tensor with another size along a dimension, in the same memory format."""
    shape = list(tensor.shape)
    shape[dim] = size
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=_format(tensor))


@torch.library.custom_op("tutti::halo", mutates_args=())
def halo(
    part: torch.Tensor, dim: int, axis: int, low: int, high: int, fill: float, periodic: bool, grid: int
) -> torch.Tensor:
    """A part with `low` cells of the neighbour below it and `high` of the one above; `fill` beyond the ends."""
    size = part.shape[dim]
    down = part.narrow(dim, 0, high) if high else None
    up = part.narrow(dim, size - low, low) if low else None
    from_below, from_above = _swap(_GRIDS[grid], axis, periodic, down, up, part)
    out = _resized(part, dim, low + size + high)
    out.narrow(dim, low, size).copy_(part)
    for start, cells, piece in ((0, low, from_below), (low + size, high, from_above)):
        if piece is not None:
            out.narrow(dim, start, cells).copy_(piece)
        elif cells:
            out.narrow(dim, start, cells).fill_(fill)
    return out


@halo.register_fake
def _(
    part: torch.Tensor, dim: int, axis: int, low: int, high: int, fill: float, periodic: bool, grid: int
) -> torch.Tensor:
    return _resized(part, dim, low + part.shape[dim] + high)


@torch.library.custom_op("tutti::halo_backward", mutates_args=())
def halo_backward(
    grad: torch.Tensor, dim: int, axis: int, low: int, high: int, periodic: bool, grid: int
) -> torch.Tensor:
    """The gradient of a part: what neighbours have found for the cells that they borrowed is added."""
    size = grad.shape[dim] - low - high
    down = grad.narrow(dim, 0, low) if low else None
    up = grad.narrow(dim, low + size, high) if high else None
    from_below, from_above = _swap(_GRIDS[grid], axis, periodic, down, up, grad)
    out = _resized(grad, dim, size)
    out.copy_(grad.narrow(dim, low, size))
    if from_below is not None:
        out.narrow(dim, 0, high).add_(from_below)
    if from_above is not None:
        out.narrow(dim, size - low, low).add_(from_above)
    return out


@halo_backward.register_fake
def _(grad: torch.Tensor, dim: int, axis: int, low: int, high: int, periodic: bool, grid: int) -> torch.Tensor:
    return _resized(grad, dim, grad.shape[dim] - low - high)


def _keep_halo(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, dim, axis, low, high, _, periodic, grid = inputs
    ctx.place = dim, axis, low, high, periodic, grid


def _halo_gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.tutti.halo_backward(grad, *ctx.place), None, None, None, None, None, None, None


halo.register_autograd(_halo_gradient, setup_context=_keep_halo)


@torch.library.custom_op("tutti::sum_parts", mutates_args=())
def sum_parts(tensor: torch.Tensor, grid: int) -> torch.Tensor:
    """The sum of a tensor over the ranks that share a sample."""
    wide = tensor.dtype in (torch.bfloat16, torch.float16)  # sums of halves lose digits, and Gloo may not know them
    total = tensor.float() if wide else tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_GRIDS[grid].group)
    return total.to(tensor.dtype)


@sum_parts.register_fake
def _(tensor: torch.Tensor, grid: int) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _keep_grid(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.grid = inputs[-1]


def _sum_gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.tutti.sum_parts(grad, ctx.grid), None


sum_parts.register_autograd(_sum_gradient, setup_context=_keep_grid)


@torch.library.custom_op("tutti::gather_parts", mutates_args=())
def gather_parts(part: torch.Tensor, dims: list[int], grid: int) -> torch.Tensor:
    """The whole of which this rank has a part, cut along `dims`."""
    known = _GRIDS[grid]
    pieces = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for _ in range(known.size)]
    dist.all_gather(pieces, part.contiguous(), group=known.group)
    out = part
    for dim, parts in zip(dims, known.degrees, strict=True):
        out = _resized(out, dim, out.shape[dim] * parts)
    for number, piece in enumerate(pieces):
        places = [place for place, parts in zip(place_of(known.parts, number), known.parts, strict=True) if parts > 1]
        window = out
        for dim, place in zip(dims, places, strict=True):
            window = window.narrow(dim, place * part.shape[dim], part.shape[dim])
        window.copy_(piece)
    return out


@gather_parts.register_fake
def _(part: torch.Tensor, dims: list[int], grid: int) -> torch.Tensor:
    out = part
    for dim, parts in zip(dims, _GRIDS[grid].degrees, strict=True):
        out = _resized(out, dim, out.shape[dim] * parts)
    return out


def _keep_dims(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.dims, ctx.grid = inputs[1], inputs[2]


def _gather_gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return cut(torch.ops.tutti.sum_parts(grad, ctx.grid), ctx.dims, _GRIDS[ctx.grid]).contiguous(), None, None


gather_parts.register_autograd(_gather_gradient, setup_context=_keep_dims)


def cut(tensor: torch.Tensor, dims: tuple[int, ...] | list[int], grid: SpaceGrid) -> torch.Tensor:
    """This rank's part of a whole tensor."""
    for dim, parts, place in zip(dims, grid.degrees, grid.places, strict=True):
        size = tensor.shape[dim] // parts
        tensor = tensor.narrow(dim, place * size, size)
    return tensor
