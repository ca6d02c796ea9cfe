"""Checks of a box file: every fault has its own message."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from tutti.data.nbody.box import BoxFile, open_box, read_field
from tutti.data.nbody.sources import Choices, HostSource, read_disk
from tutti.errors import DataError

SIDE, CROP = 6, 4


def write(path: Path, dtype: Any = np.float32, **shapes: tuple[int, ...]) -> Path:
    """A box, or what differs from one."""
    given = {"Nbody": (4, SIDE, SIDE, SIDE), "Hydro": (5, SIDE, SIDE, SIDE)} | shapes
    with h5py.File(path, "w") as file:
        for name, shape in given.items():
            file.create_dataset(name, data=np.zeros(shape, dtype))
    return path


def refusal(path: Path, crop: int = CROP) -> str:
    with pytest.raises(DataError) as caught:
        open_box(path, crop)
    return str(caught.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "box.h5"


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_good_box_is_known_by_its_side(path: Path, dtype: Any) -> None:
    box = open_box(write(path, dtype), CROP)
    assert box == BoxFile(path, SIDE)
    assert box.bytes == 9 * SIDE**3 * 4
    assert open_box(path, SIDE).side == SIDE, "a crop may be the whole box"


def test_a_file_that_is_not_there(path: Path) -> None:
    for missing in (path, path.parent):
        assert refusal(missing) == (
            f"the box {missing} does not exist. Make one with: tutti data make nbody --out {missing}. "
            "Or fetch the tutorial's with: tutti data get nbody (41 GiB). "
            "Or set data.train and data.valid to your files, TUTTI_DATA to their folder, or data.source=synthetic."
        )


def empty(path: Path) -> None:
    path.write_bytes(b"")


def text(path: Path) -> None:
    path.write_text("no box\n" * 100)


def cut_short(path: Path) -> None:
    content = write(path).read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("spoil", [empty, text, cut_short])
def test_a_file_that_does_not_open(path: Path, spoil: Callable[[Path], None]) -> None:
    spoil(path)
    message = refusal(path)
    assert message.startswith(f"{path} cannot be opened as an HDF5 file: ")
    assert message.endswith(". Make or copy it again.")
    if spoil is cut_short:
        assert "truncated" in message


@pytest.mark.parametrize(
    ("names", "missing", "found"),
    [
        (["Nbody"], "Hydro", "Nbody"),
        (["hydro", "nbody"], "Nbody", "hydro, nbody"),
        ([], "Nbody", "nothing"),
    ],
)
def test_a_dataset_that_is_missing(path: Path, names: list[str], missing: str, found: str) -> None:
    with h5py.File(path, "w") as file:
        for name in names:
            file[name] = np.zeros((4, SIDE, SIDE, SIDE), np.float32)
    assert refusal(path) == f"{path} has no dataset '{missing}': found {found}, expected Nbody and Hydro."


@pytest.mark.parametrize(
    ("name", "shape", "channels"),
    [
        ("Nbody", (5, SIDE, SIDE, SIDE), 4),
        ("Hydro", (4, SIDE, SIDE, SIDE), 5),
        ("Hydro", (SIDE, SIDE, SIDE, 5), 5),
        ("Nbody", (SIDE, SIDE, SIDE), 4),
        ("Nbody", (1, 4, SIDE, SIDE, SIDE), 4),
    ],
)
def test_channels_that_are_not_first_or_not_the_right_number(
    path: Path, name: str, shape: tuple[int, ...], channels: int
) -> None:
    assert refusal(write(path, **{name: shape})) == (
        f"{path}: {name} has the shape {shape}: expected {channels} channels first, then three equal sides."
    )


def test_a_box_that_is_no_cube(path: Path) -> None:
    assert refusal(write(path, Hydro=(5, 6, 8, 6))) == (
        f"{path}: Hydro is not a cube, its sides are (6, 8, 6): expected three equal ones."
    )


def test_fields_of_different_sizes(path: Path) -> None:
    assert refusal(write(path, Hydro=(5, 8, 8, 8))) == (
        f"{path}: Nbody and Hydro have different sizes, [6, 8]: expected the same box."
    )


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.complex64, "S4"])
def test_numbers_of_another_kind(path: Path, dtype: Any) -> None:
    assert refusal(write(path, dtype)) == f"{path}: Nbody is not a dataset of floating-point numbers."


def test_a_group_where_a_dataset_should_be(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_group("Nbody")
    assert refusal(path) == f"{path}: Nbody is not a dataset of floating-point numbers."


def test_a_box_that_is_smaller_than_a_crop(path: Path) -> None:
    assert refusal(write(path), crop=8) == (
        f"{path} is a box of 6^3 cells, smaller than data.crop=8. Set data.crop=6 or less, or use a larger box."
    )


@pytest.mark.parametrize(
    ("name", "cells", "value", "told"),
    [
        ("Nbody", [(2, 1, 5, 3)], np.nan, "Nbody channel 2 holds nan at cell (1, 5, 3) (1 such cells here)"),
        (
            "Hydro",
            [(4, 0, 0, 0), (4, 5, 5, 5)],
            np.inf,
            "Hydro channel 4 holds inf at cell (0, 0, 0) (2 such cells here)",
        ),
        ("Hydro", [(0, 5, 5, 5), (3, 0, 0, 1)], -np.inf, "Hydro channel 0 holds -inf at cell (5, 5, 5) (1 such cells"),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_that_are_no_numbers(
    path: Path, name: str, cells: list[tuple[int, ...]], value: float, told: str, dtype: Any
) -> None:
    with h5py.File(write(path, dtype), "r+") as file:
        for cell in cells:
            file[name][cell] = value  # pyright: ignore[reportIndexIssue]
    box = open_box(path, CROP)
    other = "Nbody" if name == "Hydro" else "Hydro"
    assert not read_field(box, other).any(), "the other field is good"
    with pytest.raises(DataError) as caught:
        read_field(box, name)
    assert str(caught.value).startswith(f"{path}: {told}")
    assert str(caught.value).endswith("expected finite numbers. Repair the file, or use another.")


def test_large_values_are_numbers(path: Path) -> None:
    """Their sum in single precision would not be one."""
    with h5py.File(write(path), "r+") as file:
        file["Nbody"][...] = np.finfo(np.float32).max  # pyright: ignore[reportIndexIssue]
    assert (read_field(open_box(path, CROP), "Nbody") == np.finfo(np.float32).max).all()


def test_pieces_that_do_not_unpack(path: Path) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for name, channels in (("Nbody", 4), ("Hydro", 5)):
            values = rng.normal(size=(channels, SIDE, SIDE, SIDE)).astype(np.float32)
            file.create_dataset(name, data=values, chunks=(1, SIDE, SIDE, SIDE), compression="gzip")
        spoilt = file["Hydro"].id.get_chunk_info(2).byte_offset
    content = bytearray(path.read_bytes())
    content[spoilt : spoilt + 40] = bytes(40)
    path.write_bytes(content)
    box = open_box(path, CROP)
    message = r"box\.h5: Hydro cannot be read: .*\. Make or copy it again\."
    with pytest.raises(DataError, match=message):
        read_field(box, "Hydro")
    crops = HostSource(read_disk(box), CROP, torch.device("cpu"), 1)
    with pytest.raises(DataError, match=message):
        crops.crops(Choices(np.zeros((1, 3), int), np.zeros(1, int)))
