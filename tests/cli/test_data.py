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
def test_images_are_packed_and_verified(tutti: Tutti, tmp_path: Path) -> None:
    tutti(*IMAGES)
    done = tutti("data", "pack", "tree", "packed", "--size", "24", "--workers", "2", "--verify", FORCE_COLOR="1")
    assert done.code == 0, done.all
    assert "12 training and 6 validation samples in 2 shards, " in done.out and " in packed\n" in done.out
    assert "12/12" in done.out and "6/6" in done.out
    assert last_line(done).endswith("every sample in packed is as it was packed")
    with open(tmp_path / "packed" / "train-00000.tar", "r+b") as file:
        file.seek(600)
        file.write(b"\x00\x01")
    done = tutti("data", "pack", "packed", "--verify")
    assert done.code == 1
    assert done.out.startswith("damaged: packed/train-00000.tar: class_000/0000.jpg: its content has changed\n")
    (tmp_path / "packed" / "train-00000.tar").unlink()
    assert tutti("data", "pack", "tree", "packed", "--size", "24").code == 0
    assert last_line(tutti("data", "pack", "packed", "--verify")) == "every sample in packed is as it was packed"


@pytest.mark.system
def test_ranks_of_a_launcher_pack_their_parts(tutti: Tutti, tmp_path: Path) -> None:
    tutti(*IMAGES)
    words = ("data", "pack", "tree", "packed", "--shard-mb", "0.01")
    ranks = [{"SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    job = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": "7", "SLURM_NODEID": "0"}
    job["SLURM_STEP_NODELIST"] = "localhost"
    done = [tutti(*words, **job, **rank) for rank in ranks]
    assert last_line(done[0]).startswith("part 0 of 2 is done; ")
    assert last_line(done[1]).startswith("12 training and 6 validation samples in ")


@pytest.mark.system
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "packed"], ["nowhere does not exist", "expected a folder with train/CLASS/"]),
        (["tree"], ["FOLDER is missing", "tutti data pack SOURCE FOLDER"]),
        (["tree", "packed", "--part", "2/2"], ["--part 2/2", "expected I/N"]),
        (["tree", "packed", "--corrupt", "keep"], ["--corrupt keep", "expected refuse or skip"]),
        (["tree", "packed", "--quality", "0"], ["--quality 0", "expected 1 to 100"]),
        (["tree", "packed", "--workers", "-1"], ["--workers -1", "expected 1 to "]),
        (["tree", "--verify"], ["tree is not a packed dataset", "tutti data pack FOLDER --verify"]),
        (["tree", "packed", "--labels", "file"], ["--validation and --labels belong together"]),
    ],
)
def test_what_cannot_be_packed_is_refused(tutti: Tutti, words: list[str], message: list[str]) -> None:
    assert_refused(tutti("data", "pack", *words), *message)


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
@pytest.mark.parametrize(
    "words", [["--help"], ["pack", "--help"], ["make", "images", "--help"], ["make", "nbody", "--help"]]
)
def test_help_needs_none_of_what_makes_data(words: list[str], tmp_path: Path) -> None:
    done = command(sys.executable, "-c", PROBE, "data", *words, cwd=tmp_path)
    assert last_line(done) == "[]"
    if words[0] == "make":
        assert f"tutti data make {words[1]} --out" in done.out
