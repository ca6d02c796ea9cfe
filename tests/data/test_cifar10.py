"""CIFAR-10 in all its file formats: the same samples from each, cached once decoded, and errors for damaged files."""

import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import DATA
from PIL import Image

from tutti.data import cifar10 as module
from tutti.data.cifar10 import CLASSES, MEAN, STD, cifar10, find, read
from tutti.data.dataset import Flip
from tutti.data.order import Draws
from tutti.errors import DataError

COUNTS = {"train": 3, "valid": 2}  # images of each class
LABELS = {split: np.repeat(np.arange(10), count) for split, count in COUNTS.items()}
PIXELS = {
    split: np.random.Generator(np.random.PCG64(count)).integers(0, 256, (10 * count, 3, 32, 32), np.uint8)
    for split, count in COUNTS.items()
}
Write = Callable[[Path], None]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for each test."""
    folder = tmp_path_factory.mktemp("cache") / "new"
    monkeypatch.setenv("TUTTI_CACHE", str(folder))
    return folder


def batches() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Images and labels of each batch file."""
    found = {"test_batch": (PIXELS["valid"], LABELS["valid"])}
    for number, ids in enumerate(np.array_split(np.arange(30), 5), start=1):
        found[f"data_batch_{number}"] = (PIXELS["train"][ids], LABELS["train"][ids])
    return found


def record(label: int, pixels: np.ndarray) -> bytes:
    return bytes([label]) + pixels.tobytes()


def write_binary(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (pixels, labels) in batches().items():
        content = b"".join(record(label, image) for label, image in zip(labels, pixels, strict=True))
        (folder / f"{name}.bin").write_bytes(content)


def write_python(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (pixels, labels) in batches().items():
        batch = {"data": pixels.reshape(len(pixels), -1), "labels": labels.tolist()}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=4))


def write_python_2(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (pixels, labels) in batches().items():
        (folder / name).write_bytes(python_2_pickle(pixels, labels))


def python_2_pickle(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    """What Python 2 and its numpy write for {"data": array, "labels": list}, as in the published files."""

    def text(content: bytes) -> bytes:
        return b"U" + bytes([len(content)]) + content

    kind = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNN" + 2 * b"J\xff\xff\xff\xff"
    shape = b"K" + bytes([len(pixels)]) + b"M\x00\x0c\x86"
    raw = b"T" + struct.pack("<i", pixels.nbytes) + pixels.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    array += b"(K\x01" + shape + kind + b"K\x00tb" + b"\x89" + raw + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


def write_tree(folder: Path, valid: str = "test", ending: str = ".png") -> None:
    for split, tree in (("train", "train"), ("valid", valid)):
        for row, (label, image) in enumerate(zip(LABELS[split], PIXELS[split], strict=True)):
            place = folder / tree / CLASSES[label] / f"{row % COUNTS[split]:04}{ending}"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(png(image))


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).save(file, "PNG")
    return file.getvalue()


def pack(folder: Path, archive: Path, prefix: str = ".", seed: int = 0) -> Path:
    """All that is in a folder, in a random order."""
    members = sorted(folder.rglob("*"))
    modes: dict[str, Any] = {".xz": "w:xz", ".gz": "w:gz", ".tgz": "w:gz", ".tar": "w:"}
    with tarfile.open(archive, modes[archive.suffix]) as file:
        for index in np.random.Generator(np.random.PCG64(seed)).permutation(len(members)):
            file.add(members[index], f"{prefix}/{members[index].relative_to(folder)}", recursive=False)
    return archive


def expect_all(path: Path) -> None:
    """Both splits are at a path."""
    for split in ("train", "valid"):
        images, labels = read(split, find(path))
        assert images.dtype == np.uint8 and labels.dtype == np.int64
        assert images.flags.c_contiguous and images.flags.writeable
        assert np.array_equal(images, PIXELS[split])
        assert np.array_equal(labels, LABELS[split])


def refusal(path: Path, split: str = "train") -> str:
    with pytest.raises(DataError) as caught:
        cifar10(split, str(path))
    return str(caught.value)


FORMS: dict[str, Write] = {
    "binary": write_binary,
    "binary below": lambda folder: write_binary(folder / "cifar-10-batches-bin"),
    "python": write_python,
    "python below": lambda folder: write_python(folder / "cifar-10-batches-py"),
    "python 2": write_python_2,
    "tree": write_tree,
    "tree with valid": lambda folder: write_tree(folder, "valid", ".PNG"),
    "tree with validation": lambda folder: write_tree(folder, "validation"),
}


@pytest.mark.parametrize("write", FORMS.values(), ids=FORMS.keys())
def test_every_form_gives_the_same_samples(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "cifar10")
    expect_all(tmp_path / "cifar10")


@pytest.mark.parametrize("ending", [".tar", ".tar.gz", ".tgz", ".tar.xz"])
@pytest.mark.parametrize("form", ["binary below", "python 2", "tree"])
def test_every_form_may_be_in_an_archive(tmp_path: Path, form: str, ending: str) -> None:
    FORMS[form](tmp_path / "raw")
    expect_all(pack(tmp_path / "raw", tmp_path / f"any{ending}"))


@pytest.mark.parametrize("prefix", [".", "images/of/cifar"])
def test_the_order_in_an_archive_and_what_is_above_the_tree_do_not_matter(tmp_path: Path, prefix: str) -> None:
    write_tree(tmp_path / "raw")
    for seed in range(3):
        expect_all(pack(tmp_path / "raw", tmp_path / f"{seed}.tar", prefix, seed))


@pytest.mark.parametrize("name", ["cifar10.tar.xz", "cifar10.tar.gz", "cifar10-jpeg.tar.xz", "cifar10/any.tar.xz"])
def test_an_archive_is_found_beside_or_in_the_folder_that_is_named(tmp_path: Path, name: str) -> None:
    write_tree(tmp_path / "raw")
    archive = tmp_path / name
    archive.parent.mkdir(exist_ok=True)
    pack(tmp_path / "raw", archive)
    assert find(tmp_path / "cifar10") == archive
    expect_all(tmp_path / "cifar10")


def test_files_that_are_no_images_and_hidden_ones_are_passed_over(tmp_path: Path) -> None:
    write_tree(tmp_path / "raw")
    for name in ("readme.txt", "train/list.csv", "train/bird/Thumbs.db", "train/bird/._0000.png", "train/.git/x.png"):
        (tmp_path / "raw" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "raw" / name).write_bytes(b"something else")
    expect_all(tmp_path / "raw")
    expect_all(pack(tmp_path / "raw", tmp_path / "raw.tar"))


def test_the_dataset_is_normalised_channel_by_channel(tmp_path: Path) -> None:
    write_binary(tmp_path)
    for split in ("train", "valid"):
        dataset = cifar10(split, str(tmp_path))
        assert (len(dataset), dataset.input_shape, dataset.num_classes) == (len(LABELS[split]), (3, 32, 32), 10)
        inputs, targets = dataset.batch(torch.arange(len(dataset)), None)
        mean, std = (torch.tensor(value, dtype=torch.float64).reshape(3, 1, 1) for value in (MEAN, STD))
        expected = (torch.from_numpy(PIXELS[split]).double() / 255 - mean) / std
        torch.testing.assert_close(inputs.double(), expected, rtol=1e-5, atol=1e-5)
        assert targets.tolist() == LABELS[split].tolist()


@pytest.mark.parametrize("augmentation", [{"shift": 3}, {"flip": True}, {"flip": "alternate"}])
def test_only_the_training_images_are_augmented(tmp_path: Path, augmentation: dict[str, Any]) -> None:
    write_binary(tmp_path)
    ids = torch.arange(20)
    train, valid = (cifar10(split, str(tmp_path), **augmentation) for split in ("train", "valid"))
    assert not torch.equal(train.batch(ids, Draws(1, 1, ids))[0], train.batch(ids, None)[0])
    assert torch.equal(valid.batch(ids, Draws(1, 1, ids))[0], valid.batch(ids, None)[0])


def test_what_a_shift_uncovers_is_filled_with_the_nearest_pixels(tmp_path: Path) -> None:
    """Columns of one colour stay so, up to the edge, however far they are moved."""
    write_binary(tmp_path)
    stripes = np.broadcast_to(np.arange(32, dtype=np.uint8) + 100, (3, 32, 32))
    (tmp_path / "data_batch_1.bin").write_bytes(20 * record(0, stripes))
    ids = torch.arange(20)
    inputs, _ = cifar10("train", str(tmp_path), shift=4).batch(ids, Draws(1, 1, ids))
    found = inputs[:, 0].mul(255 * STD[0]).add(255 * MEAN[0]).round()
    moves = set()
    for image in found:
        assert torch.equal(image, image[:1].expand(32, 32))
        moves.add(move := int(image[0, 16]) - 116)
        assert image[0].tolist() == (torch.arange(32) + move).clamp(0, 31).add(100).tolist()
    assert len(moves) > 4


def test_mirrored_images_are_drawn_or_alternate(tmp_path: Path) -> None:
    write_binary(tmp_path)
    ids = torch.arange(30)
    kinds: list[tuple[Flip, bool]] = [(True, False), ("alternate", True)]
    for flip, alternates in kinds:
        dataset = cifar10("train", str(tmp_path), flip=flip)
        plain = dataset.batch(ids, None)[0]
        first, second = (dataset.batch(ids, Draws(1, epoch, ids))[0] for epoch in (1, 2))
        mirrored = [
            [torch.equal(*pair) for pair in zip(found, plain.flip(-1), strict=True)] for found in (first, second)
        ]
        assert 5 < sum(mirrored[0]) < 25
        assert all(one != other for one, other in zip(*mirrored, strict=True)) is alternates


def test_samples_are_kept_on_the_device_that_is_given(tmp_path: Path) -> None:
    write_binary(tmp_path)
    inputs, targets = cifar10("valid", str(tmp_path), device=torch.device("meta")).batch(torch.arange(4), None)
    assert inputs.device.type == targets.device.type == "meta"


def deny_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(module, "decode", fail)


@pytest.mark.parametrize("packed", [False, True])
def test_both_splits_are_decoded_once(
    tmp_path: Path, cache: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tree(tmp_path / "raw")
    source = pack(tmp_path / "raw", tmp_path / "raw.tar.xz") if packed else tmp_path / "raw"
    read("valid", source)
    assert len(list(cache.iterdir())) == 2
    assert all(file.suffix == ".npz" for file in cache.iterdir())
    deny_decoding(monkeypatch)
    expect_all(source)


def test_the_cache_may_be_given(tmp_path: Path, cache: Path) -> None:
    write_tree(tmp_path / "raw")
    read("train", tmp_path / "raw", str(tmp_path / "mine"))
    assert len(list((tmp_path / "mine").iterdir())) == 2
    assert not cache.exists()


def test_the_cache_is_in_the_home_folder_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TUTTI_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write_tree(tmp_path / "raw")
    expect_all(tmp_path / "raw")
    assert len(list((tmp_path / "home/.cache/tutti").iterdir())) == 2


def test_files_that_are_quick_to_read_are_not_cached(tmp_path: Path, cache: Path) -> None:
    write_binary(tmp_path)
    expect_all(tmp_path)
    assert not cache.exists()


def repaint(tree: Path) -> None:
    (tree / "train/bird/0001.png").write_bytes(png(255 - PIXELS["train"][7]))


def move(tree: Path) -> None:
    (tree / "train/bird/0002.png").rename(tree / "train/cat/0.png")  # the same files in the same order


@pytest.mark.parametrize(("change", "expected"), [(repaint, (7, 2)), (move, (None, 3))])
def test_a_tree_that_has_changed_is_decoded_again(
    tmp_path: Path, change: Write, expected: tuple[int | None, int]
) -> None:
    write_tree(tmp_path)
    expect_all(tmp_path)
    change(tmp_path)
    images, labels = read("train", tmp_path)
    painted = next((row for row in range(30) if not np.array_equal(images[row], PIXELS["train"][row])), None)
    assert (painted, labels[8]) == expected


def test_an_archive_that_has_changed_is_decoded_again(tmp_path: Path) -> None:
    write_tree(tmp_path / "raw")
    archive = pack(tmp_path / "raw", tmp_path / "raw.tar")
    expect_all(archive)
    repaint(tmp_path / "raw")
    status = archive.stat()
    pack(tmp_path / "raw", archive)
    os.utime(archive, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    images, _ = read("train", archive)
    assert np.array_equal(images[7], 255 - PIXELS["train"][7])


@pytest.mark.parametrize("damage", [lambda content: content[:-100], lambda content: b"", lambda content: b"no" * 999])
def test_a_damaged_cache_is_made_again(tmp_path: Path, cache: Path, damage: Callable[[bytes], bytes]) -> None:
    write_tree(tmp_path)
    expect_all(tmp_path)
    for file in cache.iterdir():
        file.write_bytes(damage(file.read_bytes()))
    expect_all(tmp_path)
    for file in cache.iterdir():
        with np.load(file) as arrays:
            assert set(arrays) == {"images", "labels"}


def test_a_cache_with_other_arrays_is_made_again(tmp_path: Path, cache: Path) -> None:
    write_tree(tmp_path)
    expect_all(tmp_path)
    for file in cache.iterdir():
        np.savez(file, images=np.zeros((4, 3, 32, 32), np.uint8), labels=np.zeros(5, np.int64))
    expect_all(tmp_path)


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    write_tree(tmp_path / "raw")
    (tmp_path / "file").write_bytes(b"no folder")
    for _ in range(2):
        images, _ = read("train", tmp_path / "raw", str(tmp_path / "file" / "cache"))
        assert np.array_equal(images, PIXELS["train"])


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_the_disk(file: io.BufferedWriter, **_: np.ndarray) -> None:
        file.write(b"the first half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", fill_the_disk)
    write_tree(tmp_path)
    expect_all(tmp_path)
    assert list(cache.iterdir()) == []


def test_a_user_without_a_home_reads_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TUTTI_CACHE")
    monkeypatch.setattr(Path, "expanduser", no_home)
    monkeypatch.chdir(tmp_path)
    write_tree(tmp_path / "raw")
    expect_all(tmp_path / "raw")
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, lambda path: (path / "train").mkdir(parents=True)])
def test_nothing_at_the_path_is_refused_with_all_that_is_accepted(tmp_path: Path, make: Write) -> None:
    path = tmp_path / "cifar10"
    make(path)
    message = refusal(path)
    assert message.startswith((f"CIFAR-10 is not at {path}. Expected ", f"{path} holds no CIFAR-10. Expected "))
    for accepted in ("data_batch_1.bin ... test_batch.bin", "data_batch_1 ... test_batch", "train/CLASS", ".tar.xz"):
        assert accepted in message
    assert "Set data.path=FOLDER_OR_ARCHIVE, or TUTTI_DATA to the folder that holds cifar10/" in message
    assert message.endswith("or fetch it with: tutti data get cifar10.")


def test_two_archives_are_refused(tmp_path: Path) -> None:
    for name in ("b.tar.gz", "a.tar"):
        (tmp_path / name).touch()
    assert refusal(tmp_path) == (
        f"{tmp_path} holds 2 archives (a.tar, b.tar.gz): expected one. Set data.path to one of them."
    )


def test_an_archive_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "readme.txt").touch()
    archive = pack(tmp_path / "raw", tmp_path / "raw.tar")
    assert refusal(archive).startswith(f"{archive} holds no CIFAR-10. Expected ")


@pytest.mark.parametrize("ending", [".tar", ".tar.gz", ".tar.xz"])
@pytest.mark.parametrize("share", [0.001, 0.3, 0.7, 0.999])
def test_a_truncated_archive_is_refused(tmp_path: Path, cache: Path, ending: str, share: float) -> None:
    write_tree(tmp_path / "raw")
    archive = pack(tmp_path / "raw", tmp_path / f"raw{ending}")
    content = archive.read_bytes()
    content = content.rstrip(b"\0") if ending == ".tar" else content  # else the end mark is long enough to lose a part
    archive.write_bytes(content[: int(len(content) * share)])
    message = refusal(archive)
    assert message.startswith(f"{archive} cannot be read as a tar archive (plain, gzip or xz): ")
    assert message.endswith(". Fetch or copy it again.") and "\n" not in message
    assert not cache.exists()


def test_an_archive_cut_between_two_files_is_refused(tmp_path: Path) -> None:
    write_tree(tmp_path / "raw")
    archive = pack(tmp_path / "raw", tmp_path / "raw.tar")
    with tarfile.open(archive) as file:
        middle = file.getmembers()[50].offset
    archive.write_bytes(archive.read_bytes()[:middle])
    assert "it ends without an end mark, so it is truncated or damaged" in refusal(archive)


@pytest.mark.parametrize("ending", [".tar.gz", ".tar.xz"])
@pytest.mark.parametrize("place", [0.5, 1])
def test_a_damaged_archive_is_refused(tmp_path: Path, ending: str, place: float) -> None:
    write_tree(tmp_path / "raw")
    archive = pack(tmp_path / "raw", tmp_path / f"raw{ending}")
    content = bytearray(archive.read_bytes())
    content[int((len(content) - 8) * place)] ^= 0xFF  # the last eight bytes are checksums
    archive.write_bytes(content)
    assert refusal(archive).startswith(f"{archive} cannot be read as a tar archive (plain, gzip or xz): ")


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "cifar10.zip"
    archive.write_bytes(b"PK\x03\x04" + bytes(2000))
    assert refusal(archive) == (
        f"{archive} cannot be read as a tar archive (plain, gzip or xz): file could not be opened successfully. "
        "Fetch or copy it again."
    )


@pytest.mark.parametrize(
    ("size", "how"), [(0, "truncated"), (3072, "truncated"), (6 * 3073 - 1, "truncated"), (10_001 * 3073, "too long")]
)
def test_a_binary_file_of_a_wrong_size_is_refused(tmp_path: Path, size: int, how: str) -> None:
    write_binary(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    path.write_bytes(bytes(size))
    assert refusal(tmp_path) == (
        f"{path} is {how}: it has {size:,} bytes, expected whole records of 3,073 bytes, at most 10,000 of them. "
        "Fetch or copy it again."
    )
    assert len(read("valid", tmp_path)[0]) == 20


def test_a_binary_file_with_a_label_that_no_class_has_is_refused(tmp_path: Path) -> None:
    write_binary(tmp_path)
    path = tmp_path / "test_batch.bin"
    path.write_bytes(record(9, PIXELS["valid"][0]) + record(10, PIXELS["valid"][1]))
    assert refusal(tmp_path, "valid") == f"{path} holds the label 10: expected 0 to 9. Fetch or copy it again."


@pytest.mark.parametrize(("write", "ending"), [(write_binary, ".bin"), (write_python, "")])
def test_a_missing_batch_is_refused(tmp_path: Path, write: Write, ending: str) -> None:
    write(tmp_path)
    (tmp_path / f"data_batch_4{ending}").unlink()
    others = ", ".join(f"{name}{ending}" for name in sorted(batches()) if name != "data_batch_4")
    assert refusal(tmp_path) == f"{tmp_path} lacks data_batch_4{ending}: it holds {others}. Fetch or copy it again."


class Malicious:
    """Makes a folder as it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self._folder),)


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path) -> None:
    write_python(tmp_path)
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({"data": Malicious(tmp_path / "harm"), "labels": []}))
    assert refusal(tmp_path) == (
        f"{path} is not a batch of CIFAR-10's Python version: UnpicklingError: it refers to "
        f"{os.mkdir.__module__}.mkdir, which a batch of CIFAR-10 does not need. Fetch or copy it again."
    )
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2]}, protocol=4)[:-50],
            "UnpicklingError: ",
        ),
        (b"", "EOFError: "),
        (pickle.dumps([1, 2]), "AttributeError: "),
        (pickle.dumps({"data": 1}), "KeyError: 'labels'"),
        (
            pickle.dumps({"data": np.zeros((2, 3071), np.uint8), "labels": [1, 2]}, protocol=4),
            "ValueError: data of uint8, shape (2, 3071), with 2 labels",
        ),
        (
            pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2, 3]}, protocol=4),
            "ValueError: data of uint8, shape (2, 3072), with 3 labels",
        ),
        (pickle.dumps({"data": np.zeros((1, 3072)), "labels": [1]}, protocol=4), "ValueError: data of float64"),
        (pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [0.5]}, protocol=4), "ValueError: "),
    ],
)
def test_a_pickle_of_another_kind_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    write_python(tmp_path)
    path = tmp_path / "data_batch_2"
    path.write_bytes(content)
    message = refusal(tmp_path)
    assert message.startswith(f"{path} is not a batch of CIFAR-10's Python version: {reason}")
    assert message.endswith("Fetch or copy it again.")


def test_a_pickle_with_a_label_that_no_class_has_is_refused(tmp_path: Path) -> None:
    write_python(tmp_path)
    path = tmp_path / "data_batch_2"
    path.write_bytes(pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, -2]}, protocol=4))
    assert refusal(tmp_path) == f"{path} holds the label -2: expected 0 to 9. Fetch or copy it again."


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def remove(folder: Path) -> None:
    empty(folder)
    folder.rmdir()


def expect_refusal(tree: Path, expected: str) -> None:
    """A tree is refused in a folder and in an archive."""
    for source in (tree, pack(tree, tree.with_suffix(".tar"))):
        for split in ("train", "valid"):
            assert refusal(source, split) == expected.format(source=source)


@pytest.mark.parametrize("place", ["train/bird", "test/truck"])
def test_an_empty_class_folder_is_refused(tmp_path: Path, place: str) -> None:
    write_tree(tmp_path / "raw")
    empty(tmp_path / "raw" / place)
    (tmp_path / "raw" / place / "readme.txt").touch()
    expected = "holds no images: expected .jpg, .jpeg, .png files. Fetch or copy it again."
    expect_refusal(tmp_path / "raw", f"{{source}}: the class folder {place} {expected}")


@pytest.mark.parametrize(("tree", "other"), [("test", "train"), ("train", "test")])
def test_a_class_missing_in_one_split_is_refused(tmp_path: Path, tree: str, other: str) -> None:
    write_tree(tmp_path / "raw")
    for name in ("cat", "bird"):
        remove(tmp_path / "raw" / tree / name)
    expected = f"{tree}/ lacks the class bird, cat that {other}/ has: expected the same classes in both."
    expect_refusal(tmp_path / "raw", f"{{source}}: {expected} Fetch or copy it again.")


def test_a_class_missing_in_both_splits_is_refused(tmp_path: Path) -> None:
    write_tree(tmp_path / "raw")
    for tree in ("train", "test"):
        remove(tmp_path / "raw" / tree / "airplane")
    expected = f"9 classes ({', '.join(CLASSES[1:])}): expected CIFAR-10's 10. Fetch or copy it again."
    expect_refusal(tmp_path / "raw", f"{{source}} holds {expected}")


def test_a_tree_without_test_images_is_refused(tmp_path: Path) -> None:
    write_tree(tmp_path / "raw", "other")
    for source in (tmp_path / "raw", pack(tmp_path / "raw", tmp_path / "raw.tar")):
        assert refusal(source).startswith(f"{source} holds train/ only. Expected ")


@pytest.mark.parametrize("content", [b"", b"no image", png(PIXELS["train"][0])[:-1000]])
def test_a_corrupt_image_is_refused_by_name(tmp_path: Path, cache: Path, content: bytes) -> None:
    write_tree(tmp_path / "raw")
    image = tmp_path / "raw/test/dog/0001.png"
    image.write_bytes(content)
    archive = pack(tmp_path / "raw", tmp_path / "raw.tar")
    assert refusal(tmp_path / "raw").startswith(f"{image} cannot be read as an image: ")
    assert refusal(archive).startswith(f"test/dog/0001.png in {archive} cannot be read as an image: ")
    assert not cache.exists()


def test_an_image_of_another_size_is_refused_by_name(tmp_path: Path) -> None:
    write_tree(tmp_path)
    image = tmp_path / "train/dog/0001.png"
    image.write_bytes(png(np.zeros((3, 28, 30), np.uint8)))
    assert refusal(tmp_path) == f"{image} is 30 x 28 pixels: expected 32 x 32. Is it CIFAR-10?"


def test_grey_and_transparent_images_become_colour_images(tmp_path: Path) -> None:
    write_tree(tmp_path)
    Image.new("L", (32, 32), 77).save(tmp_path / "train/airplane/0000.png")
    Image.new("RGBA", (32, 32), (1, 2, 3, 128)).save(tmp_path / "train/airplane/0001.png")
    images, _ = read("train", tmp_path)
    assert (images[0] == 77).all()
    assert images[1, :, 5, 5].tolist() == [1, 2, 3]


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    write_binary(tmp_path)
    monkeypatch.setattr(Path, "read_bytes", deny)
    expected = f"{tmp_path / 'data_batch_1.bin'} cannot be read: Permission denied. Check its permissions."
    assert refusal(tmp_path) == expected


@pytest.fixture
def real_archive() -> Path:
    """The real images as JPEG files; tests that need them are skipped where there are none."""
    for folder in DATA:
        if (folder / "cifar10-jpeg.tar.xz").is_file():
            return folder / "cifar10-jpeg.tar.xz"
    pytest.skip("the real CIFAR-10 images (cifar10-jpeg.tar.xz) are not on this machine")


def test_the_real_archive_holds_what_it_promises(real_archive: Path, tmp_path: Path) -> None:
    """All its files are listed; of each class the first hundredth is decoded, for all would take a while."""
    assert find(real_archive.parent / "cifar10") == real_archive
    counts: dict[str, int] = {}
    with tarfile.open(real_archive) as archive:
        for member in archive:
            if member.isreg():
                folder, _, name = member.name.rpartition("/")
                counts[folder] = counts.get(folder, 0) + 1
                if int(name.removesuffix(".jpg")) % 100 == 0:
                    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
                    content = archive.extractfile(member)
                    assert content
                    (tmp_path / member.name).write_bytes(content.read())
    assert counts == {
        f"{tree}/{name}": 5000 if tree == "train" else 1000 for tree in ("train", "test") for name in CLASSES
    }
    train, valid = (cifar10(split, str(tmp_path)) for split in ("train", "valid"))
    assert (len(train), len(valid), train.num_classes) == (500, 100, 10)
    inputs, targets = train.batch(torch.arange(500), None)
    assert torch.equal(targets, torch.arange(10).repeat_interleave(50))
    assert inputs.mean((0, 2, 3)).abs().max() < 0.2 and (inputs.std((0, 2, 3)) - 1).abs().max() < 0.2
