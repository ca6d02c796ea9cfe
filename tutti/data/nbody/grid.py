"""Fields of a periodic box and their Fourier transforms, in memory or in scratch files, with bitwise equal results.

Every operation works on one plane (x fixed) or one sheet (y fixed) in newly allocated memory. The memory limit only
decides how many of them are loaded at once. Results do not depend on it, although kernels may round differently for
other shapes, batches and alignments.
"""

import errno
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tutti.data.nbody.cosmology import Cosmology
from tutti.errors import DataError

_LONGEST_BLOCK = 2**28  # bytes; longer reads are no faster
Change = Callable[[int, list[torch.Tensor]], torch.Tensor]


class Grid:
    """One field: real values (box, box, box), or in the same memory the non-redundant half of its spectrum.

    Rows are padded by two numbers, so that both fit. A file is mapped at each access, and its pages are released
    with the slice.
    """

    def __init__(self, box: int, storage: torch.device | Path) -> None:
        self._box = box
        self._file = storage if isinstance(storage, Path) else None
        self._values = None if isinstance(storage, Path) else torch.empty(box, box, box + 2, device=storage)
        if self._file:
            _reserve(self._file, grid_bytes(box))

    def real(self) -> torch.Tensor:
        return self._open()[..., : self._box]

    def spectrum(self) -> torch.Tensor:
        return torch.view_as_complex(self._open().unflatten(2, (-1, 2)))

    def release(self) -> None:
        """Frees the memory or deletes the file."""
        self._values = None
        if self._file:
            self._file.unlink()

    def _open(self) -> torch.Tensor:
        if self._values is not None:
            return self._values
        shape = self._box, self._box, self._box + 2
        return torch.from_file(str(self._file), shared=True, size=shape[0] * shape[1] * shape[2]).view(shape)


class Space:
    """The device that computes, and where fields are stored: in the memory of a device, or in a folder."""

    def __init__(self, box: int, device: torch.device, work_bytes: int, storage: torch.device | Path) -> None:
        self.box, self.device, self.work_bytes = box, device, work_bytes
        self._storage, self._names = storage, itertools.count()
        # Wave numbers in units of 2 pi / side; odd derivatives of the Nyquist mode are zero.
        whole = torch.fft.fftfreq(box, 1 / box, device=device).round().to(torch.int64)
        self._squares = whole**2
        self._odd = whole.where(whole.abs() < box // 2, 0).to(torch.float32)

    def grid(self) -> Grid:
        """Returns a new field with undefined values."""
        storage = self._storage / f"{next(self._names)}.grid" if isinstance(self._storage, Path) else self._storage
        return Grid(self.box, storage)

    def squares(self, y: int) -> torch.Tensor:
        """The squared wave numbers of a sheet: integers, to look up functions of k in a table."""
        return self._squares[:, None] + self._squares[y] + self._squares[None, : self.box // 2 + 1]

    def waves(self, axis: int, y: int) -> torch.Tensor:
        """The wave numbers of a sheet along an axis, in a shape that broadcasts with it."""
        return (self._odd[:, None], self._odd[y], self._odd[None, : self.box // 2 + 1])[axis]

    def num_squares(self) -> int:
        """The length of a table over squared wave numbers."""
        return 3 * (self.box // 2) ** 2 + 1


def grid_bytes(box: int) -> int:
    """The size of one field in bytes."""
    return 4 * box * box * (box + 2)


def forward_planes(grid: Grid, space: Space) -> None:
    """Fourier-transforms the y and z axes of a field, in place."""
    for x in range(space.box):
        plane = grid.real()[x].to(space.device).clone(memory_format=torch.contiguous_format)
        grid.spectrum()[x].copy_(torch.fft.rfft2(plane))


def inverse_planes(grid: Grid, space: Space) -> None:
    """Transforms the y and z axes back to real values, in place."""
    for x in range(space.box):
        plane = grid.spectrum()[x].to(space.device).clone(memory_format=torch.contiguous_format)
        grid.real()[x].copy_(torch.fft.irfft2(plane, s=(space.box, space.box)))


def change_sheets(out: Grid, sources: Sequence[Grid], change: Change, space: Space) -> None:
    """Applies `change` to the sheets (x, z) of the sources at each y; the output may be one of the sources."""
    for rows in sheet_blocks(space, len(sources)):
        blocks = [source.spectrum()[:, rows].to(space.device, copy=True) for source in sources]
        made = torch.empty_like(blocks[0])
        for place, y in enumerate(range(rows.start, rows.stop)):
            sheets = [block[:, place].clone(memory_format=torch.contiguous_format) for block in blocks]
            made[:, place] = change(y, sheets)
        out.spectrum()[:, rows].copy_(made)


def sheet_blocks(space: Space, num_sources: int) -> Iterator[slice]:
    """Yields ranges of y to load at once: few long reads of a file instead of many short ones."""
    sheet_bytes = grid_bytes(space.box) // space.box
    block_bytes = min(_LONGEST_BLOCK, space.work_bytes // (num_sources + 2))
    count = max(1, min(space.box, block_bytes // sheet_bytes))
    for start in range(0, space.box, count):
        yield slice(start, min(start + count, space.box))


def forward(grid: Grid, space: Space, factor: torch.Tensor | None = None) -> None:
    """Fourier-transforms a field in place; `factor`, a table over squared wave numbers, multiplies its modes."""

    def change(y: int, sheets: list[torch.Tensor]) -> torch.Tensor:
        modes = torch.fft.fft(sheets[0], dim=0)
        return modes if factor is None else modes * factor[space.squares(y)]

    forward_planes(grid, space)
    change_sheets(grid, [grid], change, space)


def inverse(out: Grid, sources: Sequence[Grid], modes: Change, space: Space) -> None:
    """Computes the real field whose spectrum `modes` makes from the sheets of the sources."""
    change_sheets(out, sources, lambda y, sheets: torch.fft.ifft(modes(y, sheets), dim=0), space)
    inverse_planes(out, space)


def smooth(grid: Grid, factor: torch.Tensor, space: Space) -> None:
    """Multiplies the modes of a real field by a table over squared wave numbers, in place."""

    def change(y: int, sheets: list[torch.Tensor]) -> torch.Tensor:
        return torch.fft.ifft(torch.fft.fft(sheets[0], dim=0) * factor[space.squares(y)], dim=0)

    forward_planes(grid, space)
    change_sheets(grid, [grid], change, space)
    inverse_planes(grid, space)


def _reserve(file: Path, size: int) -> None:
    """Allocates the file on disk: a write to a mapped file on a full disk would kill the process with SIGBUS."""
    try:
        with open(file, "xb") as handle:
            os.posix_fallocate(handle.fileno(), 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise DataError(
            f"a scratch file of {size / 2**30:.1f} GiB does not fit in {file.parent}: {error.strerror}. "
            "Free space there, choose a smaller box, or give more memory so that no scratch files are needed."
        ) from error


UNIVERSE, REDSHIFT = Cosmology(), 3.0

Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Box:
    """The parameters of a periodic box and the storage of its fields."""

    space: Space
    cell: float  # comoving Mpc/h
    seed: int
    report: Report
    universe: Cosmology = UNIVERSE
    z: float = REDSHIFT

    @property
    def side(self) -> float:
        return self.space.box * self.cell

    def table(self, function: Callable[[np.ndarray], np.ndarray]) -> torch.Tensor:
        """Tabulates a function of k in h/Mpc over squared wave numbers; 0 at k = 0."""
        k = 2 * np.pi / self.side * np.sqrt(np.arange(1, self.space.num_squares()))
        return torch.from_numpy(np.append(0.0, function(k)).astype(np.float32)).to(self.space.device)

    def planes(self, stage: str) -> Iterator[int]:
        """Yields the planes of the box in order and reports the progress."""
        for x in range(self.space.box):
            yield x
            self.report(stage, x + 1, self.space.box)
