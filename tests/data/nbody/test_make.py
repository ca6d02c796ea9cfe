"""Boxes of N-body and hydro fields."""

import itertools
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from tutti.data.nbody import cosmology as physics
from tutti.data.nbody import make
from tutti.data.nbody.grid_fft import Grid, Space, inverse
from tutti.data.nbody.make import (
    Box,
    deposit,
    linear_density,
    make_nbody,
    move,
    output_bytes,
    scratch_bytes,
    second_source,
    share_memory,
    temperature,
)
from tutti.data.nbody.picture import read_header
from tutti.errors import ConfigError, DataError

CPU = torch.device("cpu")
Usage = namedtuple("Usage", "total used free")


def a_box(num: int, seed: int = 1, cell: float = 0.1, work_bytes: int = 2**30) -> Box:
    return Box(Space(num, CPU, work_bytes, CPU), cell, seed, lambda stage, done, total: None)


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


@pytest.fixture(scope="module", autouse=True)
def _no_picture() -> Iterator[None]:
    """Drawing takes longer than all the rest; test_picture.py looks at it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "draw_slices", lambda _, path_png: path_png.touch())
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_nbody(tmp_path_factory.mktemp("boxes") / "box.h5", box=64)


@pytest.fixture(scope="module")
def fields(made: Path) -> tuple[np.ndarray, np.ndarray]:
    with h5py.File(made) as file:
        nbody, hydro = file["Nbody"], file["Hydro"]
        assert isinstance(nbody, h5py.Dataset) and isinstance(hydro, h5py.Dataset)
        return nbody[:], hydro[:]


def datasets(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        return {name: data[:] for name, data in file.items() if isinstance(data, h5py.Dataset)}


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


def test_memory_does_not_change_a_bit(tmp_path: Path) -> None:
    boxes = {}
    for memory_gib in (2.0, 1e-3, 1e-7):
        boxes[memory_gib] = datasets(make_nbody(tmp_path / f"{memory_gib}.h5", box=36, memory_gib=memory_gib))
    assert [share_memory(36, memory_gib, CPU)[0] for memory_gib in boxes] == [CPU, None, None]
    for others in (1e-3, 1e-7):
        for name, values in boxes[2.0].items():
            assert np.array_equal(values, boxes[others][name]), (others, name)


def test_fields_live_on_the_gpu_or_in_memory_or_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    for free, memory_gib, home in ((2**34, 1e-3, gpu), (2**20, 2.0, CPU), (2**20, 0.1, None)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, free))
        assert share_memory(128, memory_gib, gpu)[0] == home


def test_a_seed_gives_one_box_and_another_seed_another(tmp_path: Path) -> None:
    first, again, other = (
        datasets(make_nbody(tmp_path / f"{place}.h5", box=16, seed=seed)) for place, seed in enumerate((7, 7, 8))
    )
    for name, values in first.items():
        assert np.array_equal(values, again[name])
        assert correlation(values[1], other[name][1]) < 0.99


def test_channels_are_finite_and_within_what_tanh_gives(fields: tuple[np.ndarray, np.ndarray]) -> None:
    for values in fields:
        assert values.dtype == np.float32
        assert np.isfinite(values).all()
        assert (np.abs(values) <= 1).mean() > 0.999
        assert (np.abs(values[:1]) <= 1).all()


def test_density_comes_back_by_exp_14_and_has_mean_one(fields: tuple[np.ndarray, np.ndarray]) -> None:
    for values in fields:
        assert np.exp(14 * values[0].astype(float)).mean() == pytest.approx(1, abs=1e-3)


def test_pressure_takes_power_from_gas_on_small_scales_only(fields: tuple[np.ndarray, np.ndarray]) -> None:
    dark, gas = (np.abs(np.fft.rfftn(np.exp(14 * values[0].astype(float)))) ** 2 for values in fields)
    n = np.fft.fftfreq(64, 1 / 64)
    k = 2 * np.pi / 6.4 * np.sqrt(n[:, None, None] ** 2 + n[None, :, None] ** 2 + n[None, None, :33] ** 2)
    for low, high in ((1, 2), (7, 9), (11, 13)):
        shell = (k >= low) & (k < high)
        assert gas[shell].sum() / dark[shell].sum() == pytest.approx(np.exp(-2 * ((low + high) / 2 / 8) ** 2), rel=0.25)


def test_gas_moves_with_dark_matter(fields: tuple[np.ndarray, np.ndarray]) -> None:
    nbody, hydro = fields
    for axis in range(3):
        assert correlation(nbody[1 + axis], hydro[2 + axis]) > 0.95


def test_temperature_rises_with_density(fields: tuple[np.ndarray, np.ndarray]) -> None:
    _, hydro = fields
    kelvin = 10 ** (hydro[1].astype(float) * 3 + 4.5)
    density = np.exp(14 * hydro[0].astype(float))
    bins = np.quantile(density, np.linspace(0, 1, 9))
    means = [kelvin[(density >= low) & (density <= high)].mean() for low, high in itertools.pairwise(bins)]
    assert means == sorted(means)
    np.testing.assert_allclose(kelvin[density < 1], 1e4 * density[density < 1] ** 0.5, rtol=1e-3)


def test_only_dense_gas_that_converges_is_shocked() -> None:
    density = torch.tensor([0.5, 4.0, 4.0, 4.0])
    kelvin = temperature(density, torch.tensor([-400.0, 400.0, -200.0, -400.0]))
    calm = 1e4 * density.sqrt()
    torch.testing.assert_close(kelvin[:2], calm[:2])
    torch.testing.assert_close(kelvin[2], calm[2] + 13.4 * 100**2 * 0.75)
    torch.testing.assert_close(kelvin[3] - calm[3], 4 * (kelvin[2] - calm[2]))


def test_file_says_what_it_holds(made: Path) -> None:
    header = read_header(made)
    expected = {"format": 1, "seed": 1, "box": 64, "cell": 0.1, "redshift": 3.0, "omega_m": 0.31, "sigma_8": 0.81}
    assert expected.items() <= header.items()
    assert header["side"] == pytest.approx(6.4)
    assert "k_F = 8.0 h/Mpc" in header["prescription"] and "tutti" in header["generator"]
    assert header["Nbody"]["shape"] == [4, 64, 64, 64] and header["Nbody"]["chunks"] == [4, 16, 16, 16]
    assert header["Hydro"]["shape"] == [5, 64, 64, 64] and header["Hydro"]["chunks"] == [5, 16, 16, 16]
    assert header["Hydro"]["channels"][:2] == ["ln(density / mean)", "log10(temperature / K)"]
    assert header["Hydro"]["units"][2:] == ["km/s"] * 3
    assert header["Hydro"]["scale"] == [14, 3, 1000, 1000, 1000] and header["Hydro"]["offset"] == [0, 4.5, 0, 0, 0]


def test_cell_sets_the_side_and_progress_is_told(tmp_path: Path) -> None:
    seen: dict[str, tuple[int, int]] = {}
    made = make_nbody(tmp_path / "new" / "box.h5", 18, cell=0.5, report=lambda *said: seen.update({said[0]: said[1:]}))
    header = read_header(made)
    assert header["side"] == 9.0 and header["Nbody"]["chunks"] == [4, 16, 16, 16]
    assert {"noise", "motion", "deposit", "gas", "N-body file", "hydro file"} <= set(seen)
    assert all(done == total for done, total in seen.values())
    assert sorted(path.name for path in made.parent.iterdir()) == ["box.h5", "box.png"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"box": 17}, r"box=17: expected an even number of cells, 16 or more. Try box=18"),
        ({"box": 8}, r"box=8: .* Try box=16"),
        ({"cell": 0.0}, r"cell=0.0: expected a length above 0"),
        ({"seed": -1}, r"seed=-1: expected a whole number"),
        ({"memory_gib": 0}, r"memory_gib=0: expected a size above 0"),
        ({"device": "gpu"}, r"device='gpu' is no device of torch"),
        ({"device": "cuda:99"}, r"device='cuda:99', but torch sees \d+ GPU"),
    ],
)
def test_wrong_values_are_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"box": 16} | values
    with pytest.raises(ConfigError, match=message):
        make_nbody(tmp_path / "box.h5", **arguments)
    assert not list(tmp_path.iterdir())


def test_an_existing_file_stays_unless_told(tmp_path: Path) -> None:
    out = tmp_path / "box.h5"
    out.write_text("precious")
    with pytest.raises(DataError, match=r"box.h5 exists already"):
        make_nbody(out, 16)
    assert out.read_text() == "precious"
    make_nbody(out, 16, overwrite=True)
    assert read_header(out)["box"] == 16


def test_a_box_that_would_fill_the_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = output_bytes(1024) + scratch_bytes(1024) - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**50, 0, free))
    with pytest.raises(
        DataError, match=r"1024\^3 needs 76.1 GiB of disk \(of which 40.1 GiB are scratch\), .* 76.1 GiB free"
    ):
        make_nbody(tmp_path / "box.h5", 1024)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**50, 0, output_bytes(64) - 1))
    with pytest.raises(DataError, match=r"64\^3 needs 0.0 GiB of disk, but"):
        make_nbody(tmp_path / "box.h5", 64)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file cannot be written to: .* Choose another folder"):
        make_nbody(tmp_path / "file" / "box.h5", 16)


@pytest.mark.parametrize("stage", ["noise", "tides xy", "deposit", "hydro file"])
@pytest.mark.parametrize("memory_gib", [2.0, 1e-4])
def test_an_interrupted_box_leaves_nothing(tmp_path: Path, stage: str, memory_gib: float) -> None:
    def interrupt(now: str, done: int, total: int) -> None:
        if now == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_nbody(tmp_path / "box.h5", 16, memory_gib=memory_gib, report=interrupt)
    assert not list(tmp_path.iterdir())
