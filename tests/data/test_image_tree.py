"""Image folders: stable ids, random numbers by sample, crops inside the image, and files that are not images."""

import json
import os
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Tutti
from PIL import Image
from rank_jobs import run_ranks, train

from tutti.config.layout import Layout
from tutti.config.plan import Plan
from tutti.data import decode
from tutti.data.decode import Choose, centre_view, crop_view, shift_view
from tutti.data.image_tree import MEAN, STD, image_tree
from tutti.data.loader import Loader, evaluation_batches
from tutti.data.make_images import make_images
from tutti.data.order import SampleOrder
from tutti.errors import ConfigError, DataError
from tutti.train.progress import SkippedFiles

CPU, SEED = torch.device("cpu"), 42
CLASSES, TRAIN, VALID, SIZE = 3, 4, 3, 24
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_images(tmp_path / "tree", classes=CLASSES, train=TRAIN, valid=VALID, size=40)


def opened(split: str, tree: Path, **options: Any) -> Any:
    given: dict[str, Any] = {"size": SIZE} | options
    return image_tree(split, str(tree), **given)


def steps(dataset: Any, workers: int, ranks: int = 1, rank: int = 0, epochs: int = 2) -> torch.Tensor:
    plan = Plan(Layout(ranks), 4, 4 // ranks, 4 // ranks, len(dataset), epochs)
    batches = Loader(dataset, plan, SampleOrder(plan, SEED), rank, CPU, workers, prefetch=0).steps(0)
    return torch.stack([batch.micro_batches[0][0] for batch in batches])


def evaluated(dataset: Any, workers: int, per_rank: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(evaluation_batches(dataset, 0, 1, per_rank, CPU, workers, SEED))


def spoil(tree: Path, *names: str) -> list[str]:
    """Cut files short, so that they begin like images and do not end like them."""
    for name in names:
        content = (tree / name).read_bytes()
        (tree / name).write_bytes(content[: len(content) // 2])
    return [str(tree / name) for name in names]


def decode_view(content: bytes, size: int, choose: Choose) -> np.ndarray:
    image = torch.empty((size, size, 3), dtype=torch.uint8)
    decode.decode_view(content, image.permute(2, 0, 1), choose)
    return image.numpy()


def ramp(width: int, height: int, path: Path) -> bytes:
    """A picture whose red is the column and whose green is the row."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = np.arange(width), np.arange(height)[:, None]
    Image.fromarray(pixels).save(path)
    return path.read_bytes()


def refusal(kind: type[Exception], split: str, tree: Path, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        opened(split, tree, **options)
    return str(caught.value)


# The tree.


def test_ids_follow_the_names_of_classes_and_files(tree: Path) -> None:
    for split, samples in (("train", TRAIN), ("valid", VALID)):
        dataset = opened(split, tree)
        assert len(dataset) == CLASSES * samples
        assert (dataset.input_shape, dataset.num_classes) == ((3, SIZE, SIZE), CLASSES)
        labels = [dataset[index][1] for index in range(len(dataset))]
        assert labels == [label for label in range(CLASSES) for _ in range(samples)]
        image = dataset[0][0]
        assert image.dtype == torch.uint8 and image.shape == (3, SIZE, SIZE)


def test_other_kinds_of_images_and_names_are_read(tree: Path) -> None:
    folder = tree / "train" / "class_001"
    with Image.open(folder / "0000.jpg") as image:
        source = image.convert("RGB")
    for name, mode in (("a.JPEG", "L"), ("b.jpeg", "CMYK"), ("c.png", "RGBA"), ("d.PNG", "P"), ("e.png", "LA")):
        source.convert(mode).save(folder / name)
    source.convert("P").save(folder / "f.png", transparency=bytes([0, 128]))
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden.jpg").write_text("no image")
    dataset = opened("train", tree, augment="none")
    assert len(dataset) == CLASSES * TRAIN + 6
    colours = [dataset[TRAIN + TRAIN + index] for index in range(6)]
    assert {label for _, label in colours} == {1}
    expected = dataset[TRAIN][0].float()
    for index in (1, 2, 3, 5):  # the others are grey
        assert (colours[index][0].float() - expected).abs().mean() < 12


@pytest.mark.parametrize("name", ["val", "valid", "test"])
def test_validation_goes_by_several_names(tree: Path, name: str) -> None:
    (tree / "validation").rename(tree / name)
    assert len(opened("valid", tree)) == CLASSES * VALID


def test_the_first_classes_by_name_can_be_taken_alone(tree: Path) -> None:
    whole = opened("valid", tree)
    for split, samples in (("train", TRAIN), ("valid", VALID)):
        dataset = opened(split, tree, classes=2)
        assert (len(dataset), dataset.num_classes) == (2 * samples, 2)
    assert torch.equal(opened("valid", tree, classes=2)[VALID][0], whole[VALID][0])
    message = refusal(DataError, "train", tree, classes=4)
    assert message.startswith(f"data.classes=4, but {tree}/train holds 3 classes: expected 1 to 3.")


def test_a_class_may_have_no_validation_images(tree: Path) -> None:
    for file in (tree / "validation" / "class_001").iterdir():
        file.unlink()
    (tree / "validation" / "class_001").rmdir()
    dataset = opened("valid", tree)
    assert [dataset[index][1] for index in range(len(dataset))] == [0, 0, 0, 2, 2, 2]


def test_trees_that_are_wrong_are_refused_with_the_folder(tree: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    message = refusal(DataError, "train", nowhere)
    assert message.startswith(
        f"{nowhere} holds no train/: expected a folder for each class in it. Set data.path=FOLDER"
    )
    assert f"tutti data make images --out {nowhere}" in message
    (nowhere / "train").mkdir(parents=True)
    assert refusal(DataError, "train", nowhere).startswith(f"{nowhere}/train holds no folders: expected one for each")
    (nowhere / "train" / "class_000").mkdir()
    message = refusal(DataError, "train", nowhere)
    assert message.startswith(
        f"{nowhere}/train/class_000 holds no images: expected files that end in .jpg, .jpeg, .png"
    )
    assert "holds no validation/ or val/ or valid/ or test/" in refusal(DataError, "valid", nowhere)
    (tree / "validation" / "class_002").rename(tree / "validation" / "class_02")
    message = refusal(DataError, "valid", tree)
    assert message.startswith(f"{tree}/validation/class_02 is a class that {tree}/train does not have. Did you mean")


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("size", 0, "data.size=0: expected at least 1 pixel"),
        ("scale", (0.5, 0.1), "data.scale=(0.5, 0.1): expected two shares of the area"),
        ("ratio", (0, 1), "data.ratio=(0, 1): expected two ratios"),
        ("shift", 1.5, "data.shift=1.5: expected a share"),
        ("zoom", 1.0, "data.zoom=1.0: expected a share"),
        ("centre", 0.0, "data.centre=0.0: expected a share of the shorter side"),
        ("augment", "crops", "data.augment='crops': expected one of crop, shift_zoom, none. Did you mean 'crop'?"),
        ("corrupt", "ignore", "data.corrupt='ignore': expected one of refuse, skip."),
    ],
)
def test_options_out_of_range_are_refused(tree: Path, option: str, value: Any, expected: str) -> None:
    assert refusal(ConfigError, "train", tree, **{option: value}).startswith(expected)


# Augmentation.


@pytest.mark.ranks
@pytest.mark.parametrize("augment", ["crop", "shift_zoom"])
def test_augmentation_depends_on_seed_epoch_and_sample_alone(tree: Path, augment: str) -> None:
    dataset = opened("train", tree, augment=augment)
    alone = steps(dataset, workers=0)
    assert len(alone.flatten(0, 1).unique(dim=0)) == 2 * CLASSES * TRAIN, "each sample anew in each epoch"
    for workers in (1, 2):
        assert torch.equal(steps(dataset, workers), alone)
    parts = [steps(dataset, workers=rank, ranks=2, rank=rank) for rank in range(2)]
    assert torch.equal(torch.cat(parts, dim=1), alone)


@pytest.mark.ranks
def test_validation_takes_no_chances(tree: Path) -> None:
    dataset = opened("valid", tree)
    first = evaluated(dataset, workers=0)
    random.seed(1)
    for workers in (0, 2):
        again = evaluated(dataset, workers)
        assert all(
            torch.equal(a, b) for one, other in zip(first, again, strict=True) for a, b in zip(one, other, strict=True)
        )
    plain = opened("train", tree, augment="none")
    random.seed(2)
    assert torch.equal(plain[5][0], plain[5][0])


@pytest.mark.parametrize(("width", "height"), [(500, 375), (40, 300), (3000, 20), (1, 1), (7, 5)])
@pytest.mark.parametrize("scale", [(0.08, 1.0), (1.0, 1.0)])
def test_crops_stay_inside_the_image(width: int, height: int, scale: tuple[float, float]) -> None:
    random.seed(0)
    for _ in range(300):
        view = crop_view(width, height, 32, scale, (0.75, 4 / 3), flip=True)
        left, top, right, bottom = view.box
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        view = shift_view(width, height, 32, 0.9, 0.9, flip=True)
        left, top, right, bottom = view.box
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        assert all(0 <= first < end <= 32 for first, end in (view.columns, view.rows))


def test_crops_keep_to_their_area_and_aspect() -> None:
    random.seed(0)
    boxes = [crop_view(400, 400, 32, (0.1, 0.5), (0.75, 4 / 3), flip=False).box for _ in range(500)]
    sides = np.array([(right - left, bottom - top) for left, top, right, bottom in boxes])
    areas, ratios = sides.prod(1) / 160_000, sides[:, 0] / sides[:, 1]
    assert 0.098 < areas.min() < 0.12 and 0.48 < areas.max() < 0.503
    assert 0.74 < ratios.min() < 0.78 and 1.28 < ratios.max() < 1.35
    assert abs(np.log(ratios).mean()) < 0.03, "wide and high are equally likely"


def test_half_of_the_images_are_mirrored() -> None:
    random.seed(0)
    for choose in (partial(crop_view, scale=(0.1, 1), ratio=(1, 1)), partial(shift_view, shift=0.3, zoom=0.5)):
        assert 430 < sum(choose(50, 50, 8, flip=True).flip for _ in range(1000)) < 570
        assert not any(choose(50, 50, 8, flip=False).flip for _ in range(100))


def test_a_crop_shows_the_pixels_of_its_box(tmp_path: Path) -> None:
    content = ramp(200, 100, tmp_path / "ramp.png")
    picture = decode_view(content, 50, partial(centre_view, share=0.5)).astype(float)
    assert picture[0, [0, -1], 0] == pytest.approx([75, 124], abs=1)
    assert picture[[0, -1], 0, 1] == pytest.approx([25, 74], abs=1)


def test_shift_and_zoom_are_one_map_with_edges_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Across: zoomed by 1.5, moved by a fifth. Down: zoomed by 0.5. The ramp then shows where each pixel is from."""
    content = ramp(200, 100, tmp_path / "ramp.png")
    drawn = iter([1.5, 0.2, 0.5, 0.0])
    monkeypatch.setattr(random, "uniform", lambda low, high: next(drawn))
    monkeypatch.setattr(random, "random", lambda: 0.1)
    picture = decode_view(content, 40, partial(shift_view, shift=0.33, zoom=0.5, flip=True)).astype(float)
    places = (np.arange(40) + 0.5) / 40 - 0.5
    across = ((places * 1.5 + 0.5 + 0.2) * 200).clip(0, 200) - 0.5
    down = ((places * 0.5 + 0.5) * 100) - 0.5
    shown = abs(across - 99.5) < 100 - 7.5 / 2  # pixels of the picture that lie in the image whole
    assert picture[20, ::-1, 0][shown] == pytest.approx(across[shown], abs=1.5)
    assert picture[20, ::-1, 0] == pytest.approx(across.clip(0, 199), abs=9.5), "edges to a pixel of the picture"
    assert picture[:, 20, 1] == pytest.approx(down, abs=1)
    assert (picture[:, :5, 0] == picture[:, :1, 0]).all(), "the right edge is repeated, and mirrored to the left"


def test_a_large_jpeg_gives_the_picture_of_its_full_decoding(tmp_path: Path) -> None:
    """Decoding at an eighth of the size is another filter, and the same part to a quarter of an output pixel."""
    grid = np.random.default_rng(0).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    image = Image.fromarray(grid).resize((801, 603), Image.Resampling.BICUBIC)
    image.save(tmp_path / "a.jpg", quality=95)
    image.save(tmp_path / "a.png")
    for choose in (partial(centre_view, share=0.9), lambda *_: crop_view(801, 603, 32, (1, 1), (1.3, 1.3), flip=False)):
        random.seed(0)
        small = decode_view((tmp_path / "a.jpg").read_bytes(), 32, choose).astype(float)
        random.seed(0)
        assert np.abs(small - decode_view((tmp_path / "a.png").read_bytes(), 32, choose)).mean() < 2.5


def test_finishing_normalises_each_channel(tree: Path) -> None:
    dataset = opened("valid", tree)
    pixels = torch.randint(0, 256, (2, 3, SIZE, SIZE), dtype=torch.uint8)
    with torch.inference_mode():
        dataset.finish(pixels)
    finished = dataset.finish(pixels)
    assert finished.dtype == torch.float32 and not finished.is_inference()
    for channel in range(3):
        expected = (pixels[:, channel].double() / 255 - MEAN[channel]) / STD[channel]
        torch.testing.assert_close(finished[:, channel].double(), expected, rtol=1e-5, atol=1e-5)
    given = evaluated(dataset, workers=0)[0][0]
    assert torch.equal(given, dataset.finish(torch.stack([dataset[0][0], dataset[1][0]])))


# Files that are no images.


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_corrupt_image_is_refused_by_name(tree: Path, split: str, workers: int) -> None:
    folder = "train" if split == "train" else "validation"
    (path,) = spoil(tree, f"{folder}/class_001/0002.jpg")
    dataset = opened(split, tree)
    with pytest.raises(DataError) as caught:
        steps(dataset, workers) if split == "train" else evaluated(dataset, workers)
    text = str(caught.value)
    assert text.startswith(f"{path} cannot be decoded as an image (image file is truncated")
    assert text.endswith("Replace or remove it, or skip such images with data.corrupt=skip.")
    assert "Traceback" not in text


@pytest.mark.parametrize(("content", "reason"), [(b"", "it is empty"), (b"<html>", "it begins with 3c 68 74 6d")])
def test_what_is_no_image_at_all_is_told(tree: Path, content: bytes, reason: str) -> None:
    (tree / "train" / "class_000" / "0000.jpg").write_bytes(content)
    with pytest.raises(DataError, match=rf"0000\.jpg cannot be decoded as an image \({reason}\)"):
        opened("train", tree)[0]


@pytest.mark.parametrize("corrupt", ["refuse", "skip"])
def test_a_file_that_is_gone_is_not_a_corrupt_one(tree: Path, corrupt: str) -> None:
    dataset = opened("train", tree, corrupt=corrupt)
    (tree / "train" / "class_000" / "0000.jpg").unlink()
    with pytest.raises(DataError, match=r"0000\.jpg cannot be read: No such file or directory\."):
        dataset[0]


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [0, 2])
def test_in_training_the_next_image_of_the_class_stands_in(tree: Path, workers: int) -> None:
    plain = opened("train", tree, augment="none", corrupt="skip")
    good = [plain[index][0] for index in range(len(plain))]
    spoiled = spoil(tree, "train/class_001/0002.jpg", "train/class_001/0003.jpg", "train/class_002/0000.jpg")
    stand_ins = {6: 4, 7: 4, 8: 9}  # the last of a class is followed by its first
    for index, other in stand_ins.items():
        found = plain[index]
        assert torch.equal(found[0], good[other]) and found[1] == index // TRAIN
    plain.skipped.clear()
    batches = steps(plain, workers, epochs=1)
    ids = SampleOrder(Plan(Layout(1), 4, 4, 4, 12, 1), SEED)
    expected = [good[stand_ins.get(int(i), int(i))] for step in range(3) for i in ids.global_ids(step)]
    assert torch.equal(batches.flatten(0, 1), plain.finish(torch.stack(expected)))
    assert sorted(set(plain.skipped)) == spoiled


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [0, 2])
def test_in_validation_a_corrupt_image_is_left_out(tree: Path, workers: int) -> None:
    dataset = opened("valid", tree, corrupt="skip")
    good = dict(enumerate(dataset[index] for index in range(len(dataset))))
    spoiled = spoil(
        tree, "validation/class_000/0001.jpg", "validation/class_000/0002.jpg", "validation/class_001/0000.jpg"
    )
    pairs = evaluated(dataset, workers)
    assert [len(targets) for _, targets in pairs] == [1, 2, 2, 1], "the second batch has nothing left"
    left = [good[index] for index in (0, 4, 5, 6, 7, 8)]
    assert torch.cat([targets for _, targets in pairs]).tolist() == [label for _, label in left]
    assert torch.equal(
        torch.cat([found for found, _ in pairs]), dataset.finish(torch.stack([image for image, _ in left]))
    )
    assert dataset.skipped == spoiled


def test_a_class_without_one_good_image_is_refused(tree: Path) -> None:
    spoil(tree, *(f"train/class_001/{number:04d}.jpg" for number in range(TRAIN)))
    with pytest.raises(
        DataError, match=r"^none of the images in .*train/class_001 can be decoded: expected at least one"
    ):
        opened("train", tree, corrupt="skip")[TRAIN]


# In a run.


def values(tree: Path, out: Path, **options: Any) -> dict[str, Any]:
    data = {"name": "tutti.data.image_tree:image_tree", "path": str(tree), "size": SIZE, **options}
    return {
        "recipe": "images",
        "data": data,
        "model": {"name": "small_cnn", "width": 4},
        "optim": {"name": "sgd", "lr": 0.01},
        "batch": {"global": 4, "eval": 2},
        "epochs": 2,
        "log": {"every_steps": 2, "tensorboard": False},
        "out": str(out),
    }


def epoch_events(folder: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "epoch"]


@pytest.mark.ranks
def test_skipped_images_are_named_once_by_each_rank_and_counted_over_all(tree: Path, tmp_path: Path) -> None:
    spoiled = spoil(
        tree, "train/class_000/0001.jpg", "train/class_002/0003.jpg", "validation/class_000/0000.jpg",
        "validation/class_002/0002.jpg",
    )  # fmt: skip
    given = values(tree, tmp_path / "out", corrupt="skip")
    folder = run_ranks(2, train, given)[0]["folder"]
    assert [event["skipped_images"] for event in epoch_events(folder)] == [4, 4]
    logs = [path.read_text() for path in sorted((folder / "logs").glob("rank*"))]
    assert len(logs) == 2
    named = [[name for name in spoiled if f"skipped {name}: it cannot be decoded\n" in log] for log in logs]
    assert set(named[0]) | set(named[1]) == set(spoiled)
    assert all(log.count(f"skipped {name}:") <= 1 for log in logs for name in spoiled)
    assert f"4 image(s) skipped so far, since they cannot be decoded: {', '.join(spoiled[:3])}, ..." in logs[0]
    (first,) = folder.glob("checkpoints/step-000003")
    resumed = run_ranks(1, train, given, str(first))[0]["folder"]
    assert [event["skipped_images"] for event in epoch_events(resumed)] == [4, 4]


@pytest.mark.ranks
def test_a_run_ends_when_no_validation_image_is_left(tree: Path, tmp_path: Path) -> None:
    spoil(tree, *(str(path.relative_to(tree)) for path in tree.glob("validation/*/*.jpg")))
    (error,) = run_ranks(1, train, values(tree, tmp_path / "out", corrupt="skip"), expect_failure=True)
    assert isinstance(error, DataError)
    assert str(error).startswith("none of the 9 validation images can be decoded: expected at least one.")


@pytest.mark.ranks
def test_a_corrupt_image_ends_a_run_with_one_message(tutti: Tutti, tree: Path, tmp_path: Path) -> None:
    (path,) = spoil(tree, "train/class_001/0002.jpg")
    recipe = tmp_path / "images.yaml"
    recipe.write_text(json.dumps(values(tree, tmp_path / "out", workers=2)))
    done = tutti("train", str(recipe), "-n", "2")
    assert done.code == 2, done.all
    assert done.err.count("cannot be decoded") == 1
    assert f"error: {path} cannot be decoded as an image (image file is truncated" in done.err
    assert "Traceback" not in done.all


def test_a_skipped_file_whose_name_is_no_text_is_named(tmp_path: Path) -> None:
    data = SimpleNamespace(skipped=[os.fsdecode(b"a/caf\xe9.jpg"), "a/b.jpg"])
    group: Any = SimpleNamespace(gather=lambda own: [own])
    said: list[str] = []
    journal: Any = SimpleNamespace(say=said.append)
    files = SkippedFiles([data], tmp_path / "log", group, journal)
    files.log()
    assert files.report() == {"skipped_images": 2}
    assert (tmp_path / "log").read_text().splitlines() == [
        "skipped a/b.jpg: it cannot be decoded",
        r"skipped a/caf\xe9.jpg: it cannot be decoded",
    ]
    assert said[0].endswith(r"a/b.jpg, a/caf\xe9.jpg") and json.loads(json.dumps(files.names)) == files.names
