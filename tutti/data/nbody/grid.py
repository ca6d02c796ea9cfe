"""Fields of a periodic box and their Fourier transforms, in memory or streamed through scratch files with equal bits.

The unit of arithmetic is one plane (x fixed) or one sheet (y fixed), copied to fresh memory of its own. Memory decides
only how many of them lie there at once, so that results do not depend on it: kernels may round otherwise for other
shapes, batches and alignments.
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
    """One field: real values (box, box, box), or in the same place the half of its spectrum that is not redundant.

    Rows are padded by two numbers, so that both fit. A file is mapped anew at each access, and its pages leave this
    process when the slice is dropped.
    """

    def __init__(self, box: int, home: torch.device | Path) -> None:
        self._box = box
        self._file = home if isinstance(home, Path) else None
        self._values = None if isinstance(home, Path) else torch.empty(box, box, box + 2, device=home)
        if self._file:
            _reserve(self._file, grid_bytes(box))

    def real(self) -> torch.Tensor:
        return self._open()[..., : self._box]

    def spectrum(self) -> torch.Tensor:
        return torch.view_as_complex(self._open().unflatten(2, (-1, 2)))

    def release(self) -> None:
        """Give the memory or the file back."""
        self._values = None
        if self._file:
            self._file.unlink()

    def _open(self) -> torch.Tensor:
        if self._values is not None:
            return self._values
        shape = self._box, self._box, self._box + 2
        return torch.from_file(str(self._file), shared=True, size=shape[0] * shape[1] * shape[2]).view(shape)


class Space:
    """The device that works on the fields of one box, and their home: memory of a device, or a folder of files."""

    def __init__(self, box: int, device: torch.device, work_bytes: int, home: torch.device | Path) -> None:
        self.box, self.device, self.work_bytes = box, device, work_bytes
        self._home, self._names = home, itertools.count()
        # Wave numbers in units of 2 pi / side; the highest has no sign, so that odd derivatives of it are zero.
        whole = torch.fft.fftfreq(box, 1 / box, device=device).round().to(torch.int64)
        self._squares = whole**2
        self._odd = whole.where(whole.abs() < box // 2, 0).to(torch.float32)

    def grid(self) -> Grid:
        """A new field, its values not set."""
        home = self._home / f"{next(self._names)}.grid" if isinstance(self._home, Path) else self._home
        return Grid(self.box, home)

    def squares(self, y: int) -> torch.Tensor:
        """The squared wave numbers of a sheet: whole numbers, to look up functions of k in a table."""
        return self._squares[:, None] + self._squares[y] + self._squares[None, : self.box // 2 + 1]

    def waves(self, axis: int, y: int) -> torch.Tensor:
        """The wave numbers of a sheet along an axis, in a shape that multiplies it."""
        return (self._odd[:, None], self._odd[y], self._odd[None, : self.box // 2 + 1])[axis]

    def num_squares(self) -> int:
        """The length of a table over squared wave numbers."""
        return 3 * (self.box // 2) ** 2 + 1


def grid_bytes(box: int) -> int:
    """What one field takes, in memory or on disk."""
    return 4 * box * box * (box + 2)


def forward_planes(grid: Grid, space: Space) -> None:
    """Transform the y and z axes of a field, in place."""
    for x in range(space.box):
        plane = grid.real()[x].to(space.device).clone(memory_format=torch.contiguous_format)
        grid.spectrum()[x].copy_(torch.fft.rfft2(plane))


def inverse_planes(grid: Grid, space: Space) -> None:
    """Transform the y and z axes back to real values, in place."""
    for x in range(space.box):
        plane = grid.spectrum()[x].to(space.device).clone(memory_format=torch.contiguous_format)
        grid.real()[x].copy_(torch.fft.irfft2(plane, s=(space.box, space.box)))


def change_sheets(out: Grid, sources: Sequence[Grid], change: Change, space: Space) -> None:
    """Write what `change` makes of the sheets (x, z) of the sources at each y; the output may be one of the sources."""
    for rows in sheet_blocks(space, len(sources)):
        blocks = [source.spectrum()[:, rows].to(space.device, copy=True) for source in sources]
        made = torch.empty_like(blocks[0])
        for place, y in enumerate(range(rows.start, rows.stop)):
            sheets = [block[:, place].clone(memory_format=torch.contiguous_format) for block in blocks]
            made[:, place] = change(y, sheets)
        out.spectrum()[:, rows].copy_(made)


def sheet_blocks(space: Space, num_sources: int) -> Iterator[slice]:
    """The y of sheets that are read at once: few long reads of a file instead of many short ones."""
    sheet_bytes = grid_bytes(space.box) // space.box
    block_bytes = min(_LONGEST_BLOCK, space.work_bytes // (num_sources + 2))
    count = max(1, min(space.box, block_bytes // sheet_bytes))
    for start in range(0, space.box, count):
        yield slice(start, min(start + count, space.box))


def forward(grid: Grid, space: Space, factor: torch.Tensor | None = None) -> None:
    """The spectrum of a field, in place; a table over squared wave numbers multiplies its modes."""

    def change(y: int, sheets: list[torch.Tensor]) -> torch.Tensor:
        modes = torch.fft.fft(sheets[0], dim=0)
        return modes if factor is None else modes * factor[space.squares(y)]

    forward_planes(grid, space)
    change_sheets(grid, [grid], change, space)


def inverse(out: Grid, sources: Sequence[Grid], modes: Change, space: Space) -> None:
    """The field whose spectrum is made of the sheets of other spectra."""
    change_sheets(out, sources, lambda y, sheets: torch.fft.ifft(modes(y, sheets), dim=0), space)
    inverse_planes(out, space)


def smooth(grid: Grid, factor: torch.Tensor, space: Space) -> None:
    """Multiply the modes of a real field by a table over squared wave numbers, in place."""

    def change(y: int, sheets: list[torch.Tensor]) -> torch.Tensor:
        return torch.fft.ifft(torch.fft.fft(sheets[0], dim=0) * factor[space.squares(y)], dim=0)

    forward_planes(grid, space)
    change_sheets(grid, [grid], change, space)
    inverse_planes(grid, space)


def _reserve(file: Path, size: int) -> None:
    """Claim the disk at once: a mapped file that finds the disk full ends the process without a word."""
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
    """What is made: a periodic cube of a universe, and where its fields live while it is made."""

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
        """A function of k in h/Mpc over squared wave numbers; 0 at k = 0."""
        k = 2 * np.pi / self.side * np.sqrt(np.arange(1, self.space.num_squares()))
        return torch.from_numpy(np.append(0.0, function(k)).astype(np.float32)).to(self.space.device)

    def planes(self, stage: str) -> Iterator[int]:
        """The planes of the box in order, reported as a stage."""
        for x in range(self.space.box):
            yield x
            self.report(stage, x + 1, self.space.box)
