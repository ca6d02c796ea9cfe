"""Generated image folders: complete, reproducible by seed, and with distinguishable classes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tutti.data.make_images import MARK, make_images
from tutti.errors import DataError


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.jpg"))}


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def mean_colours(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The mean colour of every picture of a split, and its class."""
    paths = sorted(folder.glob("*/*.jpg"))
    colours = np.array([pixels(path).reshape(-1, 3).mean(0) for path in paths])
    return colours, np.array([int(path.parent.name.removeprefix("class_")) for path in paths])


def test_a_tree_has_its_classes_and_pictures_of_about_the_asked_size(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    made = make_images(tmp_path / "tree", classes=3, train=4, valid=2, size=64, report=lambda *a: told.append(a))
    assert made == tmp_path / "tree"
    assert list(files(made)) == [
        f"{split}/class_{label:03d}/{sample:04d}.jpg"
        for split, samples in (("train", 4), ("validation", 2))
        for label in range(3)
        for sample in range(samples)
    ]
    sizes = {pixels(path).shape[:2] for path in made.rglob("*.jpg")}
    assert len(sizes) > 6
    assert all(0.8 * 64 - 1 <= side <= 1.25 * 64 for size in sizes for side in size)
    assert told == [("train", n, 12) for n in range(1, 13)] + [("validation", n, 6) for n in range(1, 7)]
    assert json.loads((made / MARK).read_text())["classes"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["tree"], "nothing else stays"


def test_the_seed_decides_every_byte(tmp_path: Path) -> None:
    first, same, other = (
        files(make_images(tmp_path / str(number), classes=2, train=2, valid=2, size=32, seed=seed))
        for number, seed in enumerate((5, 5, 6))
    )
    assert first == same
    assert not set(first.values()) & set(other.values())
    assert len(set(first.values())) == len(first), "no picture twice, over splits and classes"


@pytest.mark.ranks
def test_workers_draw_the_same_images(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    alone = make_images(tmp_path / "alone", classes=3, train=5, valid=2, size=32, seed=3)
    together = make_images(
        tmp_path / "together", classes=3, train=5, valid=2, size=32, seed=3, report=lambda *a: told.append(a), workers=3
    )
    assert files(together) == files(alone)
    assert told == [("train", n, 15) for n in range(1, 16)] + [("validation", n, 6) for n in range(1, 7)]


def test_a_picture_does_not_depend_on_how_many_there_are(tmp_path: Path) -> None:
    few = files(make_images(tmp_path / "few", classes=2, train=2, valid=1, size=32))
    many = files(make_images(tmp_path / "many", classes=3, train=3, valid=2, size=32))
    assert few.items() <= many.items()


def test_classes_can_be_told_apart(tmp_path: Path) -> None:
    """The nearest mean colour of the training classes names most validation pictures; a network sees stripes too."""
    made = make_images(tmp_path / "tree", classes=8, train=12, valid=8, size=48)
    (seen, labels), (asked, truth) = mean_colours(made / "train"), mean_colours(made / "validation")
    centres = np.stack([seen[labels == label].mean(0) for label in range(8)])
    named = np.linalg.norm(asked[:, None] - centres, axis=2).argmin(1)
    assert (named == truth).mean() > 0.6


def test_its_own_tree_is_replaced_whole(tmp_path: Path) -> None:
    make_images(tmp_path / "tree", classes=3, train=2, valid=1, size=32)
    make_images(tmp_path / "tree", classes=2, train=1, valid=1, size=32)
    assert len(files(tmp_path / "tree")) == 4


def test_an_empty_folder_is_filled_and_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "scratch")
    make_images(tmp_path / "link", classes=1, train=1, valid=1, size=32)
    assert (tmp_path / "link").is_symlink()
    assert len(files(tmp_path / "scratch")) == 2


def test_what_it_did_not_make_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "mine.jpg").write_bytes(b"precious")
    with pytest.raises(DataError) as caught:
        make_images(tmp_path, classes=1, train=1, valid=1, size=32)
    assert str(caught.value) == (
        f"{tmp_path} is not empty and was not made by this command: expected a new or an empty folder. "
        "Choose another with --out, or empty it first."
    )
    assert files(tmp_path) == {"train/mine.jpg": b"precious"}
    with pytest.raises(DataError, match=r"mine\.jpg is a file: expected a folder"):
        make_images(tmp_path / "train" / "mine.jpg")


def test_an_interrupted_making_leaves_what_was_there(tmp_path: Path) -> None:
    make_images(tmp_path / "tree", classes=1, train=1, valid=1, size=32)
    before = files(tmp_path / "tree")

    def stop(split: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_images(tmp_path / "tree", classes=2, train=2, valid=2, size=32, report=stop)
    assert files(tmp_path / "tree") == before
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("classes", 0, "at least 1"),
        ("train", 0, "at least 1"),
        ("valid", -1, "at least 1"),
        ("size", 8, "at least 16"),
        ("size", 100_000, "at most 4,096"),
        ("seed", -1, "at least 0"),
    ],
)
def test_numbers_that_make_no_tree_are_refused(tmp_path: Path, option: str, value: int, expected: str) -> None:
    given: dict[str, Any] = {option: value}
    with pytest.raises(DataError, match=rf"^--{option} {value}: expected {expected}\.$"):
        make_images(tmp_path / "tree", **given)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be written: Not a directory\. Choose another folder with --out\.$"):
        make_images(tmp_path / "file" / "tree", classes=1, train=1, valid=1, size=32)
