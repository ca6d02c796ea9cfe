"""Fourier transforms of fields, in memory and through files."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tutti.data.nbody.grid import Grid, Space, forward, grid_bytes, inverse, smooth
from tutti.errors import DataError

CPU = torch.device("cpu")
SIZES = (16, 20, 30)


def a_space(box: int, home: torch.device | Path = CPU, work_bytes: int = 2**30) -> Space:
    return Space(box, CPU, work_bytes, home)


def a_field(space: Space, seed: int = 0) -> tuple[Grid, np.ndarray]:
    values = np.random.default_rng(seed).standard_normal((space.box,) * 3, np.float32)
    grid = space.grid()
    grid.real().copy_(torch.from_numpy(values))
    return grid, values


@pytest.mark.parametrize("box", SIZES)
def test_spectrum_is_that_of_numpy(box: int) -> None:
    space = a_space(box)
    grid, values = a_field(space)
    forward(grid, space)
    np.testing.assert_allclose(grid.spectrum().numpy(), np.fft.rfftn(values), rtol=0, atol=1e-5 * box**1.5)


@pytest.mark.parametrize("box", SIZES)
def test_inverse_gives_the_field_back(box: int) -> None:
    space = a_space(box)
    grid, values = a_field(space)
    forward(grid, space)
    back = space.grid()
    inverse(back, [grid], lambda y, sheets: sheets[0], space)
    np.testing.assert_allclose(back.real().numpy(), values, rtol=0, atol=1e-5)


def test_waves_give_derivatives_of_a_wave() -> None:
    space = a_space(16)
    x = 2 * np.pi * np.arange(16) / 16
    wave = (
        np.sin(3 * x)[:, None, None] + np.sin(2 * x)[None, :, None] * np.ones((16, 16, 16)) + np.sin(x)[None, None, :]
    )
    slopes = [
        (3 * np.cos(3 * x))[:, None, None],
        (2 * np.cos(2 * x))[None, :, None],
        np.cos(x)[None, None, :],
    ]
    for axis, slope in enumerate(slopes):
        grid, out = space.grid(), space.grid()
        grid.real().copy_(torch.from_numpy(wave))
        forward(grid, space)
        inverse(out, [grid], lambda y, sheets, axis=axis: sheets[0] * 1j * space.waves(axis, y), space)
        np.testing.assert_allclose(out.real().numpy(), np.broadcast_to(slope, (16, 16, 16)), atol=1e-5)


def test_the_highest_wave_has_no_slope() -> None:
    space = a_space(16)
    x = np.arange(16)
    wave = (-1.0) ** (x[:, None, None] + x[None, :, None]) * np.sin(2 * np.pi * x / 16)[None, None, :]
    for axis in (0, 1):
        grid, out = space.grid(), space.grid()
        grid.real().copy_(torch.from_numpy(wave))
        forward(grid, space)
        inverse(out, [grid], lambda y, sheets, axis=axis: sheets[0] * 1j * space.waves(axis, y), space)
        assert out.real().abs().max() < 1e-5


def test_smoothing_multiplies_the_modes() -> None:
    space = a_space(20)
    grid, values = a_field(space)
    factor = torch.exp(-torch.arange(space.num_squares()) / 30.0)
    smooth(grid, factor, space)
    n = np.fft.fftfreq(20, 1 / 20)
    squares = n[:, None, None] ** 2 + n[None, :, None] ** 2 + n[None, None, :11] ** 2
    expected = np.fft.irfftn(np.fft.rfftn(values) * np.exp(-squares / 30), s=(20, 20, 20), axes=(0, 1, 2))
    np.testing.assert_allclose(grid.real().numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("work_bytes", [1, 20_000, 2**30])
@pytest.mark.parametrize("box", [20, 64])
def test_files_and_thin_blocks_give_equal_bits(tmp_path: Path, box: int, work_bytes: int) -> None:
    results = []
    for space in (a_space(box), a_space(box, tmp_path, work_bytes)):
        grid, _ = a_field(space)
        forward(grid, space, torch.linspace(1, 2, space.num_squares()))
        spectrum = grid.spectrum().clone()
        smooth(grid, torch.linspace(2, 1, space.num_squares()), space)
        results.append((spectrum, grid.real().clone()))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_released_fields_leave_no_file(tmp_path: Path) -> None:
    grid, _ = a_field(a_space(16, tmp_path))
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size == grid_bytes(16)
    grid.release()
    assert not list(tmp_path.iterdir())


def test_full_disk_is_said_before_it_is_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        DataError, match=r"scratch file of .* GiB does not fit in .*: No space left on device. Free space"
    ):
        a_space(16, tmp_path).grid()
