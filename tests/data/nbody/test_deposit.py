"""Cloud-in-cell deposit: positions and conservation of mass and momentum."""

import numpy as np
import pytest
import torch

from tutti.data.nbody.grid import Box, Grid, Space
from tutti.data.nbody.motion import deposit

CPU = torch.device("cpu")


def a_box(num: int, work_bytes: int = 2**30) -> Box:
    return Box(Space(num, CPU, work_bytes, CPU), 0.1, 1, lambda stage, done, total: None)


def test_particles_that_rest_make_a_uniform_box() -> None:
    box = a_box(16)
    displacement, velocity = resting(box)
    density, *flow = deposit(box, displacement, velocity)
    assert torch.equal(density.real(), torch.ones(16, 16, 16))
    for grid, own in zip(flow, velocity, strict=True):
        assert (grid.real() - own.real()).abs().max() <= 1 / 128


@pytest.mark.parametrize("work_bytes", [1, 4 * 8 * 16**2 * 5, 2**30])
def test_deposit_is_cloud_in_cell_and_keeps_mass_and_momentum(work_bytes: int) -> None:
    box = a_box(16, work_bytes=work_bytes)
    displacement, velocity = resting(box)
    random = np.random.default_rng(3)
    for grid in displacement:  # up to twice around the box, and on the very edges of cells
        grid.real().copy_(torch.from_numpy(random.integers(-32 * 1024, 32 * 1024, (16, 16, 16)) / 1024))
    density, *flow = (grid.real().numpy().astype(float) for grid in deposit(box, displacement, velocity))
    expected = naive_deposit([grid.real().numpy().astype(float) for grid in (*displacement, *velocity)])
    assert density.sum() == pytest.approx(16**3, abs=1e-3)
    np.testing.assert_allclose(density, expected[0], atol=1e-6)
    full = expected[0] > 1e-3
    for grid, momentum, own in zip(flow, expected[1:], velocity, strict=True):
        np.testing.assert_allclose(grid[full], momentum[full] / expected[0][full], atol=0.01)
        empty = expected[0] == 0
        assert empty.any() and np.array_equal(grid[empty], own.real().numpy()[empty])
        assert (density * grid).sum() == pytest.approx(own.real().numpy().sum(dtype=float), abs=16**3 / 128)


def resting(box: Box) -> tuple[list[Grid], list[Grid]]:
    random = np.random.default_rng(1)
    displacement, velocity = ([box.space.grid() for _ in range(3)] for _ in range(2))
    for grid in displacement:
        grid.real().zero_()
    for grid in velocity:
        grid.real().copy_(torch.from_numpy(random.normal(0, 200, (box.space.box,) * 3)))
    return displacement, velocity


def naive_deposit(values: list[np.ndarray]) -> np.ndarray:
    num = len(values[0])
    out = np.zeros((4, num, num, num))
    places = [place + moved for place, moved in zip(np.indices((num,) * 3), values[:3], strict=True)]
    for corner in np.ndindex(2, 2, 2):
        cells = [np.floor(place).astype(int) for place in places]
        shares = [
            place - cell if side else 1 - (place - cell)
            for place, cell, side in zip(places, cells, corner, strict=True)
        ]
        weight = shares[0] * shares[1] * shares[2]
        index = tuple((cell + side) % num for cell, side in zip(cells, corner, strict=True))
        for total, speed in zip(out, (1, *values[3:]), strict=True):
            np.add.at(total, index, weight * speed)
    return out
