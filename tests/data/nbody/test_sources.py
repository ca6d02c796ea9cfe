"""Crops from memory, disk and a device: the same numbers for any layout of the file."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from tutti.data.dataset import Part
from tutti.data.nbody import sources
from tutti.data.nbody.box import CHANNELS, SCALARS, BoxFile, open_box, read_field
from tutti.data.nbody.device_source import DeviceSource
from tutti.data.nbody.sources import (
    Choices,
    HostSource,
    InMemory,
    Source,
    channel_sources,
    read_disk,
    transformed,
)
from tutti.errors import DataError

CPU = torch.device("cpu")
SIDE, CROP = 13, 4
FIELDS = {
    name: np.random.default_rng(seed).normal(size=(channels, SIDE, SIDE, SIDE)).astype(np.float32)
    for seed, (name, channels) in enumerate(CHANNELS.items())
}
Crops = tuple[torch.Tensor, torch.Tensor]

LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "chunked": {"chunks": (1, 4, 4, 4)},
    "all channels in a chunk": {"chunks": True},
    "chunks that divide nothing": {"chunks": (3, 5, 7, 2)},
    "a chunk larger than a crop": {"chunks": (2, 13, 6, 9)},
    "compressed": {"chunks": (2, 5, 5, 5), "compression": "gzip"},
    "with checksums": {"chunks": (4, 5, 5, 5), "fletcher32": True},
    "double precision": {"dtype": np.float64},
    "double precision in chunks": {"dtype": np.float64, "chunks": (1, 6, 6, 6)},
    "big-endian": {"dtype": ">f4"},
}
ON_PAGES = {
    "contiguous",
    "chunked",
    "all channels in a chunk",
    "chunks that divide nothing",
    "a chunk larger than a crop",
}


def write(path: Path, fields: dict[str, np.ndarray] = FIELDS, block: int = 0, **layout: Any) -> BoxFile:
    with h5py.File(path, "w", userblock_size=block) as file:
        for name, field in fields.items():
            options = layout
            if layout.get("chunks") is True:
                options = layout | {"chunks": (len(field), 6, 6, 6)}
            file.create_dataset(name, data=field, **options)
    return open_box(path, CROP)


def every_symmetry() -> Choices:
    """All symmetries, at places over the whole box with its eight corners among them."""
    far = SIDE - CROP
    ends = np.stack(np.meshgrid(*[[0, far]] * 3), -1).reshape(-1, 3)
    others = np.random.default_rng(1).integers(0, far + 1, (40, 3))
    return Choices(np.concatenate([ends, others]), np.arange(48))


def expected(choices: Choices) -> Crops:
    """Crop first, then turn: the meaning of a choice, sample by sample."""
    found = {name: np.empty((len(choices), channels, *[CROP] * 3), np.float32) for name, channels in CHANNELS.items()}
    for sample, symmetry in enumerate(choices.symmetries):
        window = tuple(slice(start, start + CROP) for start in choices.corners[sample])
        for name, crops in found.items():
            crop = FIELDS[name][(slice(None), *window)]
            for channel, (source, sign) in enumerate(channel_sources(SCALARS[name], symmetry, choices.vectors)):
                crops[sample, channel] = sign * transformed(crop[source], symmetry)
    return torch.from_numpy(found["Nbody"]), torch.from_numpy(found["Hydro"])


def memory(threads: int = 1) -> Source:
    return HostSource(InMemory(FIELDS), CROP, CPU, threads)


def device(threads: int = 1) -> Source:
    return DeviceSource(iter(FIELDS.items()), CROP, CPU)


def assert_same(found: Crops, wanted: Crops) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("source", [memory, device])
def test_memory_and_device_give_the_crops_of_all_symmetries(source: Callable[[], Source], vectors: bool) -> None:
    choices = every_symmetry()
    choices = Choices(choices.corners, choices.symmetries, vectors)
    assert_same(source().crops(choices), expected(choices))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_disk_gives_the_same_whatever_the_layout_of_the_file(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    through_library = []
    library = sources._library
    monkeypatch.setattr(sources, "_library", lambda box: through_library.append(box) or library(box))
    box = write(tmp_path / "box.h5", **LAYOUTS[layout])
    disk = HostSource(read_disk(box), CROP, CPU, 1)
    assert_same(disk.crops(every_symmetry()), expected(every_symmetry()))
    assert bool(through_library) == (layout not in ON_PAGES)


@pytest.mark.parametrize("layout", ["contiguous", "chunked"])
def test_a_file_that_begins_with_a_block_of_the_users(tmp_path: Path, layout: str) -> None:
    box = write(tmp_path / "box.h5", block=1024, **LAYOUTS[layout])
    disk = HostSource(read_disk(box), CROP, CPU, 1)
    assert_same(disk.crops(every_symmetry()), expected(every_symmetry()))


def test_chunks_that_were_never_written_hold_the_fill_value(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "box.h5", "w") as file:
        for name, channels in CHANNELS.items():
            made = file.create_dataset(name, (channels, 8, 8, 8), np.float32, chunks=(channels, 4, 4, 4), fillvalue=0.5)
            made[:, 4:] = 2.0
    disk = HostSource(read_disk(open_box(tmp_path / "box.h5", CROP)), CROP, CPU, 1)
    inputs, targets = disk.crops(Choices(np.array([[2, 0, 3]]), np.array([0])))
    for crops in (inputs, targets):
        assert (crops[:, :, :2] == 0.5).all() and (crops[:, :, 2:] == 2).all()


@pytest.mark.parametrize("layout", ["chunked", "compressed"])
def test_the_number_of_threads_does_not_matter(tmp_path: Path, layout: str) -> None:
    box = write(tmp_path / "box.h5", **LAYOUTS[layout])
    for source in (memory(3), HostSource(read_disk(box), CROP, CPU, 3)):
        for _ in range(3):
            assert_same(source.crops(every_symmetry()), expected(every_symmetry()))


def test_a_batch_of_one_and_a_crop_as_large_as_the_box(tmp_path: Path) -> None:
    box = write(tmp_path / "box.h5", **LAYOUTS["chunks that divide nothing"])
    choices = Choices(np.zeros((1, 3), np.int64), np.array([0]))
    for source in (
        HostSource(InMemory(FIELDS), SIDE, CPU, 3),
        HostSource(read_disk(box), SIDE, CPU, 3),
        DeviceSource(iter(FIELDS.items()), SIDE, CPU),
    ):
        for crops, field in zip(source.crops(choices), FIELDS.values(), strict=True):
            assert np.array_equal(crops[0].numpy(), field)


@pytest.mark.parametrize("make", [memory, device])
def test_a_batch_is_not_overwritten_by_the_next(make: Callable[[], Source]) -> None:
    """Nor is a part of it while somebody holds that, whatever memory the source takes again."""
    source, choices = make(), every_symmetry()
    others = Choices(choices.corners[::-1].copy(), choices.symmetries[::-1].copy())
    first = source.crops(choices)
    part = source.crops(choices)[1][5:7, 2:].numpy()
    for _ in range(3):
        source.crops(others)
    assert_same(first, expected(choices))
    assert np.array_equal(part, expected(choices)[1][5:7, 2:].numpy())


def test_inputs_of_the_device_have_their_channels_innermost() -> None:
    inputs, _ = device().crops(every_symmetry())
    assert inputs.is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize("layout", ["chunked", "compressed", "contiguous"])
@pytest.mark.parametrize(("value", "threads"), [(np.nan, 1), (-np.inf, 3)])
def test_disk_refuses_what_is_no_number_where_a_crop_meets_it(
    tmp_path: Path, layout: str, value: float, threads: int
) -> None:
    fields = {name: field.copy() for name, field in FIELDS.items()}
    fields["Hydro"][3, 9, 2, 11] = value
    box = write(tmp_path / "box.h5", fields, **LAYOUTS[layout])
    source = HostSource(read_disk(box), CROP, CPU, threads)
    corners = np.array([[0, 0, 0], [0, 2, 9], [5, 2, 9]])
    assert len(source.crops(Choices(corners, np.zeros(3, int)))[0]) == 3, "no crop meets it"
    with pytest.raises(DataError) as caught:
        source.crops(Choices(np.array([[0, 0, 0], [8, 2, 9]]), np.array([0, 17])))
    assert str(caught.value) == (
        f"{tmp_path}/box.h5: Hydro channel 3 holds {value} at cell (9, 2, 11) (1 such cells here): "
        "expected finite numbers. Repair the file, or use another."
    )


def test_a_whole_field_is_read_as_it_is(tmp_path: Path) -> None:
    for number, layout in enumerate(LAYOUTS.values()):
        box = write(tmp_path / f"{number}.h5", **layout)
        for name, field in FIELDS.items():
            found = read_field(box, name)
            assert found.dtype == np.float32 and np.array_equal(found, field)


@pytest.mark.parametrize("parts", [(2,), (1, 4), (2, 2, 1), (4, 1, 2)])
def test_a_part_is_cut_from_the_crop_under_its_symmetry(tmp_path: Path, parts: tuple[int, ...]) -> None:
    choices, box = every_symmetry(), write(tmp_path / "box.h5", chunks=(2, 5, 5, 5))
    packed = write(tmp_path / "packed.h5", chunks=(2, 5, 5, 5), compression="gzip")
    opened: list[Source] = [
        HostSource(InMemory(FIELDS), CROP, CPU, threads=2),
        HostSource(read_disk(box), CROP, CPU, threads=1),
        HostSource(read_disk(packed), CROP, CPU, threads=1),
        DeviceSource(iter(FIELDS.items()), CROP, CPU),
    ]
    wanted = expected(choices)
    for place in np.ndindex(*parts):
        part = Part(parts, tuple(int(index) for index in place))
        window = tuple(slice(start, start + size) for start, size in part.window([CROP] * 3))
        for source in opened:
            found = source.crops(replace(choices, part=part))
            for crops, whole in zip(found, wanted, strict=True):
                assert torch.equal(crops, whole[(..., *window)])
