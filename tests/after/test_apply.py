"""Trained models applied to files: volumes in tiles, samples in batches, images; written whole or not at all."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import after_work
import h5py
import numpy as np
import pytest
import torch
from conftest import Call
from PIL import Image
from rank_jobs import run_ranks, train

import tutti
from tutti.after import apply as applying
from tutti.after import tiles
from tutti.data.builtin import digits
from tutti.models.unet3d import UNet3d

pytestmark = pytest.mark.ranks

SMALL = {"epochs": 1, "max_steps": 2, "checkpoint": {"every_steps": 2}, "log": {"tensorboard": False}}
UNET: dict[str, Any] = {
    "recipe": "unet",
    "data": {"name": "nbody", "source": "synthetic", "crop": 8, "box": 16, "train_samples": 4, "valid_samples": 2},
    "model": {"name": "unet3d", "width": 4, "depth": 2},
    "loss": {"name": "l1"},
    "metrics": [],
    "optim": {"name": "adam", "lr": 0.05},
    "batch": {"global": 2},
}


@pytest.fixture(scope="module")
def unet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_ranks(1, train, UNET | SMALL | {"out": str(tmp_path_factory.mktemp("unet"))})[0]["folder"]


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = after_work.VALUES | SMALL | {"batch": {"global": 64, "eval": 50}}
    return run_ranks(1, train, values | {"out": str(tmp_path_factory.mktemp("digits"))})[0]["folder"]


def test_a_box_in_tiles_is_the_box_in_one_pass(unet: Path, tmp_path: Path, call_tutti: Call) -> None:
    box = np.random.default_rng(0).standard_normal((4, 32, 36, 40)).astype(np.float32)
    with h5py.File(tmp_path / "box.h5", "w") as file:
        file["Nbody"] = box
    out = tmp_path / "hydro.h5"
    code, said, err = call_tutti("apply", str(unet), f"{tmp_path}/box.h5:Nbody", "--out", str(out), "--tile", "24")
    assert code == 0, err
    assert "18 tiles of 24 x 24 x 24 cells, which overlap by 7 x 7 x 7 on each side: as one pass over the whole" in said
    with torch.no_grad():
        whole = tutti.open_run(unet).model()(torch.from_numpy(box)[None])[0].numpy()
    with h5py.File(out) as file:
        np.testing.assert_allclose(np.array(file["outputs"]), whole, atol=1e-5)
    np.save(tmp_path / "box.npy", np.stack([box, -box]))
    words = ("--out", str(tmp_path / "two.npy"), "--tile", "40")
    code, said, err = call_tutti("apply", str(unet), str(tmp_path / "box.npy"), *words)
    assert code == 0 and "one pass over the whole volume" in said, err
    two = np.load(tmp_path / "two.npy")
    assert two.shape == (2, 5, 32, 36, 40) and np.abs(two[0] - whole).max() < 1e-5
    assert sorted(each.name for each in tmp_path.iterdir()) == ["box.h5", "box.npy", "hydro.h5", "two.npy"]


def save_box(folder: Path) -> np.ndarray:
    box = np.random.default_rng(0).standard_normal((4, 32, 36, 40)).astype(np.float32)
    np.save(folder / "box.npy", box)
    return box


def whole_pass(unet: Path, box: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return tutti.open_run(unet).model()(torch.from_numpy(box)[None])[0].numpy()


def test_tiles_are_as_large_as_the_memory_allows(
    unet: Path, tmp_path: Path, call_tutti: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = whole_pass(unet, save_box(tmp_path))
    for free, said in ((1 << 40, "one pass over the whole volume"), (8 << 20, " tiles of ")):
        monkeypatch.setattr(tiles, "_free_memory", lambda device, free=free: free)
        out = tmp_path / f"{free}.npy"
        code, printed, err = call_tutti("apply", str(unet), str(tmp_path / "box.npy"), "--out", str(out))
        assert code == 0 and said in printed, err
        np.testing.assert_allclose(np.load(out), whole, atol=1e-5)


def test_tiles_that_do_not_fit_are_made_smaller(
    unet: Path, tmp_path: Path, call_tutti: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, forward = whole_pass(unet, save_box(tmp_path)), UNet3d.forward
    passed: list[int] = []

    def limited(self: UNet3d, volume: torch.Tensor) -> torch.Tensor:
        passed.append(volume[0, 0].numel())
        if passed[-1] > 25 * 36 * 40:
            raise torch.OutOfMemoryError("no memory is left")
        return forward(self, volume)

    monkeypatch.setattr(UNet3d, "forward", limited)
    monkeypatch.setattr(tiles, "_free_memory", lambda device: 1 << 40)
    words = ("apply", str(unet), str(tmp_path / "box.npy"), "--out", str(tmp_path / "hydro.h5"))
    code, said, err = call_tutti(*words)
    assert code == 0, err
    assert "one pass over the whole volume\nout of memory: smaller tiles are tried\n" in said
    with h5py.File(tmp_path / "hydro.h5") as file:
        np.testing.assert_allclose(np.array(file["outputs"]), whole, atol=1e-5)
    code, _, err = call_tutti(*words, "--tile", "40", "--force")
    assert code == 2 and "a tile of 32 x 36 x 40 cells needs more memory than there is: no memory is left" in err


def test_what_cannot_be_written_leaves_nothing_behind(
    unet: Path, tmp_path: Path, call_tutti: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_box(tmp_path)

    @contextlib.contextmanager
    def full(*_: Any) -> Iterator[Any]:
        def write(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        yield write

    monkeypatch.setattr(applying, "_opened_output", full)
    words = ("--out", str(tmp_path / "hydro.npy"), "--tile", "24")
    code, _, err = call_tutti("apply", str(unet), str(tmp_path / "box.npy"), *words)
    assert code == 2 and "hydro.npy cannot be written: No space left on device" in err
    assert [each.name for each in tmp_path.iterdir()] == ["box.npy"]


def test_bytes_are_normalised_as_in_training(classes: Path, tmp_path: Path, call_tutti: Call) -> None:
    data = digits("valid")
    inputs, _ = data.batch(torch.arange(120), None)
    raw = data._inputs[:120].numpy()
    np.save(tmp_path / "raw.npy", raw)
    np.save(tmp_path / "floats.npy", inputs.numpy())
    images = tmp_path / "images"
    images.mkdir()
    for number in range(3):
        Image.fromarray(raw[number, 0]).save(images / f"{number}.png")
    given_out = (("raw.npy", "raw_out.npy"), ("floats.npy", "out.npy"), ("images", "out.csv"), ("images", "UPPER.CSV"))
    for given, out in given_out:
        code, _, err = call_tutti("apply", str(classes), str(tmp_path / given), "--out", str(tmp_path / out))
        assert code == 0, err
    with torch.no_grad():
        expected = tutti.open_run(classes).model()(inputs).numpy()
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, atol=1e-5)
    np.testing.assert_array_equal(np.load(tmp_path / "raw_out.npy"), np.load(tmp_path / "out.npy"))
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert (tmp_path / "UPPER.CSV").read_text().splitlines() == lines
    assert lines[0] == "input,highest,0,1,2,3,4,5,6,7,8,9"
    rows = [line.split(",") for line in lines[1:]]
    assert [(name, int(highest)) for name, highest, *_ in rows] == [
        (f"{number}.png", int(expected[number].argmax())) for number in range(3)
    ]
    np.testing.assert_allclose(np.array([row[2:] for row in rows], np.float64), expected[:3], atol=1e-5)


@pytest.mark.parametrize(
    ("given", "words", "said"),
    [
        ("none.npy", [], "none.npy: no such file"),
        ("notes.txt", [], "expected a .npy file, FILE.h5:DATASET, an image or a folder of images"),
        ("bad.npy", [], "cannot be read as an array of NumPy"),
        ("empty.npy", [], "cannot be read as an array of NumPy"),
        ("integers.npy", [], "training, of the shape [1, 8, 8]; numbers that are not floating-point numbers stay"),
        ("wide.npy", [], "holds float64 of the shape [2, 64]: expected numbers for inputs of the shape [1, 8, 8]"),
        ("channels.npy", [], "have 3 channels: expected 1"),
        ("box.h5", [], "expected {here}/box.h5:DATASET, with one of Nbody"),
        ("large.png", [], "large.png has 9 x 9 pixels: expected 8 x 8, as in training"),
        ("bad.png", [], "bad.png cannot be decoded as an image"),
        ("one.npy", ["--tile", "4"], "--tile and --overlap are for models that give a value for each cell"),
        ("one.npy", ["--out", "{here}/out.txt"], "expected a file that ends in .npy, .h5"),
        ("one.npy", ["--out", "{here}/one.npy", "--force"], "one.npy holds the inputs: expected another file"),
        ("box.h5:Nbody", ["--out", "{here}/box.h5", "--force"], "box.h5 holds the inputs: expected another file"),
        ("one.npy", ["--out", "{here}/notes.npy"], "notes.npy exists: expected a new file"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isascii() and "." in value[:9] else "",
)
def test_bad_inputs_are_refused_and_nothing_is_written(
    classes: Path, tmp_path: Path, call_tutti: Call, given: str, words: list[str], said: str
) -> None:
    for name in ("notes.txt", "bad.npy", "notes.npy", "bad.png"):
        (tmp_path / name).write_text("notes")
    (tmp_path / "empty.npy").touch()
    np.save(tmp_path / "integers.npy", np.zeros((2, 1, 8, 8), np.int32))
    np.save(tmp_path / "wide.npy", np.zeros((2, 64)))
    np.save(tmp_path / "channels.npy", np.zeros((2, 3, 8, 8), np.float32))
    np.save(tmp_path / "one.npy", np.zeros((1, 8, 8), np.float32))
    Image.new("L", (9, 9)).save(tmp_path / "large.png")
    with h5py.File(tmp_path / "box.h5", "w") as file:
        file["Nbody"] = np.zeros((1, 8, 8))
    before = sorted(tmp_path.iterdir())
    words = [word.format(here=tmp_path) for word in words]
    out = [] if "--out" in words else ["--out", str(tmp_path / "out.npy")]
    code, _, err = call_tutti("apply", str(classes), str(tmp_path / given), *out, *words)
    assert code == 2 and said.format(here=tmp_path) in err
    assert sorted(tmp_path.iterdir()) == before
