"""The linear density of a box from white noise, and the motion of particles in Lagrangian perturbation theory."""

import numpy as np
import torch

from tutti.data.nbody import cosmology as physics
from tutti.data.nbody.grid import Box, Grid, forward, inverse


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
    """How far particles have moved, in cells, and their velocities in km/s; releases the linear density."""
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
