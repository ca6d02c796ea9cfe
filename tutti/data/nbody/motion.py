"""Particle motion by Lagrangian perturbation theory, and deposit on the grid by cloud-in-cell."""

from collections.abc import Iterator

import numpy as np
import torch

from tutti.data.nbody import cosmology as physics
from tutti.data.nbody.grid import Box, Grid, forward, inverse

_BITS = 10  # positions are multiples of 1/1024 cell, so that a particle's eight weights are integers and add up exactly
_STEPS = 1 << _BITS
_WEIGHT = _STEPS**3
_MOMENTUM_STEPS = 64  # of 1 km/s: 30,000 particles of 4,000 km/s in one cell stay within 63 bits


def deposit(box: Box, displacement: list[Grid], velocity: list[Grid]) -> list[Grid]:
    """Returns density in units of the mean and velocity in km/s; an empty cell gets that of its own particle."""
    num, grids = box.space.box, [box.space.grid() for _ in range(4)]
    reach = [plane_reach(box, displacement[0], x) for x in range(num)]
    for start, stop in slabs(box):
        mass, *momenta = sums = [
            torch.zeros((stop - start) * num**2, dtype=torch.int64, device=box.space.device) for _ in range(4)
        ]
        for x, (low, high) in enumerate(reach):
            if (low - start) % num < stop - start or (start - low) % num <= high - low:
                add_plane(box, x, displacement, velocity, start, stop, sums)
        for x in range(start, stop):
            here = slice((x - start) * num**2, (x - start + 1) * num**2)
            weight = mass[here].view(num, num).double()
            grids[0].real()[x].copy_(weight / _WEIGHT)
            for grid, momentum, own in zip(grids[1:], momenta, velocity, strict=True):
                mean = momentum[here].view_as(weight) / (weight * _MOMENTUM_STEPS)
                grid.real()[x].copy_(mean.where(weight > 0, own.real()[x].to(mean)))
        box.report("deposit", stop, num)
    return grids


def slabs(box: Box) -> Iterator[tuple[int, int]]:
    """Yields ranges of planes whose sums fit in memory at once."""
    plane_bytes = 4 * 8 * box.space.box**2
    count = max(1, min(box.space.box, box.space.work_bytes // plane_bytes))
    for start in range(0, box.space.box, count):
        yield start, min(start + count, box.space.box)


def plane_reach(box: Box, along: Grid, x: int) -> tuple[int, int]:
    """The first and last plane that the particles of a plane reach, before periodic wrapping."""
    low, high = torch.aminmax(position(box, along, x, x))
    return int(low) >> _BITS, (int(high) >> _BITS) + 1


def position(box: Box, displacement: Grid, x: int, lattice: torch.Tensor | int) -> torch.Tensor:
    """The positions of the particles of a plane along an axis, in integer steps."""
    moved = displacement.real()[x].to(box.space.device) * _STEPS
    return moved.round().to(torch.int64) + lattice * _STEPS


def add_plane(
    box: Box, x: int, displacement: list[Grid], velocity: list[Grid], start: int, stop: int, sums: list[torch.Tensor]
) -> None:
    """Adds the particles of plane x to the sums of planes start..stop; integer sums do not depend on their order."""
    num = box.space.box
    lattice = torch.arange(num, device=box.space.device)
    places = [
        position(box, grid, x, along).flatten()
        for grid, along in zip(displacement, (x, lattice[:, None], lattice[None, :]), strict=True)
    ]
    speeds = [(grid.real()[x].to(box.space.device) * _MOMENTUM_STEPS).round().long().flatten() for grid in velocity]
    for side in (0, 1):
        plane = ((places[0] >> _BITS) + (side - start)) % num
        chosen = [*places, *speeds]
        if stop - start < num:
            inside = (plane < stop - start).nonzero().squeeze(1)
            plane, chosen = plane[inside], [values[inside] for values in chosen]
        add_corners(num, side, plane, chosen[:3], chosen[3:], sums)


def add_corners(
    num: int,
    side: int,
    plane: torch.Tensor,
    places: list[torch.Tensor],
    speeds: list[torch.Tensor],
    sums: list[torch.Tensor],
) -> None:
    """Adds to the four of a particle's eight cells that are in a plane."""
    parts = [place & (_STEPS - 1) for place in places]
    shares = [(_STEPS - part, part) for part in parts]
    rows, columns = (((place >> _BITS) % num, ((place >> _BITS) + 1) % num) for place in places[1:])
    for row, row_share in zip(rows, shares[1], strict=True):
        line, line_share = (plane * num + row) * num, shares[0][side] * row_share
        for column, column_share in zip(columns, shares[2], strict=True):
            index, weight = line + column, line_share * column_share
            sums[0].scatter_add_(0, index, weight)
            for total, speed in zip(sums[1:], speeds, strict=True):
                total.scatter_add_(0, index, weight * speed)


def linear_density(box: Box, radius: float = 0.0) -> Grid:
    """The spectrum of the linear density, a Gaussian random field smoothed with a Gaussian of a radius in Mpc/h."""
    grid, num = box.space.grid(), box.space.box
    for x in box.planes("noise"):
        generator = np.random.Generator(np.random.Philox(key=np.array([box.seed, x], np.uint64)))
        grid.real()[x].copy_(torch.from_numpy(generator.standard_normal((num, num), np.float32)))

    def amplitude(k: np.ndarray) -> np.ndarray:
        noise_power = box.cell**3  # that of white noise of variance 1
        return np.sqrt(physics.power(k, box.universe, box.z) / noise_power) * physics.gaussian(k * radius)

    forward(grid, box.space, box.table(amplitude))
    return grid


def move(box: Box, linear: Grid) -> tuple[list[Grid], list[Grid]]:
    """Returns displacements in cells and velocities in km/s; releases the linear density."""
    omega = physics.matter_share(box.z, box.universe)
    second = 3 / 7 * omega ** (-1 / 143)  # this and the second growth rate: Bouchet et al. (1995)
    rates = physics.growth_rate(box.z, box.universe), 2 * omega ** (6 / 11)
    flow = physics.hubble_flow(box.z, box.universe)
    source, potential = second_source(box, linear), box.table(lambda k: 2 * np.pi / box.side / k**2)

    def gradient(axis: int, weights: tuple[float, float]) -> Grid:
        def modes(y: int, sheets: list[torch.Tensor]) -> torch.Tensor:
            wave = potential[box.space.squares(y)] * box.space.waves(axis, y)
            return (sheets[0] * weights[0] + sheets[1] * weights[1]) * torch.complex(torch.zeros_like(wave), wave)

        grid = box.space.grid()
        inverse(grid, [linear, source], modes, box.space)
        return grid

    grids = []
    for weights in ((1 / box.cell, second / box.cell), (flow * rates[0], flow * rates[1] * second)):
        for axis in range(3):
            grids.append(gradient(axis, weights))
            box.report("motion", len(grids), 6)
    linear.release()
    source.release()
    return grids[:3], grids[3:]


def second_source(box: Box, linear: Grid) -> Grid:
    """The spectrum of phi_ii phi_jj - phi_ij^2, summed over pairs of axes; phi_ij are the tides of the density."""
    first, second, source = (box.space.grid() for _ in range(3))
    unit = box.table(lambda k: (2 * np.pi / box.side / k) ** 2)

    def tide(out: Grid, one: int, other: int) -> None:
        def modes(y: int, sheets: list[torch.Tensor]) -> torch.Tensor:
            return sheets[0] * (unit[box.space.squares(y)] * box.space.waves(one, y) * box.space.waves(other, y))

        inverse(out, [linear], modes, box.space)

    tide(first, 0, 0)
    tide(second, 1, 1)
    for x in box.planes("tides xx, yy"):
        source.real()[x].copy_(first.real()[x] * second.real()[x])
        first.real()[x].add_(second.real()[x])
    tide(second, 2, 2)
    for x in box.planes("tides zz"):
        source.real()[x].add_(first.real()[x] * second.real()[x])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        tide(first, one, other)
        for x in box.planes(f"tides {'xyz'[one]}{'xyz'[other]}"):
            source.real()[x].sub_(first.real()[x] * first.real()[x])
    first.release()
    second.release()
    forward(source, box.space)
    return source
