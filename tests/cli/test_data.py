"""`tutti data`: the files it writes, its output, and the input it refuses."""

import sys
from pathlib import Path

import h5py
import pytest
from conftest import Finished, Tutti, command

IMAGES = ("data", "make", "images", "--out", "tree", "--classes", "3", "--train", "4", "--valid", "2", "--size", "32")
NBODY = ("data", "make", "nbody", "--out", "boxes/train.h5", "--box", "16")
PROBE = """
import sys
from tutti.cli.main import app
app(args=sys.argv[1:], standalone_mode=False)
print([name for name in ("torch", "h5py", "PIL") if name in sys.modules])
"""


def last_line(done: Finished) -> str:
    assert done.code == 0, done.all
    return done.out.splitlines()[-1]


def assert_refused(done: Finished, *words: str) -> None:
    assert done.code == 2, done.all
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    for word in words:
        assert word in done.err, done.err


@pytest.mark.system
def test_a_tree_of_images_is_made_and_named(tutti: Tutti, tmp_path: Path) -> None:
    done = tutti(*IMAGES)
    assert last_line(done) == "12 training and 6 validation images of 3 classes in tree"
    assert done.out.count("\n") == 1  # no bars where there is no terminal
    found = sorted(path.relative_to(tmp_path / "tree").parent.as_posix() for path in tmp_path.rglob("*.jpg"))
    assert found == [f"train/class_00{label}" for label in range(3) for _ in range(4)] + [
        f"validation/class_00{label}" for label in range(3) for _ in range(2)
    ]


@pytest.mark.system
def test_a_terminal_shows_a_bar_for_each_split(tutti: Tutti) -> None:
    done = tutti(*IMAGES, FORCE_COLOR="1")
    assert last_line(done).endswith("in tree")
    assert "12/12" in done.out and "6/6" in done.out


@pytest.mark.system
def test_a_box_is_made_with_its_picture_and_both_are_named(tutti: Tutti, tmp_path: Path) -> None:
    done = tutti(*NBODY, "--seed", "7", "--cell", "0.5")
    assert last_line(done) == "a box of 16^3 cells in boxes/train.h5, a picture of its slices in boxes/train.png"
    with h5py.File(tmp_path / "boxes" / "train.h5") as file:
        assert (file.attrs["box"], file.attrs["seed"], file.attrs["cell"]) == (16, 7, 0.5)
    assert (tmp_path / "boxes" / "train.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.system
def test_a_box_is_replaced_only_when_asked_to(tutti: Tutti, tmp_path: Path) -> None:
    place = tmp_path / "boxes" / "train.h5"
    place.parent.mkdir()
    place.write_text("mine")
    assert_refused(tutti(*NBODY), "boxes/train.h5 exists already")
    assert place.read_text() == "mine"
    assert tutti(*NBODY, "--overwrite").code == 0
    assert h5py.is_hdf5(place)


@pytest.mark.system
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*IMAGES, "--classes", "0"), ["--classes 0", "expected at least 1"]),
        ((*IMAGES, "--out", "file/tree"), ["file/tree cannot be written", "Choose another folder with --out"]),
        ((*NBODY, "--box", "17"), ["box=17", "expected an even number of cells", "Try box=18"]),
        ((*NBODY, "--device", "quantum"), ["device='quantum'", "expected cpu, cuda or cuda:N"]),
        ((*NBODY, "--out", "file/box.h5"), ["file cannot be written to", "Choose another folder"]),
        ((*NBODY, "--out", "folder", "--overwrite"), ["folder cannot be written: ", "Choose another file with --out"]),
    ],
)
def test_what_cannot_be_made_is_refused(tutti: Tutti, tmp_path: Path, words: list[str], message: list[str]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    assert_refused(tutti(*words), *message)
    assert not list((tmp_path / "folder").iterdir())


@pytest.mark.system
@pytest.mark.parametrize("words", [["--help"], ["make", "images", "--help"], ["make", "nbody", "--help"]])
def test_help_needs_none_of_what_makes_data(words: list[str], tmp_path: Path) -> None:
    done = command(sys.executable, "-c", PROBE, "data", *words, cwd=tmp_path)
    assert last_line(done) == "[]"
    if len(words) > 1:
        assert f"tutti data make {words[1]} --out" in done.out
