"""Tiles of a volume that is larger than a crop, and what a model needs of them.

Tiles overlap. What the border of a tile has influenced is computed again by its neighbour, so that tiles give what one
pass over the whole volume would. How far that influence reaches is found with the model itself: cells that are no
numbers make every output that depends on them no number. Large tiles compute less of the volume twice.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tutti import units
from tutti.errors import ConfigError
from tutti.memory.prediction import PassMemory
from tutti.ranks.cores import read_memory
from tutti.train.memory import memory_limit

_MOST_CROPS = 32  # along the volume in which the reach of a border is looked for
_TOLD_TIMES = 1.5  # the cells that tiles compute, of those of the volume, from which on it is told
_TOLERANCE = 5e-3  # of outputs of shifted windows; convolutions on GPUs have a precision of 1e-3

_SHARE_OF_MEMORY = 0.5  # of what is free, for a tile; libraries use more than is predicted
_MOST_ELEMENTS = 2**31 - 1  # of a tensor: kernels of GPUs for convolutions may count in 32 bits
_PIECE_BYTES = 1 << 28
_PLANES = 16  # a piece of more planes has a multiple of it, as chunks of boxes have

Predict = Callable[[torch.Tensor], torch.Tensor]  # of a batch on the CPU, to outputs there


@dataclass(frozen=True)
class AppliedModel:
    """The model of a checkpoint as a function of batches, on a GPU where the recipe uses one."""

    device: torch.device
    compute: Callable[[torch.Tensor], torch.Tensor]  # gives a tensor on the device, with a row a sample
    predict_memory: Callable[[Sequence[int]], PassMemory] | None = None  # of a pass over a batch of a shape

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        """Outputs on the CPU."""
        return self.compute(batch).float().cpu()


@dataclass(frozen=True)
class TileWindow:
    """A part of one dimension: the cells that a tile reads, and those of its outputs that are kept."""

    start: int
    stop: int
    first: int
    end: int


@dataclass(frozen=True)
class Tiles:
    """The size of a tile, its overlap with a neighbour on each side, and what is to be said of them."""

    sizes: tuple[int, ...]
    overlaps: tuple[int, ...]
    multiple: int
    note: str = ""

    def windows(self, volume: Sequence[int]) -> Iterator[tuple[TileWindow, ...]]:
        """The tiles of a volume: each of its cells is kept from one of them."""
        return itertools.product(*self.along(volume))

    def along(self, volume: Sequence[int]) -> list[list[TileWindow]]:
        """The windows along each dimension of a volume."""
        sides = zip(volume, self.sizes, self.overlaps, strict=True)
        return [cut(cells, size, overlap, self.multiple) for cells, size, overlap in sides]


def cut(cells: int, size: int, overlap: int, multiple: int) -> list[TileWindow]:
    """Windows of one size over a dimension, which begin at multiples; neighbours share twice the overlap or more."""
    if cells <= size:
        return [TileWindow(0, cells, 0, cells)]
    starts = [*_inner_starts(cells, size, overlap, multiple), cells - size]
    ends = [*(start + size - overlap for start in starts[:-1]), cells]
    firsts = [0, *ends[:-1]]
    return [TileWindow(start, start + size, first, end) for start, first, end in zip(starts, firsts, ends, strict=True)]


def _inner_starts(cells: int, size: int, overlap: int, multiple: int) -> range:
    """Where windows begin, but for the last one, which ends with the dimension."""
    if cells <= size:
        return range(0)
    return range(0, cells - size, (size - 2 * overlap) // multiple * multiple)


def plan_tiles(
    predict: Predict,
    crop: Sequence[int],
    volume: Sequence[int],
    tile: int | None,
    overlap: int | None,
    most_cells: Callable[[Sequence[int]], int] | None = None,
) -> Tiles:
    """Tiles for a volume, which overlap by the reach of a border, so that no border shows.

    They are a crop with its overlap. Where `most_cells` tells from such a tile how many cells fit into memory, they are
    the ones that compute the fewest cells in all.
    """
    sides = tuple(crop[1:])
    if tile is not None and tile >= max(volume):
        return Tiles(tuple(volume), (0,) * len(volume), 1, "one pass over the whole volume")
    reach = find_reach(predict, crop, max(volume))
    multiple = _find_multiple(predict, crop, reach)
    for side in volume:
        if side % multiple:
            raise ConfigError(
                f"a volume of {by(volume)} cells: expected multiples of {multiple}, by which the model reduces "
                f"volumes. Cut it or pad it to {by([math.ceil(each / multiple) * multiple for each in volume])}."
            )
    if reach is None and overlap is None:
        raise ConfigError(
            "every output of the model depends on all of its input: no overlap of tiles gives what one pass does. Set "
            f"--tile {max(volume)} for one pass, or --overlap for tiles whose borders show."
        )
    reached = reach or tuple(volume)
    overlaps = tuple(min(each, side) for each, side in zip(reached, volume, strict=True))
    overlaps = overlaps if overlap is None else (overlap,) * len(volume)
    least = [math.ceil(2 * each / multiple) * multiple + multiple for each in overlaps]
    sizes = [math.ceil((side + 2 * each) / multiple) * multiple for side, each in zip(sides, overlaps, strict=True)]
    if tile is not None:
        if tile % multiple or tile < max(least):
            raise ConfigError(
                f"--tile {tile}: expected a multiple of {multiple}, and {max(least)} or more with an overlap of "
                f"{by(overlaps)} cells on each side. Set --tile {max(least)}, or a smaller --overlap."
            )
        sizes = [tile] * len(volume)
    sizes = tuple(min(size, side) for size, side in zip(sizes, volume, strict=True))
    if tile is None and reach is not None and most_cells is not None:
        sizes = choose_sizes(volume, overlaps, multiple, sizes, most_cells(sizes))
    count = math.prod(map(len, Tiles(sizes, overlaps, multiple).along(volume)))
    if count == 1:
        return Tiles(sizes, overlaps, multiple, "one pass over the whole volume")
    note = f"{units.count(count, 'tile')} of {by(sizes)} cells, which overlap by {by(overlaps)} on each side"
    cuts = [size < side for size, side in zip(sizes, volume, strict=True)]
    if reach is None or any(mine < needed for mine, needed, cut in zip(overlaps, reach, cuts, strict=True) if cut):
        needed = "all cells" if reach is None else f"{by(reach)} cells"
        note += f". The borders of tiles influence the outputs: the influence of a border reaches {needed}"
    else:
        note += ": as one pass over the whole volume"
    if (times := count * math.prod(sizes) / math.prod(volume)) >= _TOLD_TIMES:
        note += f". They have {times:.1f} times its cells, which larger tiles reduce"
    return Tiles(sizes, overlaps, multiple, note)


def choose_sizes(
    volume: Sequence[int], overlaps: Sequence[int], multiple: int, least: Sequence[int], most_cells: int
) -> tuple[int, ...]:
    """The tile of at most so many cells whose windows have the fewest cells together; the least one if none fits."""
    choices: list[list[tuple[int, int]]] = []
    for cells, overlap, smallest in zip(volume, overlaps, least, strict=True):
        by_count: dict[int, int] = {}  # the smallest tile for each number of windows
        for size in [*range(smallest, cells, multiple), cells]:
            by_count.setdefault(len(_inner_starts(cells, size, overlap, multiple)) + 1, size)
        choices.append([(size, count) for count, size in by_count.items()])
    found = [tuple(zip(*each, strict=True)) for each in itertools.product(*choices)]
    fitting = [(sizes, counts) for sizes, counts in found if math.prod(sizes) <= most_cells]
    if not fitting:
        return tuple(least)
    return min(fitting, key=lambda each: (math.prod(each[0]) * math.prod(each[1]), math.prod(each[1]), each[0]))[0]


def find_reach(predict: Predict, crop: Sequence[int], most: int) -> tuple[int, ...] | None:
    """How many cells inside a border, by dimension, outputs depend on what is outside; None where all of them do."""
    found = [_reach_along(predict, crop, dim, most) for dim in range(len(crop) - 1)]
    return None if None in found else tuple(each for each in found if each is not None)


def _reach_along(predict: Predict, crop: Sequence[int], dim: int, most: int) -> int | None:
    edge, crops = crop[dim + 1], 1
    while crops <= _MOST_CROPS:
        shape = [1, *crop]
        shape[dim + 2] = length = (2 + crops) * edge
        volume = torch.zeros(shape)
        volume.narrow(dim + 2, 0, edge).fill_(math.nan)
        volume.narrow(dim + 2, length - edge, edge).fill_(math.nan)
        others = [each for each in range(len(shape)) if each != dim + 2]
        good = (~predict(volume).isnan().any(0, keepdim=True)).movedim(dim + 2, -1).flatten(0, len(others) - 1).all(0)
        places = good.nonzero().flatten().tolist()
        if places:
            return max(places[0] - edge, length - edge - 1 - places[-1], 0)
        if crops * edge > 2 * most:
            return None
        crops *= 2
    return None


def _find_multiple(predict: Predict, crop: Sequence[int], reach: tuple[int, ...] | None) -> int:
    """The least shift of a window, in cells, with which the outputs of a model shift as well."""
    if reach is None:
        return math.gcd(*crop[1:])
    multiple = 1
    for dim, (side, far) in enumerate(zip(crop[1:], reach, strict=True)):
        length = math.ceil((2 * far + 2 * side) / side) * side
        shape = [1, *crop]
        shape[dim + 2] = length + side
        volume = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        before = predict(volume.narrow(dim + 2, 0, length))
        shifts = [each for each in range(multiple, side + 1) if side % each == 0 and each % multiple == 0]
        start = math.ceil(far / side) * side
        first = _first_reached(predict, crop, dim, start)
        for shift in shifts:
            # Outputs alone do not tell it: a trained model may barely use its coarsest level.
            if _first_reached(predict, crop, dim, start + shift) != first + shift:
                continue
            after = predict(volume.narrow(dim + 2, shift, length))
            ours = before.narrow(dim + 2, far + shift, length - shift - 2 * far)
            theirs = after.narrow(dim + 2, far, length - shift - 2 * far)
            if float((ours - theirs).abs().max()) <= _TOLERANCE * float(ours.abs().max()):
                multiple = shift
                break
        else:
            raise ConfigError(
                f"outputs of the model for a window that is shifted by {side} cells are not those of the window: its "
                "tiles would not fit together. Set --tile to the size of the volume, for one pass."
            )
    return multiple


def _first_reached(predict: Predict, crop: Sequence[int], dim: int, cell: int) -> int:
    """The first output along a dimension that depends on a cell or on one behind it."""
    edge = crop[dim + 1]
    shape = [1, *crop]
    shape[dim + 2] = length = math.ceil((cell + 1) / edge) * edge
    volume = torch.zeros(shape)
    volume.narrow(dim + 2, cell, length - cell).fill_(math.nan)
    reached = predict(volume).isnan().movedim(dim + 2, 0).flatten(1).any(1)
    return int(reached.nonzero()[0]) if reached.any() else cell


def by(sides: Sequence[int]) -> str:
    """Sides of a volume or an image for people."""
    return " x ".join(map(str, sides))


def find_most_cells(model: AppliedModel, channels: int, sizes: Sequence[int]) -> int:
    """The cells of the largest tile that fits into memory, told from what a tile of these sizes needs."""
    cells, free = math.prod(sizes), _free_memory(model.device)
    if model.predict_memory is None or not free:
        return cells
    try:
        needed = model.predict_memory((1, channels, *sizes))
    except Exception:  # of a model that does not run on tensors without data
        return cells
    ahead = 2 * channels * cells * 4  # the inputs of the next tile, and outputs of the one before
    most = int(_SHARE_OF_MEMORY * free / (needed.peak_bytes + ahead) * cells)
    return min(most, _MOST_ELEMENTS * cells // needed.most_elements) if model.device.type == "cuda" else most


def _free_memory(device: torch.device) -> int:
    """Bytes that a process may still use; 0 where that is not known."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    free, limit = read_memory()[0], memory_limit()
    return free if limit is None else min(free, limit)


class Transfer:
    """Copies of tiles to a device and back in pieces, on streams of their own; a CPU's tiles are not copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []

    def read(
        self, read: Callable[[tuple[slice, ...]], np.ndarray], place: tuple[slice, ...], channels: int
    ) -> torch.Tensor:
        """A tile on the device."""
        if not self._streams:
            return torch.from_numpy(read(place))
        with torch.cuda.stream(self._streams[0]):
            tile: torch.Tensor | None = None
            for planes in _pieces(place[0], channels * math.prod(each.stop - each.start for each in place[1:])):
                part = torch.from_numpy(read((planes, *place[1:])))
                if tile is None:
                    sides = [each.stop - each.start for each in place]
                    tile = torch.empty((1, channels, *sides), dtype=part.dtype, device=self._device)
                tile[:, :, planes.start - place[0].start : planes.stop - place[0].start] = part
            self._streams[0].synchronize()
        assert tile is not None
        return tile

    def received(self, tile: torch.Tensor) -> torch.Tensor:
        """A tile that was read, for use on the current stream."""
        if self._streams:
            tile.record_stream(torch.cuda.current_stream(self._device))
        return tile

    def mark(self) -> Any:
        """What has been computed so far, for `write`."""
        return torch.cuda.current_stream(self._device).record_event() if self._streams else None

    def write(
        self, tile: torch.Tensor, write: Callable[..., None], place: tuple[slice, ...], computed: Any = None
    ) -> None:
        """Write a tile of the device that is complete when an event has happened."""
        if not self._streams:
            write(place, tile.float().numpy())
            return
        with torch.cuda.stream(self._streams[1]):
            self._streams[1].wait_event(computed)
            for planes in _pieces(place[0], tile[:, :, :1].numel()):
                part = tile[:, :, planes.start - place[0].start : planes.stop - place[0].start].float().contiguous()
                host = _make_pinned(part.shape)
                host.copy_(part, non_blocking=True)
                self._streams[1].synchronize()
                write((planes, *place[1:]), host.numpy())


def _make_pinned(shape: Sequence[int]) -> torch.Tensor:
    """Memory of the host to which a GPU copies at full speed; torch keeps it for the next piece."""
    return torch.empty(tuple(shape), pin_memory=True)


def _pieces(planes: slice, numbers: int) -> Iterator[slice]:
    """Parts of planes of so many numbers each, of at most some bytes."""
    step = max(1, _PIECE_BYTES // (4 * numbers))
    step = step // _PLANES * _PLANES or step
    for start in range(planes.start, planes.stop, step):
        yield slice(start, min(start + step, planes.stop))
