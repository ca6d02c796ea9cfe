"""Packing: the order of the source, bytes that depend on source and options alone, and nothing half-written."""

import io
import os
import resource
import shutil
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import prepared
import pytest
import torch
from PIL import Image
from waiting import wait_until

from tutti.data.image_files import ImageFiles, class_names
from tutti.data.make_images import make_images
from tutti.data.packed import shards as packed_shards
from tutti.data.packed.arrays import packed_arrays
from tutti.data.packed.encode import PackOptions, shrink
from tutti.data.packed.index import PackedSamples
from tutti.data.packed.sources import open_source
from tutti.data.packed.write import PackSummary, pack
from tutti.errors import ConfigError, DataError

CLASSES, TRAIN, VALID = 3, 6, 2


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_images(tmp_path_factory.mktemp("source") / "tree", classes=CLASSES, train=TRAIN, valid=VALID, size=64)
    noise = np.random.default_rng(0).integers(0, 255, (150, 200, 3), dtype=np.uint8)
    for split in ("train", "validation"):  # large enough for several shards
        for number in range(CLASSES):
            for copy in range(12):
                image = Image.fromarray(np.roll(noise, 7 * copy + number))
                image.save(folder / split / f"class_{number:03d}" / f"noise{copy}.jpg", quality=95)
    return folder


def packed(source: Path | str, folder: Path, **given: Any) -> PackSummary:
    options = PackOptions(size=given.pop("size", 100), shard_mb=given.pop("shard_mb", 0.15))
    opened = partial(open_source, str(source), given.pop("validation", None), given.pop("labels", None))
    return pack(opened, str(source), folder, options, **given)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def content_of(folder: Path) -> dict[str, bytes]:
    """The files without the plan, which names the source."""
    return {name: content for name, content in files(folder).items() if name != "pack.json"}


def refusal(kind: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


@pytest.fixture(scope="module")
def whole(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "whole"
    found = packed(tree, folder)
    assert found.samples == {"train": 54, "valid": 42}
    assert found.shards == len(list(folder.glob("*.tar"))) >= 4
    return folder


# The format.


def test_samples_have_the_order_names_and_labels_of_the_tree(tree: Path, whole: Path) -> None:
    for split in ("train", "valid"):
        files, samples = ImageFiles(tree, split, class_names(tree)), PackedSamples(whole, split)
        assert len(samples) == len(files)
        for index in range(len(files)):
            assert samples.index.name(index) == files.name(index)
            assert samples.label(index) == files.label(index)
            with Image.open(files.path(index)) as image:
                assert (samples.index.records["width"][index], samples.index.records["height"][index]) == image.size


def test_shards_are_tar_files_of_images(whole: Path) -> None:
    names = []
    for path in sorted(whole.glob("train-*.tar")):
        with tarfile.open(path) as archive:
            for member in archive:
                names.append(member.name)
                content = archive.extractfile(member)
                assert content is not None
                with Image.open(io.BytesIO(content.read())) as image:
                    assert min(image.size) <= 100
    samples = PackedSamples(whole, "train")
    assert names == [samples.index.name(index) for index in range(len(samples))]


def test_large_images_are_shrunk_and_others_stored_as_they_are(tree: Path, tmp_path: Path) -> None:
    large, small = tree / "train" / "class_000" / "noise0.jpg", tree / "train" / "class_000" / "0000.jpg"
    stored, suffix, width, height = shrink(large.read_bytes(), 75, 90)
    assert (suffix, width, height) == (".jpg", 200, 150)
    with Image.open(io.BytesIO(stored)) as image:
        assert image.size == (100, 75)
    for size in (256, 0):
        assert shrink(small.read_bytes(), size, 90)[0] == small.read_bytes()
    assert shrink(large.read_bytes(), 0, 90)[0] == large.read_bytes()
    for mode in ("P", "RGBA", "L", "CMYK", "I;16"):
        image = Image.new(mode, (300, 260))
        image.save(tmp_path / "a.tif")
        assert shrink((tmp_path / "a.tif").read_bytes(), 128, 90)[1:] == (".jpg", 300, 260)


def test_files_of_one_name_and_two_suffixes_are_two_members(tmp_path: Path) -> None:
    folder = tmp_path / "tree" / "train" / "class_000"
    folder.mkdir(parents=True)
    for name in ("a.JPEG", "a.jpg", "a.png"):
        Image.new("RGB", (300, 260)).save(folder / name)
    packed(tmp_path / "tree", tmp_path / "packed")
    with tarfile.open(tmp_path / "packed" / "train-00000.tar") as archive:
        assert archive.getnames() == [f"class_000/{name}" for name in ("a.JPEG", "a.jpg", "a.png.jpg")]


def test_the_same_source_gives_the_same_bytes(tree: Path, whole: Path, tmp_path: Path) -> None:
    packed(tree, tmp_path / "again")
    assert files(tmp_path / "again") == files(whole)
    before = {path: path.stat().st_mtime_ns for path in whole.iterdir()}
    packed(tree, whole)
    assert before == {path: path.stat().st_mtime_ns for path in whole.iterdir()}, "a complete folder is left as it is"


def test_parts_of_several_ranks_make_the_same_bytes(tree: Path, whole: Path, tmp_path: Path) -> None:
    missing = [packed(tree, tmp_path / "parts", part=(number, 3)).missing > 0 for number in (2, 0, 1)]
    assert missing == [True, True, False]
    assert files(tmp_path / "parts") == files(whole)


@pytest.mark.ranks
def test_workers_make_the_same_bytes(tree: Path, whole: Path, tmp_path: Path) -> None:
    packed(tree, tmp_path / "parallel", workers=3)
    assert files(tmp_path / "parallel") == files(whole)


# Interruptions.


@pytest.mark.ranks
def test_a_pack_that_is_killed_resumes_to_the_same_bytes(tree: Path, whole: Path, tmp_path: Path) -> None:
    folder, server = tmp_path / "killed", prepared.server(prepared.TORCH)
    for shards in (1, 2, 3):
        program = server.start(_pack_in_two, tree, folder)
        wait_until(lambda n=shards: len(list(folder.glob("*.tar"))) >= n, lambda: "no shard", program)
        program.kill()
        assert program.wait() != 0 or not list(folder.glob(".*"))
    packed(tree, folder)
    assert files(folder) == files(whole)


@pytest.mark.slow
@pytest.mark.ranks
def test_ten_thousand_images_killed_three_times_give_the_same_bytes(tree: Path, tmp_path: Path) -> None:
    photos = sorted((tree / "train").glob("*/*.jpg"))
    source, folder, server = tmp_path / "tree", tmp_path / "killed", prepared.server(prepared.TORCH)
    for number in range(10_000):
        path = source / "train" / f"class_{number % 10}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.hardlink_to(photos[number % len(photos)])
    packed(source, tmp_path / "whole", shard_mb=5, workers=2)
    shards = len(list((tmp_path / "whole").glob("*.tar")))
    assert shards > 8
    for kill in range(3):
        program = server.start(_pack_in_two, source, folder, 5)
        wait_until(lambda n=2 * kill + 1: len(list(folder.glob("*.tar"))) >= n, lambda: "no shard", program)
        program.kill()
        program.wait()
        assert len(list(folder.glob("*.tar"))) < shards
    packed(source, folder, shard_mb=5, workers=2)
    assert files(folder) == files(tmp_path / "whole")


def _pack_in_two(tree: Path, folder: Path, shard_mb: float = 0.15) -> None:
    packed(tree, folder, workers=2, shard_mb=shard_mb)


def test_a_full_disk_is_reported_and_loses_nothing(tree: Path, whole: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(split: str, done: int, total: int) -> None:
        if done == 40:  # in the second shard or later
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))

    try:
        message = refusal(DataError, lambda: packed(tree, tmp_path / "full", report=fill))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    complete = len(list((tmp_path / "full").glob("train-*.tar")))
    assert complete >= 1
    assert message.startswith(f"{tmp_path / 'full'} cannot be written: File too large. {complete} of ")
    assert message.endswith("shards are complete and are kept. Free disk space, and run the command again.")
    assert not list((tmp_path / "full").glob("*.partial"))
    packed(tree, tmp_path / "full")
    assert files(tmp_path / "full") == files(whole)


def test_a_shard_that_is_gone_or_cut_short_is_written_again(tree: Path, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    (folder / "train-00000.tar").unlink()
    with open(folder / "train-00001.tar", "r+b") as file:
        file.truncate(5000)
    message = refusal(DataError, lambda: PackedSamples(folder, "train"))
    assert message.startswith(f"{folder}/train-00000.tar cannot be read: No such file or directory. Remove it, and run")
    packed(tree, folder)
    assert files(folder) == files(whole)


def test_a_folder_that_is_not_complete_is_refused_by_readers(tree: Path, tmp_path: Path) -> None:
    packed(tree, tmp_path / "parts", part=(0, 2))
    message = refusal(DataError, lambda: PackedSamples(tmp_path / "parts", "train"))
    assert message == (
        f"{tmp_path}/parts is not packed to its end: train.index is missing. "
        f"Run it again: tutti data pack {tree} {tmp_path}/parts"
    )


def test_a_shard_that_another_process_has_just_completed_stays(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file had the temporary name when it was opened, and the name of the shard when it was locked."""
    lock, shard = packed_shards.fcntl.flock, tmp_path / "train-00000.tar"

    def completed(*given: Any) -> None:
        (tmp_path / ".train-00000.tar.partial").rename(shard)
        lock(*given)

    (tmp_path / ".train-00000.tar.partial").write_bytes(b"samples")
    monkeypatch.setattr(packed_shards.fcntl, "flock", completed)
    message = refusal(DataError, lambda: packed_shards.ShardWriter(tmp_path, "train", 0).__enter__())
    assert "train-00000.tar.partial is being written by another process" in message
    assert shard.read_bytes() == b"samples"


# Images that cannot be decoded.


def test_a_corrupt_image_is_refused_by_name_or_left_out(tree: Path, tmp_path: Path) -> None:
    source = tmp_path / "tree"
    shutil.copytree(tree, source)
    (source / "train" / "class_001" / "0003.jpg").write_bytes(b"<html>")
    cut = (source / "train" / "class_002" / "noise1.jpg").read_bytes()
    (source / "train" / "class_002" / "noise1.jpg").write_bytes(cut[: len(cut) // 2])
    message = refusal(DataError, lambda: packed(source, tmp_path / "packed"))
    assert message.startswith(f"{source}: class_001/0003.jpg cannot be decoded as an image (it begins with 3c 68")
    assert "shards are complete and are kept. Replace it, or leave such images out with --corrupt skip" in message
    found = packed(source, tmp_path / "packed", skips=True)
    assert found.skipped == ["class_001/0003.jpg", "class_002/noise1.jpg"]
    assert found.samples["train"] == 52
    samples = PackedSamples(tmp_path / "packed", "train")
    assert "class_001/0003.jpg" not in [samples.index.name(index) for index in range(52)]


# Other sources, and sources that are wrong.


def tar_of(path: Path, folder: Path) -> None:
    """A tar file of a tar file for each class."""
    with tarfile.open(path, "w") as outer:
        for each in sorted(folder.iterdir(), reverse=True):
            with tarfile.open(path.parent / f"{each.name}.tar", "w") as inner:
                for file in sorted(each.iterdir(), reverse=True):
                    inner.add(file, file.name)
            outer.add(path.parent / f"{each.name}.tar", f"{each.name}.tar")


def test_tars_of_imagenet_make_the_same_shards_as_the_tree(tree: Path, whole: Path, tmp_path: Path) -> None:
    tar_of(tmp_path / "train.tar", tree / "train")
    names, used = [], set()
    with tarfile.open(tmp_path / "validation.tar", "w") as archive:
        for path in sorted((tree / "validation").rglob("*.jpg")):
            name = f"{len(used):04d}.JPEG"
            used.add(name)
            archive.add(path, name)
            names.append((name, path.parent.name))
    (tmp_path / "lines.txt").write_text("\n".join(label for _, label in names))
    (tmp_path / "pairs.csv").write_text("ImageId,Label\n" + "\n".join(f"{n[:-5]},{label} 1 2" for n, label in names))
    made = []
    for labels in ("lines.txt", "pairs.csv"):
        folder = tmp_path / labels.split(".")[0]
        given = {"validation": tmp_path / "validation.tar", "labels": tmp_path / labels}
        packed(tmp_path / "train.tar", folder, **given)
        made.append(content_of(folder))
    assert made[0] == made[1]
    of_tree = content_of(whole)
    assert {n: c for n, c in made[0].items() if n.startswith("train")} == {
        n: c for n, c in of_tree.items() if n.startswith("train")
    }
    samples = PackedSamples(tmp_path / "lines", "valid")
    assert [samples.label(index) for index in range(len(samples))] == sorted(samples.index.records["label"])
    (tmp_path / "lines.txt").write_text("\n".join("12" for _ in names))
    given["labels"] = tmp_path / "lines.txt"
    message = refusal(DataError, lambda: packed(tmp_path / "train.tar", tmp_path / "other", **given))
    assert "lines.txt gives the class '12' for 0000.JPEG: expected the name of a class of the training" in message
    (tmp_path / "lines.txt").write_bytes(b"\xff\xfe")
    message = refusal(DataError, lambda: packed(tmp_path / "train.tar", tmp_path / "other", **given))
    assert message.startswith(f"{tmp_path}/lines.txt cannot be read as text ('utf-8' codec can't decode byte 0xff")


def test_a_tar_of_several_splits_or_with_folders_below_classes_is_refused(tree: Path, tmp_path: Path) -> None:
    """Classes are the folders of images: those of two splits, or one below each class, would be taken for the same."""
    for name in ("tree", "."):
        with tarfile.open(tmp_path / "both.tar", "w") as archive:
            archive.add(tree, name)
        message = refusal(DataError, lambda: packed(tmp_path / "both.tar", tmp_path / "out"))
        first, second = (f"{name}/{split}/".removeprefix("./") for split in ("train", "validation"))
        assert message.startswith(f"{tmp_path}/both.tar has folders of images in {first} and in {second}: expected the")
    with tarfile.open(tmp_path / "below.tar", "w") as archive:
        for path in sorted((tree / "train").rglob("0000.jpg")):
            archive.add(path, f"{path.parent.name}/images/{path.name}")
    message = refusal(DataError, lambda: packed(tmp_path / "below.tar", tmp_path / "out"))
    assert "has folders of images in class_000/ and in class_001/" in message
    with tarfile.open(tmp_path / "tars.tar", "w") as archive:
        for split in ("train", "validation"):
            tar_of(tmp_path / f"{split}.tar", tree / split)
            archive.add(tmp_path / "class_000.tar", f"{split}/class_000.tar")
    message = refusal(DataError, lambda: packed(tmp_path / "tars.tar", tmp_path / "out"))
    assert "has folders of images in train/ and in validation/" in message
    assert not (tmp_path / "out").exists()


def test_names_that_are_no_text_are_packed_but_not_those_of_classes(tree: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tree" / "train" / "class_000"
    shutil.copytree(tree / "train" / "class_000", folder)
    other = os.fsdecode(b"caf\xe9")
    (folder / "0000.jpg").rename(folder / f"{other}.jpg")
    packed(tmp_path / "tree", tmp_path / "packed", size=0)
    samples = PackedSamples(tmp_path / "packed", "train")
    assert f"class_000/{other}.jpg" in [samples.index.name(index) for index in range(len(samples))]
    folder.rename(folder.with_name(other))
    message = refusal(DataError, lambda: packed(tmp_path / "tree", tmp_path / "out"))
    assert message == r"caf\xe9 is not UTF-8: expected such names of the source and of its classes. Rename it."
    assert not (tmp_path / "out").exists()


def test_another_source_for_a_complete_folder_is_refused(tree: Path, whole: Path, tmp_path: Path) -> None:
    before = files(whole)
    moved = tree.rename(tmp_path / "moved")
    assert packed(tree, whole).samples == {"train": 54, "valid": 42}, "its own source need not be there any more"
    moved.rename(tree)
    assert packed(f"{tree}/.", whole).samples == {"train": 54, "valid": 42}, "the same under another name"
    message = refusal(DataError, lambda: packed(tmp_path / "nowhere", whole))
    assert message.startswith(f"{tmp_path}/nowhere does not exist")
    other = make_images(tmp_path / "other", classes=2, train=1, valid=1, size=16)
    message = refusal(DataError, lambda: packed(other, whole))
    assert message.startswith(f"{other} holds other samples than when {whole} was begun from {tree}: expected the same")
    assert files(whole) == before


def arrays(split: str) -> list[tuple[np.ndarray, int]]:
    """A map-style dataset for `module:object`."""
    first = 0 if split == "train" else 100
    return [(np.full((2, 3), first + number, np.float32), number % 4) for number in range(10)]


def fields() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.full((2,), float(number)), torch.full((3, 3), -number)) for number in range(5)]


def words() -> list[tuple[str, int]]:
    return [("one", 1)]


def short() -> list[tuple[torch.Tensor, int]]:
    return [(torch.ones(2, dtype=torch.bfloat16), 1)]


def uneven() -> list[tuple[list[list[int]], int]]:
    return [([[1], [2, 3]], 1)]


def sparse() -> list[tuple[torch.Tensor, int]]:
    return [(torch.eye(2).to_sparse(), 1)]


def moments() -> list[tuple[np.ndarray, int]]:
    return [(np.ones(2), 1_700_000_000_000 + number) for number in range(3)]


def test_any_dataset_of_arrays_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_arrays.py").write_text("from importlib import import_module\n")
    import own_arrays  # pyright: ignore[reportMissingImports]

    for function in (arrays, fields, words, short, uneven, sparse, moments):
        setattr(own_arrays, function.__name__, function)
    packed("own_arrays:arrays", tmp_path / "arrays")
    for split, first in (("train", 0), ("valid", 100)):
        dataset = packed_arrays(split, str(tmp_path / "arrays"))
        assert (len(dataset), dataset.input_shape, dataset.num_classes) == (10, (2, 3), 4)
        inputs, target = dataset[7]
        assert torch.equal(inputs, torch.full((2, 3), first + 7.0)) and target == 3
    packed("own_arrays:fields", tmp_path / "fields")
    inputs, target = packed_arrays("train", str(tmp_path / "fields"))[3]
    assert torch.equal(inputs, torch.full((2,), 3.0)) and torch.equal(target, torch.full((3, 3), -3))
    message = refusal(DataError, lambda: packed("own_arrays:words", tmp_path / "words"))
    assert message == "sample 0 of own_arrays:words holds a str: expected arrays, tensors or numbers."
    for name, kind, problem in (
        ("short", "Tensor", "BFloat16"),
        ("uneven", "list", "inhom"),
        ("sparse", "Tensor", "to_d"),
    ):
        message = refusal(DataError, lambda name=name: packed(f"own_arrays:{name}", tmp_path / name))
        assert message.startswith(f"sample 0 of own_arrays:{name} holds a {kind}: ") and problem in message
        assert message.endswith("Expected what NumPy has as an array.")
    packed("own_arrays:moments", tmp_path / "moments")
    dataset = packed_arrays("train", str(tmp_path / "moments"))
    assert int(dataset[2][1]) == 1_700_000_000_002 and not hasattr(dataset, "num_classes")
    message = refusal(DataError, lambda: packed("own_arrays:sparse", tmp_path / "moments"))
    assert message.startswith("own_arrays:sparse holds other samples than when ")
    message = refusal(DataError, lambda: packed_arrays("valid", str(tmp_path / "fields")))
    assert message.startswith(f"{tmp_path}/fields holds no packed validation samples")


def test_wrong_sources_folders_and_options_are_refused(tree: Path, whole: Path, tmp_path: Path) -> None:
    message = refusal(DataError, lambda: packed(tmp_path / "nowhere", tmp_path / "out"))
    assert message.startswith(f"{tmp_path}/nowhere does not exist: expected a folder with train/CLASS/*.jpg, a tar")
    (tmp_path / "file").write_text("no tar")
    message = refusal(DataError, lambda: packed(tmp_path / "file", tmp_path / "out"))
    assert message.startswith(f"{tmp_path}/file cannot be read as an uncompressed tar file")
    assert not (tmp_path / "out").exists()
    message = refusal(DataError, lambda: packed(tree, tmp_path))
    assert message == f"{tmp_path} is not empty and not a packed dataset: expected a new or an empty folder."
    message = refusal(ConfigError, lambda: packed(tree, whole, size=128))
    assert message.startswith(f"--size 128, but {whole} was packed with --size 100: expected the same options")
    for options, name in (({"size": -1}, "--size -1"), ({"shard_mb": 0}, "--shard-mb 0")):
        assert refusal(ConfigError, lambda o=options: packed(tree, tmp_path / "out", **o)).startswith(name)
    shutil.copytree(whole, tmp_path / "copy")
    (tmp_path / "copy" / "train-00000.tar").unlink()
    shutil.copytree(tree, tmp_path / "tree")
    (tmp_path / "tree" / "train" / "class_000" / "0000.jpg").rename(tmp_path / "tree" / "train" / "class_000" / "a.jpg")
    message = refusal(DataError, lambda: packed(tmp_path / "tree", tmp_path / "copy"))
    assert message.startswith(f"{tmp_path}/tree holds other samples than when {tmp_path}/copy was begun")
