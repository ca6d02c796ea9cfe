"""Damaged data files give samples or a named error, and never allocate more memory than their size."""

import gzip
import io
import pickle
import resource
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from damage import damaged, many, read_or_refuse
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tutti.data.builtin import synthetic
from tutti.data.cifar10 import cifar10
from tutti.data.dataset import ArrayDataset, check_classes
from tutti.data.image_tree import ImageTree, image_tree
from tutti.data.loader import evaluation_batches
from tutti.data.make_images import make_images
from tutti.data.mnist import FILES, mnist, read_idx
from tutti.data.nbody.dataset import nbody
from tutti.data.nbody.make import check_values
from tutti.errors import ConfigError, DataError

CPU = torch.device("cpu")
PIXELS = (np.arange(6 * 4 * 5) * 7 % 256).astype(np.uint8).reshape(6, 4, 5)
DIGITS = np.array([3, 0, 9, 1, 1, 7], np.uint8)
FIELDS = {"Nbody": 4, "Hydro": 5}


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def batch_pickle(labels: list[int]) -> bytes:
    """A batch of CIFAR-10's Python version."""
    data = np.arange(len(labels) * 3072, dtype=np.uint8).reshape(-1, 3072)
    names = [f"image_{number}.png".encode() for number in range(300)]
    return pickle.dumps({b"data": data, b"labels": labels, b"filenames": names}, protocol=4)


def jpeg(image: np.ndarray, kind: str = "JPEG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, kind)
    return file.getvalue()


def box_file(folder: Path, side: int = 4, **options: object) -> bytes:
    generator = np.random.default_rng(0)
    with h5py.File(folder / "box.h5", "w") as file:
        for name, channels in FIELDS.items():
            values = generator.uniform(-1, 1, (channels, side, side, side)).astype(np.float32)
            file.create_dataset(name, data=values, **options)
    return (folder / "box.h5").read_bytes()


PICTURE = np.random.default_rng(0).integers(0, 255, (24, 20, 3), np.uint8)
BATCH = batch_pickle([1, 2])


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is asked for in vain raises a MemoryError at once, and none of these files may ask for a GiB."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    for images, labels in FILES.values():
        (tmp_path / images).write_bytes(idx(PIXELS))
        (tmp_path / labels).write_bytes(idx(DIGITS))
    return tmp_path


def wrong_label(folder: Path, kind: str) -> Path:
    """Write a dataset in which one label is no class; the file that holds it."""
    if kind == "mnist":
        path = folder / FILES["train"][1]
        path.write_bytes(idx(np.array([3, 0, 200, 1, 1, 7], np.uint8)))
    elif kind == "cifar10 binary":
        path = folder / "data_batch_1.bin"
        for number in range(1, 6):
            (folder / f"data_batch_{number}.bin").write_bytes((b"\x01" + bytes(3072)) * 2)
        path.write_bytes(b"\xc8" + bytes(3072))
    else:
        path = folder / "data_batch_1"
        for number in range(1, 6):
            (folder / f"data_batch_{number}").write_bytes(BATCH)
        path.write_bytes(batch_pickle([0, -1 if kind.endswith("negative") else 200]))
    return path


@pytest.mark.parametrize("kind", ["mnist", "cifar10 binary", "cifar10 python", "cifar10 python negative"])
def test_a_label_out_of_range_is_refused_with_file_value_and_range(digits: Path, kind: str) -> None:
    path = wrong_label(digits, kind)
    with pytest.raises(DataError) as caught:
        (mnist if kind == "mnist" else cifar10)("train", str(digits))
    label = -1 if kind.endswith("negative") else 200
    assert str(caught.value).startswith(f"{path} holds the label {label}: expected 0 to 9. Fetch ")


class Own(torch.utils.data.Dataset):  # pyright: ignore[reportMissingTypeArgument]
    """A user's dataset with a label that is no class, or that cross entropy leaves out."""

    num_classes = 3

    def __init__(self, label: int) -> None:
        self.label = label

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(2), self.label if index == 5 else 1


class OwnBatches(Own):
    def batch(self, ids: torch.Tensor, draws: object) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(len(ids), 2), torch.where(ids == 5, self.label, 1)


@pytest.mark.parametrize("kind", [Own, OwnBatches])
def test_a_wrong_label_of_a_users_dataset_is_refused_with_its_sample(kind: type[Own]) -> None:
    for label in (3, -1, 2**40):
        with pytest.raises(DataError) as caught:
            list(evaluation_batches(kind(label), 0, 1, 4, CPU, 0, 0))
        assert str(caught.value) == (
            f"sample 5 of {kind.__name__} has the label {label}: expected 0 to 2, since its num_classes is 3. "
            "Correct the label, or num_classes."
        )
    assert len(list(evaluation_batches(kind(-100), 0, 1, 4, CPU, 0, 0))) == 2


def test_classes_that_training_does_not_have_are_refused() -> None:
    train, valid = (ArrayDataset(torch.zeros(3, 2), torch.tensor(labels)) for labels in ([0, 1, 1], [0, 1, 2]))
    with pytest.raises(DataError, match=r"the validation data holds the label 2: expected 0 to 1, as in the training"):
        check_classes(train, valid)
    check_classes(valid, train)
    with pytest.raises(DataError, match=r"hold the label -3: expected 0 or more"):
        ArrayDataset(torch.zeros(2, 2), torch.tensor([0, -3]))
    with pytest.raises(DataError, match="has no samples"):
        ArrayDataset(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))


@pytest.mark.parametrize("zipped", [False, True])
def test_an_idx_header_that_claims_too_much_is_refused_before_memory_is_taken(tmp_path: Path, zipped: bool) -> None:
    for shape in ((2**32 - 1,) * 3, (2**31, 2**31, 4), (2**32 - 1, 1, 1), (1 << 30, 2, 2)):
        content = struct.pack(">BBBB3I", 0, 0, 8, 3, *shape) + bytes(100)
        path = tmp_path / ("file.gz" if zipped else "file")
        path.write_bytes(gzip.compress(content) if zipped else content)
        with pytest.raises(DataError, match=r"file(.gz)? is truncated: its header states .* it has 116"):
            read_idx(path, 3)


@many(100)
@given(data=st.data())
def test_damaged_idx_files_are_read_or_refused(digits: Path, data: st.DataObject) -> None:
    names = FILES["train"]
    place = data.draw(st.integers(0, 1))
    zipped = data.draw(st.booleans())
    whole = idx((PIXELS, DIGITS)[place])
    path, other = (digits / f"{names[place]}{ending}" for ending in (".gz", "")[:: 1 if zipped else -1])
    other.unlink(missing_ok=True)
    path.write_bytes(data.draw(damaged(gzip.compress(whole, mtime=0) if zipped else whole)))
    found = read_or_refuse(lambda: mnist("train", str(digits)), digits)
    path.unlink()
    (digits / names[place]).write_bytes(whole)
    assert found is None or (len(found) and (found.num_classes or 0) <= 10)


@many(40)
@given(content=damaged((b"\x03" + bytes(range(256)) * 12) * 2))
def test_damaged_binary_batches_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "test_batch.bin").write_bytes(content)
    found = read_or_refuse(lambda: cifar10("valid", str(tmp_path)), tmp_path / "test_batch.bin")
    assert found is None or (found.num_classes or 0) <= 10


@many(150)
@given(content=damaged(BATCH[:40] + BATCH[-4400:]) | damaged(BATCH[-300:]) | damaged(BATCH))
def test_damaged_pickles_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "test_batch").write_bytes(content)
    found = read_or_refuse(lambda: cifar10("valid", str(tmp_path)), tmp_path / "test_batch")
    assert found is None or (found.num_classes or 0) <= 10


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02]r\xff\xff\xff\x7f.",  # remember a list under the number 2^31 - 1
        b"\x80\x02B\xff\xff\xff\x7f.",  # 2 GiB of bytes
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x02cnumpy\nndarray\n(J\x00\x00\x00\x40tR.",  # an array of 2^30 numbers
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(J\x00\x00\x00\x40tU\x01btR.",
        b"\x80\x02cos\nsystem\n(S'true'\ntR.",
    ],
)
def test_a_pickle_that_asks_for_memory_or_functions_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "test_batch").write_bytes(content)
    with pytest.raises(DataError, match=r"test_batch is not a batch of CIFAR-10's Python version"):
        cifar10("valid", str(tmp_path))


def packed() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"):
            member = tarfile.TarInfo(name)
            member.size = 3073
            archive.addfile(member, io.BytesIO(bytes(3073)))
    return file.getvalue()


@many(50)
@given(content=damaged(packed()) | damaged(gzip.compress(packed(), mtime=0)))
def test_damaged_archives_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cifar10.tar"
    path.write_bytes(content)
    read_or_refuse(lambda: cifar10("valid", str(path), cache=str(tmp_path / "cache")), path)


def test_an_archive_with_a_file_far_too_large_is_refused(tmp_path: Path) -> None:
    member = tarfile.TarInfo("test_batch.bin")
    member.size = 1 << 40
    (tmp_path / "cifar10.tar").write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(4096))
    with pytest.raises(DataError, match=r"cifar10.tar cannot be read as a tar archive .*more than a file of CIFAR-10"):
        cifar10("valid", str(tmp_path / "cifar10.tar"))


@pytest.fixture
def tree(tmp_path: Path) -> ImageTree:
    for split in ("train", "validation"):
        (tmp_path / split / "cat").mkdir(parents=True)
        (tmp_path / split / "cat" / "one.jpg").write_bytes(jpeg(PICTURE))
    return image_tree("valid", str(tmp_path), size=8)


@many(80)
@given(content=damaged(jpeg(PICTURE)) | damaged(jpeg(PICTURE, "PNG")))
def test_damaged_images_are_decoded_or_refused(tree: ImageTree, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "validation" / "cat" / "one.jpg"
    path.write_bytes(content)
    found = read_or_refuse(lambda: tree[0], path)
    assert found is None or (found[0].shape == (3, 8, 8) and found[1] == 0)


def test_an_image_that_claims_too_many_pixels_is_refused(tree: ImageTree, tmp_path: Path) -> None:
    content = jpeg(PICTURE)
    begin = content.index(b"\xff\xc0") + 5  # of the frame: height and width
    path = tmp_path / "validation" / "cat" / "one.jpg"
    path.write_bytes(content[:begin] + b"\xff\xff\xff\xff" + content[begin + 4 :])
    with pytest.raises(DataError, match=r"one.jpg cannot be decoded as an image \(.*decompression bomb"):
        tree[0]


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("boxes")
    return {
        "contiguous": box_file(folder),
        "chunked": box_file(folder, chunks=(1, 2, 2, 2)),
        "compressed": box_file(folder, chunks=(1, 4, 4, 4), compression="gzip", fletcher32=True),
    }


@many(120)
@given(data=st.data())
@pytest.mark.parametrize("source", ["memory", "disk"])
def test_damaged_boxes_are_read_or_refused(
    tmp_path: Path, boxes: dict[str, bytes], data: st.DataObject, source: str
) -> None:
    path = tmp_path / "box.h5"
    path.write_bytes(data.draw(st.sampled_from(sorted(boxes)).flatmap(lambda kind: damaged(boxes[kind]))))

    def read() -> tuple[torch.Tensor, torch.Tensor]:
        made = nbody("train", str(path), str(path), source=source, crop=2, train_samples=4)
        return made.batch(torch.arange(4), None)

    found = read_or_refuse(read, path)
    assert found is None or all(bool(part.isfinite().all()) for part in found)


def test_a_box_that_claims_more_than_fits_in_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "box.h5"
    with h5py.File(path, "w") as file:
        for name, channels in FIELDS.items():
            file.create_dataset(name, (channels, 4096, 4096, 4096), np.float32, chunks=(1, 16, 16, 16))
    for source, size in (("memory", "2,304.0"), ("device", "1,280.0")):
        with pytest.raises(
            DataError, match=rf"box.h5 is a box of 4096\^3 cells, .*{source} keeps {size} GiB in memory"
        ):
            nbody("train", str(path), str(path), crop=16, source=source)


def test_seeds_of_data_that_is_made_are_taken_or_refused(tmp_path: Path) -> None:
    assert len(synthetic("valid", shape=(2,), valid=4, seed=2**63 - 1)) == 4
    for seed in (-1, 2**64):
        with pytest.raises(ConfigError, match=f"seed={seed}: expected a whole number from 0 to 2"):
            check_values(16, 0.1, seed, 1.0)
    with pytest.raises(DataError, match=r"--seed -1: expected at least 0"):
        make_images(tmp_path / "images", seed=-1)
    made = make_images(tmp_path / "images", classes=1, train=1, valid=1, size=16, seed=10**30)
    assert (made / "train" / "class_000" / "0000.jpg").is_file()
