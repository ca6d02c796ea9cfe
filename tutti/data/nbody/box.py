"""A box of matched fields in an HDF5 file, checked when it is opened: `Nbody` (4 channels) and `Hydro` (5)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tutti.errors import DataError

CHANNELS = {"Nbody": 4, "Hydro": 5}
SCALARS = {"Nbody": 1, "Hydro": 2}  # density; density and temperature; the other channels are a velocity


@dataclass(frozen=True)
class BoxFile:
    """Where a box is, and what its file holds."""

    path: Path
    side: int

    @property
    def bytes(self) -> int:
        """The box in memory, as single-precision numbers."""
        return sum(CHANNELS.values()) * self.side**3 * 4


def open_box(path: Path, crop: int) -> BoxFile:
    """The facts of a box file, or a message about what is wrong with it."""
    if not path.is_file():
        raise DataError(
            f"the box {path} is not there. Make one with: tutti data make nbody --out {path}. "
            "Or set data.train and data.valid to your files, TUTTI_DATA to their folder, or data.source=synthetic."
        )
    try:
        with h5py.File(path, "r") as file:
            sides = {_checked(path, file, name, channels) for name, channels in CHANNELS.items()}
    except DataError:
        raise
    except Exception as error:  # HDF5's library raises almost anything on bytes that are wrong
        raise DataError(f"{path} does not open as an HDF5 file: {error}. Make or copy it again.") from error
    if len(sides) > 1:
        raise DataError(f"{path}: Nbody and Hydro have different sizes, {sorted(sides)}: expected the same box.")
    side = sides.pop()
    if side < crop:
        raise DataError(
            f"{path} is a box of {side}^3 cells, smaller than data.crop={crop}. "
            f"Set data.crop={side} or less, or use a larger box."
        )
    return BoxFile(path, side)


def _checked(path: Path, file: h5py.File, name: str, channels: int) -> int:
    """The side of a dataset's cube."""
    if name not in file:
        found = ", ".join(file) or "nothing"
        raise DataError(f"{path} has no dataset {name!r}: found {found}, expected {' and '.join(CHANNELS)}.")
    field = file[name]
    if not isinstance(field, h5py.Dataset) or field.dtype.kind != "f":
        raise DataError(f"{path}: {name} is not a dataset of floating-point numbers.")
    if field.ndim != 4 or field.shape[0] != channels:
        raise DataError(
            f"{path}: {name} has the shape {field.shape}: expected {channels} channels first, then three equal sides."
        )
    if len(set(field.shape[1:])) != 1:
        raise DataError(f"{path}: {name} is no cube, its sides are {field.shape[1:]}: expected three equal ones.")
    return field.shape[1]


@contextmanager
def reading(path: Path, name: str) -> Iterator[None]:
    """Say which file it is that does not read, such as one whose compressed pieces are damaged."""
    try:
        yield
    except DataError:
        raise
    except MemoryError:
        raise DataError(f"{path}: {name} does not fit in memory. Set data.source=disk.") from None
    except Exception as error:  # HDF5's library raises almost anything on bytes that are wrong
        raise DataError(f"{path}: {name} cannot be read: {error}. Make or copy it again.") from error


def read_field(box: BoxFile, name: str) -> np.ndarray:
    """All of a field as single-precision numbers; one that holds no numbers somewhere is refused."""
    with reading(box.path, name), h5py.File(box.path, "r") as file:
        stored: Any = file[name]
        field = np.empty(stored.shape, np.float32)
        stored.read_direct(field)
    for channel in range(len(field)):
        check_finite(field[channel], box.path, name, channel, (0, 0, 0))
    return field


def check_finite(values: np.ndarray, path: Path, name: str, channel: int, corner: tuple[int, ...]) -> None:
    """Refuse values that are no numbers, and say where the first one is."""
    if np.isfinite(values).all():
        return
    bad = np.argwhere(~np.isfinite(values))
    where = tuple(int(place + start) for place, start in zip(bad[0], corner, strict=True))
    raise DataError(
        f"{path}: {name} channel {channel} holds {values[tuple(bad[0])]} at cell {where} "
        f"({len(bad):,} such cells here): expected finite numbers. Repair the file, or use another."
    )
