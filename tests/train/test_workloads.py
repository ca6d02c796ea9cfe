"""The tutorials' workloads from end to end, small: each trains on two ranks, and data that is wrong is refused."""

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import Finished, Tutti

from tutti.data.make_images import make_images

SMALL_BOX = ("data.crop=16", "data.box=32", "model.depth=3", "model.width=4")
SHAPES = {"Nbody": (4, 16, 16, 16), "Hydro": (5, 16, 16, 16)}


def write_cifar(folder: Path, images: int = 40) -> Path:
    """A small CIFAR-10 in its binary form."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        labels = np.arange(images) % 10
        records = np.concatenate([labels[:, None], rng.integers(0, 256, (images, 3072))], 1).astype(np.uint8)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder


def write_boxes(folder: Path, change: Callable[[h5py.File], None] = lambda file: None, **shapes: Any) -> list[str]:
    """Two small boxes, the one for training changed; the options that name them."""
    for split in ("train", "valid"):
        with h5py.File(folder / f"{split}.h5", "w") as file:
            for name, shape in (SHAPES | shapes if split == "train" else SHAPES).items():
                file.create_dataset(name, data=np.random.default_rng(0).normal(size=shape).astype(np.float32))
            if split == "train":
                change(file)
    return [f"data.{split}={folder / split}.h5" for split in ("train", "valid")]


def record(folder: Path) -> dict[str, Any]:
    """Of the one run that is there."""
    found = list(folder.rglob("record.json"))
    assert len(found) == 1
    assert (found[0].parent / "metrics.jsonl").is_file() and (found[0].parent / "config.yaml").is_file()
    return json.loads(found[0].read_text())


def assert_trained(done: Finished, folder: Path, samples: int) -> None:
    assert done.code == 0, done.all
    written = record(folder)
    assert written["state"] == "finished" and written["ranks"] == 2
    assert written["plan"]["train_samples"] == samples
    assert np.isfinite(written["results"]["valid_loss"])
    assert "run folder" in done.out


def assert_refused(done: Finished, folder: Path, *words: str) -> None:
    assert done.code == 2, done.all
    assert done.err.count("error: ") == 1 and "Traceback" not in done.all
    for word in words:
        assert word in done.err, done.err
    assert not (folder / "runs").exists()


# Runs.


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("run", "options"),
    [
        ("cnn", ["model.width=4"]),
        ("resnet_small", ["batch.per_rank=4", "log.tensorboard=false"]),
        ("fast", ["log.tensorboard=false", "model.widths=[8, 16, 16]", "batch.global=40", "schedule.warmup_epochs=0"]),
        ("muon", ["log.tensorboard=false", "model.widths=[8, 16, 16]", "batch.global=40"]),
    ],
)
def test_cifar10(tutti: Tutti, tmp_path: Path, run: str, options: list[str]) -> None:
    images = 8 if run == "resnet_small" else 40
    folder = write_cifar(tmp_path / "cifar10", images)
    warmup = [] if run in ("fast", "muon") else ["schedule.warmup_epochs=0.5"]
    batch = ["batch.per_rank=10"] if run == "cnn" else []
    words = [f"data.path={folder}", "epochs=1", "batch.eval=20", *warmup, *batch, *options]
    assert_trained(tutti("train", f"cifar10/{run}", "-n", "2", *words), tmp_path, 5 * images)


@pytest.mark.ranks
def test_imagenet(tutti: Tutti, tmp_path: Path) -> None:
    tree = make_images(tmp_path / "tree", classes=2, train=4, valid=2, size=64)
    words = [f"data.path={tree}", "data.size=64", "data.workers=1", "batch.per_rank=2", "epochs=1"]
    words += ["schedule.warmup_epochs=0", "checkpoint.every_epochs=null", "log.tensorboard=false"]
    done = tutti("train", "imagenet/resnet50", "-n", "2", *words)
    assert_trained(done, tmp_path, 8)
    assert record(tmp_path)["results"]["valid_top5"] == 1, "there are two classes"


@pytest.mark.ranks
def test_nbody_makes_its_boxes_and_trains(tutti: Tutti, tmp_path: Path) -> None:
    words = [*SMALL_BOX, "data.train_samples=8", "data.valid_samples=4", "batch.global=4", "epochs=1"]
    done = tutti("train", "nbody/short", "-n", "2", *words, TUTTI_DATA=str(tmp_path))
    assert_trained(done, tmp_path, 8)
    assert done.out.count("does not exist: making a box of") == 2
    assert f"data: {tmp_path}/nbody/train.h5 (32^3), source memory" in done.out
    assert "valid_accuracy" not in record(tmp_path)["results"]


# Data that is wrong.


def without_hydro(file: h5py.File) -> None:
    file.move("Hydro", "hydro")


def with_nan(file: h5py.File) -> None:
    hydro: Any = file["Hydro"]
    hydro[1, 2, 3, 4] = np.nan


@pytest.mark.system
@pytest.mark.parametrize(
    ("change", "shapes", "options", "words"),
    [
        (without_hydro, {}, [], ["train.h5 has no dataset 'Hydro': found Nbody, hydro"]),
        (None, {"Nbody": (3, 16, 16, 16)}, [], ["Nbody has the shape (3, 16, 16, 16): expected 4 channels first"]),
        (None, {}, ["data.crop=24"], ["train.h5 is a box of 16^3 cells, smaller than data.crop=24", "data.crop=16"]),
    ],
)
def test_a_box_that_is_wrong_is_refused(
    tutti: Tutti, tmp_path: Path, change: Any, shapes: dict[str, Any], options: list[str], words: list[str]
) -> None:
    given = write_boxes(tmp_path, change or (lambda file: None), **shapes)
    small = ["data.train_samples=8", "batch.global=4", *SMALL_BOX]
    assert_refused(tutti("train", "nbody", *small, *given, *options), tmp_path, *words)


@pytest.mark.ranks
def test_every_rank_refuses_a_box_once(tutti: Tutti, tmp_path: Path) -> None:
    given = write_boxes(tmp_path, with_nan)
    small = ["data.train_samples=8", "batch.global=4", *SMALL_BOX]
    done = tutti("train", "nbody", "-n", "2", *small, *given)
    assert_refused(done, tmp_path, "train.h5: Hydro channel 1 holds nan at cell (2, 3, 4)", "Repair the file")


@pytest.mark.ranks
def test_a_fault_that_shows_while_crops_are_read_ends_the_run_in_words(tutti: Tutti, tmp_path: Path) -> None:
    """From disk, numbers are only looked at when a crop meets them: here every crop does."""
    given = write_boxes(tmp_path, with_nan)
    small = ["data.train_samples=8", "data.valid_samples=2", "batch.global=4", *SMALL_BOX, "data.source=disk"]
    done = tutti("train", "nbody", "-n", "2", *small, *given)
    assert done.code == 2, done.all
    assert "Hydro channel 1 holds nan at cell (2, 3, 4)" in done.err
    assert "Traceback" not in done.all and done.err.count("error: ") == 1


@pytest.mark.system
def test_missing_boxes_are_named_with_what_makes_them(tutti: Tutti, tmp_path: Path) -> None:
    done = tutti("train", "nbody", TUTTI_DATA=str(tmp_path))
    assert_refused(
        done, tmp_path, "nbody/train.h5 does not exist", "tutti data make nbody --out", "data.source=synthetic"
    )


@pytest.mark.system
def test_a_class_folder_without_images_is_refused(tutti: Tutti, tmp_path: Path) -> None:
    tree = make_images(tmp_path / "tree", classes=2, train=2, valid=1, size=16)
    for image in (tree / "train" / "class_001").iterdir():
        image.unlink()
    done = tutti("train", "imagenet/resnet18", f"data.path={tree}", "data.size=32")
    assert_refused(done, tmp_path, "train/class_001 holds no images: expected files that end in .jpg")


@pytest.mark.system
def test_a_truncated_archive_is_refused(tutti: Tutti, tmp_path: Path) -> None:
    folder = write_cifar(tmp_path / "cifar-10-batches-bin")
    archive = tmp_path / "cifar.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder, folder.name)
    archive.write_bytes(archive.read_bytes()[:100_000])
    done = tutti("train", "cifar10/cnn", f"data.path={archive}", TUTTI_CACHE=str(tmp_path / "cache"))
    assert_refused(done, tmp_path, "cifar.tar.gz cannot be read as a tar archive", "Fetch or copy it again")
