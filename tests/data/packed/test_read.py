"""Packed images in the place of a tree: the same order, labels and draws, and damage that is found."""

import json
import multiprocessing
import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import damaged, many, read_or_refuse
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rank_jobs import read_ledger, read_losses, run_ranks, train
from waiting import HUNG_SECONDS, wait_until

from tutti.config.layout import Layout
from tutti.config.load import load
from tutti.config.plan import Plan
from tutti.data.image_tree import image_tree
from tutti.data.loader import Loader
from tutti.data.make_images import make_images
from tutti.data.order import SampleOrder, make_order
from tutti.data.packed.encode import PackOptions
from tutti.data.packed.index import PackedSamples
from tutti.data.packed.open_shards import ReadAhead
from tutti.data.packed.shards import BLOCK
from tutti.data.packed.sources import open_source
from tutti.data.packed.verify import verify
from tutti.data.packed.write import pack
from tutti.errors import DataError

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("source") / "tree", classes=3, train=5, valid=2, size=96)


@pytest.fixture(scope="module")
def kept(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images as they are."""
    return packed(tree, tmp_path_factory.mktemp("packed") / "kept", size=0)


@pytest.fixture(scope="module")
def shrunk(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(tree, tmp_path_factory.mktemp("packed") / "shrunk", size=64)


@pytest.fixture
def copy(shrunk: Path, tmp_path: Path) -> Path:
    """A packed folder to damage."""
    return Path(shutil.copytree(shrunk, tmp_path / "copy"))


def packed(tree: Path, folder: Path, size: int) -> Path:
    pack(partial(open_source, str(tree)), str(tree), folder, PackOptions(size=size, shard_mb=0.03))
    return folder


def steps(path: Path, workers: int = 0, ranks: int = 1, rank: int = 0, **options: Any) -> torch.Tensor:
    dataset: Any = image_tree("train", str(path), **{"size": 32} | options)
    plan = Plan(Layout(ranks), 4, 4 // ranks, 4 // ranks, len(dataset), 2)
    batches = Loader(dataset, plan, SampleOrder(plan, 7), rank, CPU, workers, prefetch=0).steps(0)
    return torch.stack([batch.micro_batches[0][0] for batch in batches])


def flip_bit(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


# In the place of a tree.


@pytest.mark.ranks
@pytest.mark.parametrize("augment", ["crop", "shift_zoom", "none"])
def test_images_that_are_stored_as_they_are_give_the_batches_of_the_tree(tree: Path, kept: Path, augment: str) -> None:
    whole = steps(tree, augment=augment)
    assert torch.equal(steps(kept, augment=augment), whole)
    assert torch.equal(steps(kept, workers=2, augment=augment), whole)
    parts = [steps(kept, workers=rank, ranks=2, rank=rank, augment=augment) for rank in range(2)]
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_shrunk_images_give_the_same_parts(tree: Path, shrunk: Path) -> None:
    """The draws are made for the size before shrinking, so that the same part of the image is seen."""
    difference = (steps(shrunk) - steps(tree)).abs()
    assert difference.mean() < 0.2, "of a standard deviation"
    other = (steps(tree) - steps(tree).flip(0)).abs()
    assert other.mean() > 4 * difference.mean()


def test_labels_classes_and_shapes_are_those_of_the_tree(tree: Path, shrunk: Path) -> None:
    for split in ("train", "valid"):
        for classes in (None, 2):
            first, second = (image_tree(split, str(path), size=16, classes=classes) for path in (tree, shrunk))
            assert (len(first), first.num_classes) == (len(second), second.num_classes)
            pairs = [(first[index], second[index]) for index in range(len(first))]
            assert all(one is not None and other is not None and one[1] == other[1] for one, other in pairs)
    with pytest.raises(DataError, match=r"data.classes=4, but .*shrunk holds 3 classes: expected 1 to 3"):
        image_tree("train", str(shrunk), classes=4)


def test_shards_are_the_blocks_of_an_order(tree: Path, shrunk: Path) -> None:
    dataset = image_tree("train", str(shrunk))
    shards = PackedSamples(shrunk, "train").index.records["shard"]
    assert dataset.blocks is not None and len(dataset.blocks) == len(set(shards.tolist())) > 1
    assert [int(shards[first]) for first in dataset.blocks] == sorted(set(shards.tolist()))
    assert all(shards[first] != shards[first - 1] for first in dataset.blocks[1:])
    few = image_tree("train", str(shrunk), classes=1)
    assert few.blocks is not None and max(few.blocks) < len(few)
    assert image_tree("train", str(tree)).blocks is None


def values(path: Path, out: Path) -> dict[str, Any]:
    return {
        "recipe": "images",
        "data": {"name": "images", "path": str(path), "size": 24, "workers": 1},
        "model": {"name": "small_cnn", "width": 4},
        "optim": {"name": "sgd", "lr": 0.01},
        "batch": {"global": 4, "micro": 2, "eval": 2},
        "epochs": 2,
        "log": {"every_steps": 1, "ledger": True, "tensorboard": False},
        "out": str(out),
    }


@pytest.mark.ranks
def test_a_run_from_packed_images_is_the_run_from_the_tree(
    tree: Path, kept: Path, shrunk: Path, tmp_path: Path
) -> None:
    folders = [
        run_ranks(ranks, train, values(path, tmp_path / f"{path.name}{ranks}"))[0]["folder"]
        for path, ranks in ((tree, 1), (kept, 1), (kept, 2), (shrunk, 2))
    ]
    ledgers = [read_ledger(folder) for folder in folders]
    assert len(ledgers[0]) == 6 and all(ledger == ledgers[0] for ledger in ledgers)
    losses = [read_losses(folder) for folder in folders]
    assert losses[1] == losses[0]
    assert [loss for *_, loss in losses[2]] == pytest.approx([loss for *_, loss in losses[0]], rel=1e-4)


# Damage.


def test_what_is_as_it_was_packed_is_verified(shrunk: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    assert verify(shrunk, report=lambda *given: seen.append(given)) == []
    assert seen[-1] == ("verify validation", 6, 6) and ("verify train", 15, 15) in seen


def test_a_changed_bit_is_found_by_name_when_verified_and_when_read(copy: Path) -> None:
    samples = PackedSamples(copy, "train")
    records = samples.index.records[[3, 11]]
    names = [samples.path(index) for index in (3, 11)]
    for record, name in zip(records, names, strict=True):
        flip_bit(Path(name.split(":")[0]), int(record["offset"]) + int(record["length"]) // 2)
    found = [name.replace(":", ": ") + ": its content has changed" for name in names]
    assert verify(copy) == found
    dataset = image_tree("train", str(copy), size=16)
    with pytest.raises(DataError) as caught:
        dataset[3]
    assert str(caught.value).startswith(f"{names[0]} has changed since it was packed (its checksum is wrong). Remove")
    skipping = image_tree("train", str(copy), size=16, corrupt="skip")
    assert skipping[3] is not None and skipping.skipped == names[:1]


def test_a_folder_that_is_not_complete_is_named_when_verified(copy: Path) -> None:
    (copy / "train.index").unlink()
    assert verify(copy) == [f"{copy}/train.index is missing: {copy} is not packed to its end"]


def test_changed_headers_and_shards_are_found(copy: Path) -> None:
    samples = PackedSamples(copy, "valid")
    shard, name = samples.path(0).split(":")
    flip_bit(Path(shard), int(samples.index.records["offset"][0]) - 500)
    assert verify(copy) == [f"{shard}: {name}: its header has changed"]
    with open(copy / "train-00000.tar", "ab") as file:
        file.write(b"more")
    assert f"{copy}/train-00000.tar: " in verify(copy)[0]
    with pytest.raises(DataError, match=r"train-00000.tar has [\d,]+ bytes: expected [\d,]+, as its index says"):
        image_tree("train", str(copy))
    (copy / "train-00000.tar").unlink()
    assert verify(copy)[0] == f"{copy}/train-00000.tar: No such file or directory"


@many(100)
@given(data=st.data())
def test_damaged_indexes_are_read_or_refused(shrunk: Path, tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "damaged"
    if not folder.exists():
        shutil.copytree(shrunk, folder)
    whole = (shrunk / "train.index").read_bytes()
    (folder / "train.index").write_bytes(data.draw(damaged(whole)))

    def read() -> list[Any]:
        dataset = image_tree("train", str(folder), size=8)
        return [dataset[index] for index in range(len(dataset))]

    read_or_refuse(read, folder)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", json.dumps({"format": 1}).encode(), b"\xff"])
def test_a_damaged_plan_is_refused(copy: Path, content: bytes) -> None:
    (copy / "pack.json").write_bytes(content)
    with pytest.raises(DataError, match=r"pack.json cannot be read as the plan of a packed dataset"):
        image_tree("train", str(copy))


def test_a_sample_is_read_by_any_number_of_open_shards(shrunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti.data.packed.open_shards._MOST_OPEN", 2)
    samples = PackedSamples(shrunk, "train")
    first = [samples.read(index) for index in range(len(samples))]
    chosen = np.random.default_rng(0).permutation(len(samples))
    assert [samples.read(int(index)) for index in chosen] == [first[int(index)] for index in chosen]
    assert len(samples._open._handles) <= 2


def test_other_formats_are_read_from_shards(tmp_path: Path) -> None:
    folder = tmp_path / "tree" / "train" / "only"
    folder.mkdir(parents=True)
    source = Image.effect_noise((40, 30), 40).resize((80, 60), Image.Resampling.BICUBIC)
    for name, mode in (("a.jpg", "L"), ("b.jpg", "CMYK"), ("c.png", "RGBA"), ("d.png", "P"), ("e.jpg", "RGB")):
        source.convert(mode).save(folder / name)
    for size in (0, 32):
        path = packed(tmp_path / "tree", tmp_path / str(size), size)
        dataset = image_tree("train", str(path), size=24, augment="none")
        images = [pair[0].float() for pair in (dataset[index] for index in range(5)) if pair is not None]
        assert all((image - images[-1]).abs().mean() < 12 for image in images)


# Read ahead.


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """A file in the place of a shard."""
    path = tmp_path / "shard"
    path.write_bytes(bytes(3_000_000))
    return path


@pytest.mark.ranks
def test_a_block_is_read_in_sequence_and_readers_wait_for_their_part(shard: Path) -> None:
    may_read = threading.Event()

    def path(number: int) -> Path:
        assert may_read.wait(HUNG_SECONDS)
        return shard

    ahead = ReadAhead(path, 2)
    ahead.wait(0, 10_000)  # nothing is to come
    ahead.add(1, 512, 2_500_000)
    ahead.wait(0, 10_000)
    context = multiprocessing.get_context("fork")
    readers = [context.Process(target=ahead.wait, args=(1, end)) for end in (100_000, 2_500_000, 9_000_000)]
    for reader in readers:
        reader.start()
    assert all(reader.is_alive() for reader in readers)
    may_read.set()
    for reader in readers:
        wait_until(lambda reader=reader: not reader.is_alive(), lambda: "a reader still waits")
        assert reader.exitcode == 0
    assert ahead._places[1] == 2_500_000


def test_a_shard_that_cannot_be_read_ahead_is_left_to_its_reader(shard: Path) -> None:
    ahead = ReadAhead(lambda number: shard if number else shard.with_name("missing"), 2)
    ahead.add(0, 0, 1000)
    ahead.add(1, 0, 9_000_000)  # longer than it is
    for number in range(2):
        ahead.wait(number, 1000)


def test_the_thread_ends_with_its_owner(shard: Path) -> None:
    ahead = ReadAhead(lambda _: shard, 1)
    ahead.add(0, 0, 3_000_000)
    thread = ahead._thread
    del ahead
    assert thread is not None
    thread.join(HUNG_SECONDS)
    assert not thread.is_alive()


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [0, 2])
def test_packed_blocks_are_announced_and_read_once_an_epoch(shrunk: Path, workers: int) -> None:
    """Batches are those of an order without reading ahead, and every byte of each shard's samples is announced."""
    dataset: Any = image_tree("train", str(shrunk), size=32)
    samples = dataset._files._samples
    plan = Plan(Layout(1), 5, 5, 5, len(dataset), 2)
    order = make_order(load("digits", "data.shuffle=blocks", "data.shuffle_window=2"), plan, dataset)
    told: list[tuple[int, int, int]] = []
    add = samples._ahead.add
    samples._ahead.add = lambda *given: (told.append(given), add(*given))
    batches = list(Loader(dataset, plan, order.copy(), 0, CPU, workers, prefetch=0).steps(0))
    ends = [int(records["offset"][-1] + records["length"][-1]) for records in by_shard(samples)]
    assert sorted(told) == sorted(2 * [(shard, BLOCK, end) for shard, end in enumerate(ends)])
    assert samples._ahead._places.tolist() == ends
    dataset.read_ahead = None
    plain = list(Loader(dataset, plan, order.copy(), 0, CPU, 0, prefetch=0).steps(0))
    for batch, expected in zip(batches, plain, strict=True):
        pairs = zip(batch.micro_batches[0], expected.micro_batches[0], strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def by_shard(samples: PackedSamples) -> list[np.ndarray]:
    records = samples.index.records
    return [records[records["shard"] == shard] for shard in range(len(samples.index.shard_bytes))]
