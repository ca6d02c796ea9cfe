"""Cloud-in-cell in whole numbers: the density and velocities on the grid of particles that have moved."""

from collections.abc import Iterator

import torch

from tutti.data.nbody.grid import Box, Grid

_BITS = 10  # positions are whole steps of 1/1024 cell, so that a particle's eight weights are whole and add up exactly
_STEPS = 1 << _BITS
_WEIGHT = _STEPS**3
_MOMENTUM_STEPS = 64  # of 1 km/s: 30,000 particles of 4,000 km/s in one cell stay within 63 bits


def deposit(box: Box, displacement: list[Grid], velocity: list[Grid]) -> list[Grid]:
    """Density in units of the mean and three velocities in km/s; an empty cell has that of its own particle."""
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
    """The planes whose sums lie in memory at once."""
    plane_bytes = 4 * 8 * box.space.box**2
    count = max(1, min(box.space.box, box.space.work_bytes // plane_bytes))
    for start in range(0, box.space.box, count):
        yield start, min(start + count, box.space.box)


def plane_reach(box: Box, along: Grid, x: int) -> tuple[int, int]:
    """The first and last plane that the particles of a plane touch, not yet wrapped around the box."""
    low, high = torch.aminmax(position(box, along, x, x))
    return int(low) >> _BITS, (int(high) >> _BITS) + 1


def position(box: Box, displacement: Grid, x: int, lattice: torch.Tensor | int) -> torch.Tensor:
    """Where the particles of a plane are along an axis, in whole steps."""
    moved = displacement.real()[x].to(box.space.device) * _STEPS
    return moved.round().to(torch.int64) + lattice * _STEPS


def add_plane(
    box: Box, x: int, displacement: list[Grid], velocity: list[Grid], start: int, stop: int, sums: list[torch.Tensor]
) -> None:
    """Add the particles of plane x to the sums of planes start..stop: whole numbers, whose order does not matter."""
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
    """Add the four of a particle's eight cells that lie in a plane."""
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
