"""Linear density and displacements, compared with sums over modes and numpy's transforms."""

import numpy as np
import torch

from tutti.data.nbody import cosmology as physics
from tutti.data.nbody.grid import Box, Grid, Space, inverse
from tutti.data.nbody.motion import deposit, linear_density, move, second_source

CPU = torch.device("cpu")


def a_box(num: int, seed: int = 1, cell: float = 0.1) -> Box:
    return Box(Space(num, CPU, 2**30, CPU), cell, seed, lambda stage, done, total: None)


def real(box: Box, spectrum: Grid) -> np.ndarray:
    grid = box.space.grid()
    inverse(grid, [spectrum], lambda y, sheets: sheets[0], box.space)
    return grid.real().numpy().astype(float)


def wave_numbers(num: int) -> list[np.ndarray]:
    whole = np.fft.fftfreq(num, 1 / num)
    whole[num // 2] = 0
    return [whole[:, None, None], whole[None, :, None], whole[None, None, : num // 2 + 1]]


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.corrcoef(one.ravel(), other.ravel())[0, 1])


def test_linear_density_has_the_power_of_its_cosmology() -> None:
    num, seeds, cell = 64, range(4), 0.4
    n = np.fft.fftfreq(num, 1 / num)
    squares = n[:, None, None] ** 2 + n[None, :, None] ** 2 + np.arange(num // 2 + 1)[None, None, :] ** 2
    k = 2 * np.pi / (num * cell) * np.sqrt(squares)
    k[0, 0, 0] = 1
    measured = np.zeros_like(k)
    for seed in seeds:
        modes = linear_density(a_box(num, seed, cell)).spectrum().numpy()
        measured += np.abs(modes) ** 2 * cell**3 / num**3 / len(seeds)
    ratio = (measured / physics.power(k, physics.Cosmology(), 3.0))[:, :, 1:-1]  # these modes are all independent
    radius = np.sqrt(squares)[:, :, 1:-1]
    for low in range(1, 50, 3):
        shell = ratio[(radius >= low) & (radius < low + 3)]
        # |mode|^2 / P is exponential with mean 1: its mean over M modes and seeds varies by 1 / sqrt(M).
        assert abs(shell.mean() - 1) < 4 / np.sqrt(shell.size * len(seeds)), low


def test_linear_density_varies_by_what_its_modes_hold() -> None:
    radius, seeds = 1.0, range(8)
    boxes = [a_box(32, seed, cell=0.8) for seed in seeds]
    values = np.stack([real(box, linear_density(box, radius)) for box in boxes])
    n = np.fft.fftfreq(32, 1 / 32)
    k = 2 * np.pi / boxes[0].side * np.sqrt(n[:, None, None] ** 2 + n[None, :, None] ** 2 + n[None, None, :] ** 2)
    k[0, 0, 0] = 1e3  # smoothed away
    variances = physics.power(k, physics.Cosmology(), 3.0) * np.exp(-((k * radius) ** 2)) / boxes[0].side ** 3
    error = np.sqrt(2 * np.sum(variances**2) / len(seeds))  # modes come in pairs that are one
    assert np.abs(values.mean(axis=(1, 2, 3))).max() < 1e-6
    assert abs(np.mean(values**2) - variances.sum()) < 3 * error


def test_motion_is_the_gradient_of_first_and_second_order() -> None:
    box = a_box(32, cell=0.4)
    density = real(box, linear_density(box, 1.0))
    waves = wave_numbers(32)
    squares = waves[0] ** 2 + waves[1] ** 2 + waves[2] ** 2
    squares[squares == 0] = 1
    modes = np.fft.rfftn(density) / squares

    def tide(one: int, other: int) -> np.ndarray:
        return np.fft.irfftn(modes * waves[one] * waves[other], s=density.shape, axes=(0, 1, 2))

    source = np.zeros_like(density)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        source += tide(i, i) * tide(j, j) - tide(i, j) ** 2
    ours = real(box, second_source(box, linear_density(box, 1.0)))
    np.testing.assert_allclose(ours, source, atol=1e-4 * source.std())

    omega = physics.matter_share(3.0, physics.Cosmology())
    second = 3 / 7 * omega ** (-1 / 143)
    displacement, velocity = move(box, linear_density(box, 1.0))
    unit = box.side / (2 * np.pi)

    def gradient(axis: int, first: float, other: float) -> np.ndarray:
        both = np.fft.rfftn(first * density + other * source) / squares
        return np.fft.irfftn(1j * waves[axis] * both * unit, s=density.shape, axes=(0, 1, 2))

    flow, rate = physics.hubble_flow(3.0, physics.Cosmology()), physics.growth_rate(3.0, physics.Cosmology())
    for axis in range(3):
        expected = gradient(axis, 1, second) / box.cell
        np.testing.assert_allclose(displacement[axis].real().numpy(), expected, atol=1e-4 * expected.std())
        expected = flow * gradient(axis, rate, second * 2 * omega ** (6 / 11))
        np.testing.assert_allclose(velocity[axis].real().numpy(), expected, atol=1e-4 * expected.std())


def test_particles_fall_towards_dense_places() -> None:
    box = a_box(32, cell=0.4)
    linear = real(box, linear_density(box, 1.0))
    density, *flow = deposit(box, *move(box, linear_density(box, 1.0)))
    assert correlation(density.real().numpy(), linear) > 0.5
    outflow = np.sum([np.gradient(grid.real().numpy(), axis=axis) for axis, grid in enumerate(flow)], axis=0)
    assert correlation(outflow, linear) < -0.5


def test_velocities_follow_displacements() -> None:
    box = a_box(32)
    displacement, velocity = move(box, linear_density(box, 0.3))
    for moved, speed in zip(displacement, velocity, strict=True):
        assert correlation(moved.real().numpy(), speed.real().numpy()) > 0.99
