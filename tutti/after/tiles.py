"""Tiles of a volume that is larger than a crop, and what a model needs of them.

Tiles overlap. What the border of a tile has influenced is computed again by its neighbour, so that tiles give what one
pass over the whole volume would. How far that influence reaches is found with the model itself: cells that are no
numbers make every output that depends on them no number.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tutti.errors import ConfigError

_MOST_CROPS = 32  # along the volume in which the reach of a border is looked for
_TOLERANCE = 5e-3  # of outputs of shifted windows; convolutions on GPUs have a precision of 1e-3

Predict = Callable[[torch.Tensor], torch.Tensor]  # of a batch on the CPU, to outputs there


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
        along = [
            cut(cells, size, overlap, self.multiple)
            for cells, size, overlap in zip(volume, self.sizes, self.overlaps, strict=True)
        ]
        return itertools.product(*along)


def cut(cells: int, size: int, overlap: int, multiple: int) -> list[TileWindow]:
    """Windows of one size over a dimension, which begin at multiples; neighbours share twice the overlap or more."""
    if cells <= size:
        return [TileWindow(0, cells, 0, cells)]
    step = (size - 2 * overlap) // multiple * multiple
    starts = [*range(0, cells - size, step), cells - size]
    ends = [*(start + size - overlap for start in starts[:-1]), cells]
    firsts = [0, *ends[:-1]]
    return [TileWindow(start, start + size, first, end) for start, first, end in zip(starts, firsts, ends, strict=True)]


def plan_tiles(
    predict: Predict, crop: Sequence[int], volume: Sequence[int], tile: int | None, overlap: int | None
) -> Tiles:
    """Tiles for a volume: by default a crop with the reach of a border on each side, so that no border shows."""
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
    found = Tiles(sizes, overlaps, multiple)
    count = len(list(found.windows(volume)))
    if count == 1:
        return Tiles(sizes, overlaps, multiple, "one pass over the whole volume")
    note = f"{count} tiles of {by(sizes)} cells, which overlap by {by(overlaps)} on each side"
    if reach is None or any(mine < needed for mine, needed in zip(overlaps, reach, strict=True)):
        needed = "all cells" if reach is None else f"{by(reach)} cells"
        note += f". The borders of tiles influence the outputs: the influence of a border reaches {needed}"
    else:
        note += ": as one pass over the whole volume"
    return Tiles(sizes, overlaps, multiple, note)


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
        for shift in shifts:
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


def by(sides: Sequence[int]) -> str:
    """Sides of a volume or an image for people."""
    return " x ".join(map(str, sides))
