"""MNIST from its IDX files, plain or gzipped, and errors for damaged files."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from tutti.data.mnist import MEAN, STD, mnist, read_idx
from tutti.data.order import Draws
from tutti.errors import DataError

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
PIXELS = (np.arange(6 * 4 * 5) * 7 % 256).astype(np.uint8).reshape(6, 4, 5)
DIGITS = np.array([3, 0, 9, 1, 1, 7], np.uint8)


def idx(array: np.ndarray, kind: int = 0x08) -> bytes:
    """The bytes of an IDX file."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape) + array.tobytes()


def put(folder: Path, name: str, content: bytes, zipped: bool = False) -> Path:
    path = folder / (f"{name}.gz" if zipped else name)
    path.write_bytes(gzip.compress(content) if zipped else content)
    return path


def refusal(path: Path, split: str = "train") -> str:
    with pytest.raises(DataError) as caught:
        mnist(split, str(path))
    return str(caught.value)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("split", ["train", "valid"])
def test_images_and_labels_are_read_and_normalised(tmp_path: Path, split: str, zipped: bool) -> None:
    prefix = "train" if split == "train" else "t10k"
    put(tmp_path, f"{prefix}-images-idx3-ubyte", idx(PIXELS), zipped)
    put(tmp_path, f"{prefix}-labels-idx1-ubyte", idx(DIGITS), not zipped)
    dataset = mnist(split, str(tmp_path))
    assert (len(dataset), dataset.input_shape, dataset.num_classes) == (6, (1, 4, 5), 10)
    inputs, targets = dataset.batch(torch.arange(6), None)
    expected = (torch.from_numpy(PIXELS).double() / 255 - MEAN) / STD
    torch.testing.assert_close(inputs.double(), expected.unsqueeze(1), rtol=1e-5, atol=1e-5)
    assert targets.dtype == torch.int64 and targets.tolist() == DIGITS.tolist()


def test_only_the_training_images_are_shifted(tmp_path: Path) -> None:
    for prefix in ("train", "t10k"):
        put(tmp_path, f"{prefix}-images-idx3-ubyte", idx(PIXELS))
        put(tmp_path, f"{prefix}-labels-idx1-ubyte", idx(DIGITS))
    ids = torch.arange(6)
    train, valid = (mnist(split, str(tmp_path), shift=2) for split in ("train", "valid"))
    assert not torch.equal(train.batch(ids, Draws(1, 1, ids))[0], train.batch(ids, None)[0])
    assert torch.equal(valid.batch(ids, Draws(1, 1, ids))[0], valid.batch(ids, None)[0])


def test_a_missing_file_is_refused_with_the_command_that_brings_it(tmp_path: Path) -> None:
    put(tmp_path, LABELS, idx(DIGITS))
    message = (
        f"MNIST file {IMAGES}[.gz] is not in {tmp_path}. Fetch it with: tutti data get mnist --out {tmp_path}. "
        "Or set data.path=FOLDER, or TUTTI_DATA to the folder that holds mnist/."
    )
    assert refusal(tmp_path) == message
    assert refusal(tmp_path / "absent").startswith(f"MNIST file {IMAGES}[.gz] is not in {tmp_path / 'absent'}.")
    assert refusal(tmp_path, "valid").startswith("MNIST file t10k-images-idx3-ubyte[.gz] is not in ")


@pytest.mark.parametrize("cut", [17, 100, len(idx(PIXELS)) - 1])
def test_a_file_cut_short_is_refused(tmp_path: Path, cut: int) -> None:
    put(tmp_path, LABELS, idx(DIGITS))
    path = put(tmp_path, IMAGES, idx(PIXELS)[:cut])
    assert refusal(tmp_path) == (
        f"{path} is truncated: its header states 136 bytes, it has {cut}. Fetch it again with: tutti data get mnist."
    )


@pytest.mark.parametrize(
    "content",
    [gzip.compress(idx(PIXELS), mtime=0)[:-9], b"no gzip at all", gzip.compress(b"", mtime=0)[:5]],
    ids=["cut short", "no gzip at all", "a header alone"],
)
def test_a_gzipped_file_cut_short_or_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    put(tmp_path, LABELS, idx(DIGITS))
    path = tmp_path / f"{IMAGES}.gz"
    path.write_bytes(content)
    message = refusal(tmp_path)
    assert message.startswith(f"{path} cannot be read: ")
    assert message.endswith("Fetch it again with: tutti data get mnist.")


@pytest.mark.parametrize(
    ("content", "magic"),
    [
        (b"<html>not found</html>", "3c68746d"),
        (idx(DIGITS), "00000801"),
        (idx(PIXELS, kind=0x0D), "00000d03"),
        (b"", ""),
        (idx(PIXELS)[:15], "00000803"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_how_it_opens(tmp_path: Path, content: bytes, magic: str) -> None:
    path = put(tmp_path, IMAGES, content)
    with pytest.raises(DataError) as caught:
        read_idx(path, 3)
    assert str(caught.value) == (f"{path} is not an IDX file of bytes in 3 dimension(s): it begins with {magic}.")


def test_a_file_with_more_than_its_header_states_is_not_called_truncated(tmp_path: Path) -> None:
    path = put(tmp_path, IMAGES, idx(PIXELS) + b"more")
    with pytest.raises(DataError, match=r"states 136 bytes, it has 140") as caught:
        read_idx(path, 3)
    assert "truncated" not in str(caught.value)


def test_images_and_labels_of_different_lengths_are_refused(tmp_path: Path) -> None:
    images = put(tmp_path, IMAGES, idx(PIXELS))
    labels = put(tmp_path, LABELS, idx(DIGITS[:5]))
    assert refusal(tmp_path) == f"{images} holds 6 images, {labels} 5 labels: expected equal."


def test_the_real_files_are_what_they_promise(mnist_folder: Path) -> None:
    train, valid = (mnist(split, str(mnist_folder)) for split in ("train", "valid"))
    assert (len(train), len(valid), train.input_shape, train.num_classes) == (60_000, 10_000, (1, 28, 28), 10)
    inputs, targets = train.batch(torch.arange(60_000), None)
    assert targets[:5].tolist() == [5, 0, 4, 1, 9]
    assert abs(float(inputs.mean())) < 1e-3 and abs(float(inputs.std()) - 1) < 1e-3
