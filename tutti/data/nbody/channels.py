"""The channels of a box file: what they mean, how they are scaled to about -1..1, and how they are written."""

from collections.abc import Callable

import h5py
import numpy as np
import torch

from tutti.data.nbody.cube import Box
from tutti.data.nbody.gas import DENSITY_FLOOR, divergence, temperature
from tutti.data.nbody.grid_fft import Grid

CHUNK = 16  # a random crop of 64^3 reads 1.9 times its bytes in about 120 pieces; with 32 it would be 3.3 times

DENSITY_SCALE = 14.0  # x = ln(rho / mean) / 14
VELOCITY_SCALE = 1000.0  # km/s, some five times the root mean square of a large box
TEMPERATURE_MIDDLE, TEMPERATURE_SCALE = 4.5, 3.0  # x = (log10 T - 4.5) / 3


def create(file: h5py.File, name: str, box: Box, channels: list[str]) -> h5py.Dataset:
    """An empty dataset that says what its channels are: value * scale + offset is the quantity named."""
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
    """Dark matter: density and velocities, scaled to about -1..1."""

    def channels(x: int) -> list[torch.Tensor]:
        plane, *velocities = (grid.real()[x].to(box.space.device) for grid in (density, *flow))
        return [scale_density(plane), *(scale_velocity(velocity) for velocity in velocities)]

    write_channels(data, box, "N-body file", channels)


def write_hydro(data: h5py.Dataset, box: Box, density: Grid, flow: list[Grid]) -> None:
    """Gas: density, temperature and velocities, scaled to about -1..1."""

    def channels(x: int) -> list[torch.Tensor]:
        plane, *velocities = (grid.real()[x].to(box.space.device) for grid in (density, *flow))
        before, after = (flow[0].real()[(x + step) % box.space.box].to(box.space.device) for step in (-1, 1))
        heat = temperature(plane, divergence(before, after, velocities[1], velocities[2], box.cell))
        warmth = ((heat.log10() - TEMPERATURE_MIDDLE) / TEMPERATURE_SCALE).clamp(-1, 1)
        return [scale_density(plane), warmth, *(scale_velocity(velocity) for velocity in velocities)]

    write_channels(data, box, "hydro file", channels)


def write_channels(data: h5py.Dataset, box: Box, stage: str, channels: Callable[[int], list[torch.Tensor]]) -> None:
    """Write plane by plane, as many at once as a chunk is thick."""
    num, thickness = box.space.box, min(CHUNK, box.space.box)
    for start in range(0, num, thickness):
        planes = range(start, min(start + thickness, num))
        data[:, planes.start : planes.stop] = torch.stack([torch.stack(channels(x)).cpu() for x in planes], 1).numpy()
        box.report(stage, planes.stop, num)


def scale_density(density: torch.Tensor) -> torch.Tensor:
    """x of a density in units of the mean, so that exp(14 x) gives it back."""
    return (density.clamp(min=DENSITY_FLOOR).log() / DENSITY_SCALE).clamp(-1, 1)


def scale_velocity(velocity: torch.Tensor) -> torch.Tensor:
    """Velocities in units of their scale, not clipped."""
    return velocity / VELOCITY_SCALE
