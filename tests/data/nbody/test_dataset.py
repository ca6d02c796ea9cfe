"""Crops as a dataset: random numbers by sample, fixed validation crops, and the choice of the source."""

import itertools
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from tutti.config.layout import Layout
from tutti.config.load import resolve
from tutti.config.parts import NbodyOptions
from tutti.config.plan import Plan
from tutti.data.loader import Loader
from tutti.data.nbody import dataset as module
from tutti.data.nbody.box import CHANNELS, BoxFile
from tutti.data.nbody.dataset import NbodyCrops, choose_source, nbody
from tutti.data.nbody.sources import Choices
from tutti.data.order import Draws, SampleOrder
from tutti.errors import DataError
from tutti.ranks.environments import discover
from tutti.train.build import build_data

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SIDE, CROP = 8, 4
BOX = BoxFile(Path("box.h5"), 512)  # 4.5 GiB


@pytest.fixture
def boxes(tmp_path: Path) -> dict[str, str]:
    """The options that name a training box and a validation box."""
    found = {}
    for seed, split in enumerate(("train", "valid")):
        found[split] = str(tmp_path / f"{split}.h5")
        rng = np.random.default_rng(seed)
        with h5py.File(found[split], "w") as file:
            for name, channels in CHANNELS.items():
                file[name] = rng.normal(size=(channels, SIDE, SIDE, SIDE)).astype(np.float32)
    return found


def opened(split: str, boxes: dict[str, str], **options: Any) -> NbodyCrops:
    given: dict[str, Any] = {"crop": CROP, "train_samples": 24, "valid_samples": 6} | options
    return nbody(split, **boxes, **given)


def stored(path: str | Path) -> dict[str, np.ndarray]:
    """The fields of a box file."""
    with h5py.File(path) as file:
        return {name: np.asarray(file[name]) for name in CHANNELS}


class Recorder:
    """A source that remembers what was chosen."""

    def __init__(self) -> None:
        self.choices: list[Choices] = []

    def crops(self, choices: Choices) -> tuple[torch.Tensor, torch.Tensor]:
        self.choices.append(choices)
        return torch.zeros(len(choices)), torch.zeros(len(choices))


def choices(samples: int, draws: bool, symmetries: bool = True, side: int = SIDE) -> Choices:
    source, ids = Recorder(), torch.arange(samples)
    crops = NbodyCrops(source, side, CROP, samples, symmetries, True, "")
    crops.batch(ids, Draws(1, 0, ids) if draws else None)
    return source.choices[0]


def steps(data: NbodyCrops, ranks: int = 1, rank: int = 0, seed: int = 5) -> list[torch.Tensor]:
    """Inputs and targets of two epochs, epochs x samples of this rank."""
    plan = Plan(Layout(ranks), 8, 8 // ranks, 8 // ranks, len(data), 2)
    batches = Loader(data, plan, SampleOrder(plan, seed), rank, CPU, 0, prefetch=0).steps(0)
    return [torch.stack(part) for part in zip(*(batch.micro_batches[0] for batch in batches), strict=True)]


def test_a_split_has_the_shape_and_the_number_of_samples_of_the_recipe(boxes: dict[str, str]) -> None:
    for split, samples in (("train", 24), ("valid", 6)):
        data = opened(split, boxes)
        assert len(data) == samples
        assert data.input_shape == (4, CROP, CROP, CROP)
        assert data.num_classes is None
        inputs, targets = data.batch(torch.arange(3), None)
        assert inputs.shape == (3, 4, CROP, CROP, CROP) and targets.shape == (3, 5, CROP, CROP, CROP)


def test_augmentation_depends_on_seed_epoch_and_sample_alone(boxes: dict[str, str]) -> None:
    data = opened("train", boxes)
    inputs, targets = steps(data)
    assert len(inputs.flatten(0, 1).flatten(1).unique(dim=0)) == 48, "each sample anew in each epoch"
    again = steps(opened("train", boxes, source="disk"))
    parts = [steps(data, ranks=2, rank=rank) for rank in range(2)]
    for whole, other, *halves in zip((inputs, targets), again, *parts, strict=True):
        assert torch.equal(other, whole)
        assert torch.equal(torch.cat(halves, dim=1), whole)
    assert not torch.equal(steps(data, seed=6)[0], inputs)


def test_inputs_and_targets_are_cut_at_the_same_place(boxes: dict[str, str]) -> None:
    fields = stored(boxes["train"])
    fields["Hydro"][0], fields["Hydro"][2:] = fields["Nbody"][0], fields["Nbody"][1:]
    with h5py.File(boxes["train"], "w") as file:
        for name, field in fields.items():
            file[name] = field
    for source in ("memory", "disk", "device"):
        inputs, targets = steps(opened("train", boxes, source=source))
        assert torch.equal(inputs[:, :, 0], targets[:, :, 0]) and torch.equal(inputs[:, :, 1:], targets[:, :, 2:])


@pytest.mark.parametrize("option", ["symmetries", "vectors"])
def test_turning_can_be_switched_off(boxes: dict[str, str], option: str) -> None:
    turned, plain = steps(opened("train", boxes))[0], steps(opened("train", boxes, **{option: False}))[0]
    densities, velocities = (torch.equal(turned[:, :, part], plain[:, :, part]) for part in (0, slice(1, 4)))
    assert (densities, velocities) == (option == "vectors", False)
    if option == "symmetries":
        densities = stored(boxes["train"])["Nbody"][0]
        views = np.lib.stride_tricks.sliding_window_view(densities, [CROP] * 3).reshape(-1, CROP**3)
        known = {view.tobytes() for view in views}
        assert all(crop.numpy().tobytes() in known for crop in plain[:, :, 0].flatten(0, 1))


def test_validation_crops_are_fixed_and_not_turned(boxes: dict[str, str]) -> None:
    ids = torch.tensor([4, 0, 2])
    first = opened("valid", boxes).batch(ids, None)
    again = opened("valid", boxes, source="disk", train_samples=99).batch(ids, None)
    alone = opened("valid", boxes).batch(ids[:1], None)
    for crops, others, one in zip(first, again, alone, strict=True):
        assert torch.equal(crops, others) and torch.equal(crops[:1], one)
    assert not choices(100, draws=False).symmetries.any()
    found = opened("valid", boxes)
    views = np.lib.stride_tricks.sliding_window_view(stored(boxes["valid"])["Hydro"], [CROP] * 3, axis=(1, 2, 3))
    known = {views[:, i, j, k].tobytes() for i, j, k in itertools.product(range(SIDE - CROP + 1), repeat=3)}
    assert all(crop.numpy().tobytes() in known for crop in found.batch(torch.arange(6), None)[1])


@pytest.mark.parametrize("draws", [True, False])
def test_every_place_and_every_symmetry_is_drawn(draws: bool) -> None:
    found = choices(5000, draws)
    places, counts = np.unique(found.corners, axis=0, return_counts=True)
    assert len(places) == (SIDE - CROP + 1) ** 3 and places.min() == 0 and places.max() == SIDE - CROP
    assert counts.min() > 15 and counts.max() < 80, "40 are expected"
    if draws:
        _, counts = np.unique(found.symmetries, return_counts=True)
        assert len(counts) == 48 and counts.min() > 60 and counts.max() < 160, "104 are expected"


def test_a_box_of_the_size_of_a_crop_has_one_place() -> None:
    assert not choices(50, draws=True, side=CROP).corners.any()


def test_synthetic_data_needs_no_files(tmp_path: Path) -> None:
    nowhere = {"train": str(tmp_path / "no.h5"), "valid": str(tmp_path / "no.h5")}
    train, again, valid = (opened(s, nowhere, source="synthetic", box=16) for s in ("train", "train", "valid"))
    assert train.note == "random numbers"
    one, other, third = (data.batch(torch.arange(4), None) for data in (train, again, valid))
    for crops, same, different in zip(one, other, third, strict=True):
        assert torch.equal(crops, same) and not torch.equal(crops, different)
        assert -1 <= crops.min() < -0.9 and 0.9 < crops.max() <= 1
    assert opened("train", nowhere, source="synthetic", box=16, crop=32).input_shape == (4, 32, 32, 32)
    assert not list(tmp_path.iterdir())


# Where a box is kept.


@pytest.mark.parametrize("wish", ["memory", "disk", "device"])
def test_the_source_of_the_recipe_is_taken(wish: str) -> None:
    assert choose_source(wish, BOX, CPU, 1) == (wish, "as the recipe says")


@pytest.mark.parametrize(
    ("free", "ranks", "expected"),
    [
        (11.5, 1, ("memory", "4.5 GiB fit in memory, of which each rank has 11.5 GiB free")),
        (11.0, 1, ("disk", "4.5 GiB are too much for the 11.0 GiB of free memory of each rank")),
        (40.0, 4, ("disk", "4.5 GiB are too much for the 10.0 GiB of free memory of each rank")),
        (48.0, 4, ("memory", "4.5 GiB fit in memory, of which each rank has 12.0 GiB free")),
    ],
)
def test_a_box_is_kept_in_memory_where_it_fits(
    monkeypatch: pytest.MonkeyPatch, free: float, ranks: int, expected: tuple[str, str]
) -> None:
    monkeypatch.setattr(module, "_free_memory_gib", lambda: free)
    assert choose_source("auto", BOX, CPU, ranks) == expected


@pytest.mark.parametrize(
    ("on_gpu", "in_memory", "expected"),
    [
        (80, 100, ("device", "4.5 GiB fit on the GPU, which has 80.0 GiB free")),
        (10, 100, ("memory", "4.5 GiB fit in memory, of which each rank has 100.0 GiB free")),
        (10, 10, ("disk", "4.5 GiB are too much for the 10.0 GiB of free memory of each rank")),
    ],
)
def test_a_box_is_kept_on_the_gpu_where_it_fits(
    monkeypatch: pytest.MonkeyPatch, on_gpu: int, in_memory: int, expected: tuple[str, str]
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (on_gpu * 2**30, 80 * 2**30))
    monkeypatch.setattr(module, "_free_memory_gib", lambda: float(in_memory))
    assert choose_source("auto", BOX, GPU, 1) == expected


def test_free_memory_is_read_from_the_system() -> None:
    assert 0 < module._free_memory_gib() < 100_000


def test_the_note_says_where_the_crops_come_from(boxes: dict[str, str]) -> None:
    assert opened("train", boxes).note.startswith(f"{boxes['train']} (8^3), source memory: 0.0 GiB fit in memory")
    assert opened("valid", boxes, source="disk").note == f"{boxes['valid']} (8^3), source disk: as the recipe says"


def test_every_source_gives_the_same_crops(boxes: dict[str, str]) -> None:
    by_source = [steps(opened("train", boxes, source=source)) for source in ("memory", "disk", "device")]
    for other in by_source[1:]:
        for one, another in zip(by_source[0], other, strict=True):
            assert torch.equal(one, another)


# Boxes that are not there.


def missing(folder: Path, **options: Any) -> tuple[Path, Path]:
    train, valid = folder / "boxes" / "train.h5", folder / "boxes" / "valid.h5"
    NbodyOptions(train=str(train), valid=str(valid), **({"box": 16, "make": True} | options)).prepare()
    return train, valid


def test_boxes_that_are_missing_are_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, valid = missing(tmp_path)
    told = capsys.readouterr().out
    assert told.splitlines()[0] == f"{train} does not exist: making a box of 16^3 cells"
    assert told.splitlines()[1].startswith(f"{valid} does not exist: making a box of ")
    made = train.read_bytes(), valid.read_bytes()
    times = [path.stat().st_mtime_ns for path in (train, valid)]
    assert stored(train)["Nbody"].shape == (4, 16, 16, 16)
    with h5py.File(train) as one, h5py.File(valid) as other:
        assert one.attrs["seed"] != other.attrs["seed"]
    assert missing(tmp_path) == (train, valid)
    assert capsys.readouterr().out == ""
    assert (train.read_bytes(), valid.read_bytes()) == made
    assert [path.stat().st_mtime_ns for path in (train, valid)] == times
    data = nbody("train", str(train), str(valid), crop=8, train_samples=2)
    assert torch.isfinite(data.batch(torch.arange(2), None)[0]).all()


@pytest.mark.parametrize("options", [{"make": False}, {"source": "synthetic"}])
def test_nothing_is_made_where_the_recipe_does_not_allow_or_need_it(tmp_path: Path, options: dict[str, Any]) -> None:
    missing(tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_a_box_that_is_there_is_never_replaced(tmp_path: Path) -> None:
    train = tmp_path / "boxes" / "train.h5"
    train.parent.mkdir()
    train.write_text("precious")
    missing(tmp_path)
    assert train.read_text() == "precious"
    with pytest.raises(DataError, match="cannot be opened as an HDF5 file"):
        nbody("train", str(train), str(train))


@pytest.mark.parametrize("source", ["memory", "disk", "device"])
@pytest.mark.parametrize("split", ["train", "valid"])
def test_inputs_are_rounded_to_the_precision_of_the_run_and_targets_are_not(
    boxes: dict[str, str], split: str, source: str
) -> None:
    ids = torch.arange(6)

    def batch(**options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return opened(split, boxes, source=source, **options).batch(ids, Draws(1, 0, ids) if split == "train" else None)

    inputs, targets = batch()
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        rounded, same = batch(precision=precision)
        assert rounded.dtype == dtype and torch.equal(rounded, inputs.to(dtype))
        assert same.dtype == torch.float32 and torch.equal(same, targets)
    assert torch.equal(batch(precision="bf16", rounded=False)[0], inputs)


@pytest.mark.parametrize(("words", "dtype"), [((), torch.bfloat16), (("precision=fp32",), torch.float32)])
def test_a_recipe_gives_its_precision_to_its_data(
    boxes: dict[str, str], words: tuple[str, ...], dtype: torch.dtype
) -> None:
    paths = (f"data.{split}={path}" for split, path in boxes.items())
    config = resolve("nbody/short_opt", [*paths, f"data.crop={CROP}", *words]).config
    for data in build_data(config, discover({}), CPU):
        assert data.batch(torch.arange(2), None)[0].dtype == dtype
