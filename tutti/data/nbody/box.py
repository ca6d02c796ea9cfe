"""A box of matched fields in an HDF5 file: `Nbody` (4 channels) and `Hydro` (5); its reader, checks and writer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from tutti.data.nbody.gas import DENSITY_FLOOR, divergence, temperature
from tutti.data.nbody.grid import Box, Grid
from tutti.errors import DataError

CHANNELS = {"Nbody": 4, "Hydro": 5}
SCALARS = {"Nbody": 1, "Hydro": 2}  # density; density and temperature; the other channels are a velocity


@dataclass(frozen=True)
class BoxFile:
    """The path of a box and its number of cells per side."""

    path: Path
    side: int

    @property
    def bytes(self) -> int:
        """The size of the box in memory, in float32."""
        return sum(CHANNELS.values()) * self.side**3 * 4


def open_box(path: Path, crop: int) -> BoxFile:
    """Checks a box file; raises DataError with what is wrong with it."""
    if not path.is_file():
        raise DataError(
            f"the box {path} does not exist. Make one with: tutti data make nbody --out {path}. "
            "Or fetch the tutorial's with: tutti data get nbody (41 GiB). "
            "Or set data.train and data.valid to your files, TUTTI_DATA to their folder, or data.source=synthetic."
        )
    try:
        with h5py.File(path, "r") as file:
            sides = {_checked(path, file, name, channels) for name, channels in CHANNELS.items()}
    except DataError:
        raise
    except Exception as error:  # HDF5's library raises almost anything on bytes that are wrong
        raise DataError(f"{path} cannot be opened as an HDF5 file: {error}. Make or copy it again.") from error
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
    """Returns the number of cells per side of a dataset."""
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
        raise DataError(f"{path}: {name} is not a cube, its sides are {field.shape[1:]}: expected three equal ones.")
    return field.shape[1]


@contextmanager
def reading(path: Path, name: str) -> Iterator[None]:
    """Turns errors of HDF5, such as damaged compressed chunks, into a DataError that names the file."""
    try:
        yield
    except DataError:
        raise
    except MemoryError:
        raise DataError(f"{path}: {name} does not fit in memory. Set data.source=disk.") from None
    except Exception as error:  # HDF5's library raises almost anything on bytes that are wrong
        raise DataError(f"{path}: {name} cannot be read: {error}. Make or copy it again.") from error


def read_field(box: BoxFile, name: str) -> np.ndarray:
    """Reads a whole field as float32; raises DataError if a value is not finite."""
    with reading(box.path, name), h5py.File(box.path, "r") as file:
        stored: Any = file[name]
        field = np.empty(stored.shape, np.float32)
        stored.read_direct(field)
    for channel in range(len(field)):
        check_finite(field[channel], box.path, name, channel, (0, 0, 0))
    return field


def check_finite(values: np.ndarray, path: Path, name: str, channel: int, corner: tuple[int, ...]) -> None:
    """Raises DataError with the position of the first value that is not finite."""
    if np.isfinite(values).all():
        return
    bad = np.argwhere(~np.isfinite(values))
    where = tuple(int(place + start) for place, start in zip(bad[0], corner, strict=True))
    raise DataError(
        f"{path}: {name} channel {channel} holds {values[tuple(bad[0])]} at cell {where} "
        f"({len(bad):,} such cells here): expected finite numbers. Repair the file, or use another."
    )


CHUNK = 16  # cells; a random crop of 64^3 reads 1.9 times its bytes in about 120 chunks; with 32 it would be 3.3 times

DENSITY_SCALE = 14.0  # x = ln(rho / mean) / 14
VELOCITY_SCALE = 1000.0  # km/s, about five times the root mean square of a large box
TEMPERATURE_MIDDLE, TEMPERATURE_SCALE = 4.5, 3.0  # x = (log10 T - 4.5) / 3


def create(file: h5py.File, name: str, box: Box, channels: list[str]) -> h5py.Dataset:
    """Creates a dataset whose attributes describe its channels: value * scale + offset is the quantity."""
    edge = min(CHUNK, box.space.box)
    meaning = {
        "density": ("ln(density / mean)", "", DENSITY_SCALE, 0.0),
        "temperature": ("log10(temperature / K)", "", TEMPERATURE_SCALE, TEMPERATURE_MIDDLE),
    }
    rows = [meaning[channel] for channel in channels]
    rows += [(f"velocity {axis}", "km/s", VELOCITY_SCALE, 0.0) for axis in "xyz"]
    shape = (len(rows), *(box.space.box,) * 3)
    data = file.create_dataset(name, shape, np.float32, chunks=(len(rows), edge, edge, edge))
    for attribute, values in zip(("channels", "units", "scale", "offset"), zip(*rows, strict=True), strict=True):
        data.attrs[attribute] = values
    return data


def write_nbody(data: h5py.Dataset, box: Box, density: Grid, flow: list[Grid]) -> None:
    """Writes density and velocities of dark matter, scaled to about -1..1."""

    def channels(x: int) -> list[torch.Tensor]:
        plane, *velocities = (grid.real()[x].to(box.space.device) for grid in (density, *flow))
        return [scale_density(plane), *(scale_velocity(velocity) for velocity in velocities)]

    write_channels(data, box, "N-body file", channels)


def write_hydro(data: h5py.Dataset, box: Box, density: Grid, flow: list[Grid]) -> None:
    """Writes density, temperature and velocities of gas, scaled to about -1..1."""

    def channels(x: int) -> list[torch.Tensor]:
        plane, *velocities = (grid.real()[x].to(box.space.device) for grid in (density, *flow))
        before, after = (flow[0].real()[(x + step) % box.space.box].to(box.space.device) for step in (-1, 1))
        kelvin = temperature(plane, divergence(before, after, velocities[1], velocities[2], box.cell))
        scaled = ((kelvin.log10() - TEMPERATURE_MIDDLE) / TEMPERATURE_SCALE).clamp(-1, 1)
        return [scale_density(plane), scaled, *(scale_velocity(velocity) for velocity in velocities)]

    write_channels(data, box, "hydro file", channels)


def write_channels(data: h5py.Dataset, box: Box, stage: str, channels: Callable[[int], list[torch.Tensor]]) -> None:
    """Writes as many planes at once as a chunk has."""
    num, thickness = box.space.box, min(CHUNK, box.space.box)
    for start in range(0, num, thickness):
        planes = range(start, min(start + thickness, num))
        data[:, planes.start : planes.stop] = torch.stack([torch.stack(channels(x)).cpu() for x in planes], 1).numpy()
        box.report(stage, planes.stop, num)


def scale_density(density: torch.Tensor) -> torch.Tensor:
    """Returns x = ln(density) / 14 of a density in units of the mean."""
    return (density.clamp(min=DENSITY_FLOOR).log() / DENSITY_SCALE).clamp(-1, 1)


def scale_velocity(velocity: torch.Tensor) -> torch.Tensor:
    """Returns a velocity divided by its scale, not clipped."""
    return velocity / VELOCITY_SCALE
