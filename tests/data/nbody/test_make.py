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

from tutti.data.nbody import make
from tutti.data.nbody.make import choose_storage, make_nbody, output_bytes, scratch_bytes
from tutti.data.nbody.picture import read_header
from tutti.errors import ConfigError, DataError

CPU = torch.device("cpu")
Usage = namedtuple("Usage", "total used free")


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


def test_memory_does_not_change_a_bit(tmp_path: Path) -> None:
    boxes = {}
    for memory_gib in (2.0, 1e-3, 1e-7):
        boxes[memory_gib] = datasets(make_nbody(tmp_path / f"{memory_gib}.h5", box=36, memory_gib=memory_gib))
    assert [choose_storage(36, memory_gib, CPU)[0] for memory_gib in boxes] == [CPU, None, None]
    for others in (1e-3, 1e-7):
        for name, values in boxes[2.0].items():
            assert np.array_equal(values, boxes[others][name]), (others, name)


def test_fields_live_on_the_gpu_or_in_memory_or_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    for free, memory_gib, home in ((2**34, 1e-3, gpu), (2**20, 2.0, CPU), (2**20, 0.1, None)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, free))
        assert choose_storage(128, memory_gib, gpu)[0] == home


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
        ({"device": "gpu"}, r"device='gpu' is not a device of torch"),
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
