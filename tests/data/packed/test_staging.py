"""Shards on a disk of the host: copied once, read as they arrive, and left alone where the disk fails."""

import os
import shutil
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tutti.data.image_tree import image_tree
from tutti.data.make_images import make_images
from tutti.data.packed.encode import PackOptions
from tutti.data.packed.index import PackedSamples
from tutti.data.packed.sources import open_source
from tutti.data.packed.staging import Stage
from tutti.data.packed.write import pack
from tutti.errors import DataError


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("source") / "tree", classes=3, train=6, valid=2, size=96)


@pytest.fixture(scope="module")
def packed(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "shards"
    pack(partial(open_source, str(tree)), str(tree), folder, PackOptions(size=64, shard_mb=0.02))
    return folder


@pytest.fixture
def source(packed: Path, tmp_path: Path) -> Path:
    """A packed folder to damage."""
    return Path(shutil.copytree(packed, tmp_path / "source"))


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


class Run:
    """One process of a host: its samples, their staging, and what it says."""

    def __init__(self, source: Path, disk: Path | str, keep: bool = False, samples: int | None = None) -> None:
        self.samples = PackedSamples(source, "train")
        self.said: list[str] = []
        self.stage: Stage = self.samples.stage(str(disk), keep, samples)
        self.folder = self.stage.staged.folder

    def begin(self) -> "Run":
        self.stage.begin(self.said.append)
        return self

    def copy(self) -> "Run":
        self.begin().stage.join()
        return self

    def contents(self) -> list[bytes]:
        return [self.samples.read(index) for index in range(len(self.samples))]

    def copies(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*.tar"))


def direct(source: Path) -> list[bytes]:
    samples = PackedSamples(source, "train")
    return [samples.read(index) for index in range(len(samples))]


def test_samples_come_from_the_copies_once_all_are_there(source: Path, disk: Path) -> None:
    expected = direct(source)
    run = Run(source, disk).copy()
    shards = len(run.stage.shards)
    assert shards > 2 and len(run.copies()) == shards
    assert run.said[0].startswith(f"data: all shards are staged in {run.folder}: {shards} shards (")
    assert run.said[0].endswith(", 0 found there") and len(run.said) == 1
    for path in source.glob("train-*.tar"):
        path.unlink()
    assert run.contents() == expected, "the source is not needed any more"
    assert run.folder.stat().st_mode & 0o077 == 0


def test_reading_begins_before_the_last_shard_is_there(source: Path, disk: Path) -> None:
    """A token bucket in the place of a slow source: the last shard waits until all samples were read once."""
    expected = direct(source)
    run = Run(source, disk)
    last, read = threading.Event(), threading.Event()
    size = run.samples.index.shard_bytes[run.stage.shards[-1]]
    chunks = iter(range(len(run.stage.shards)))

    def pace(_: int) -> None:
        if next(chunks) == len(run.stage.shards) - 1:
            last.set()
            read.wait()

    run.stage.begin(run.said.append, pace)
    last.wait()
    assert len(run.copies()) == len(run.stage.shards) - 1 and size > 0 and not run.said
    assert run.contents() == expected, "some from copies, those of the last shard from the source"
    read.set()
    run.stage.join()
    assert len(run.copies()) == len(run.stage.shards) and run.contents() == expected


def test_of_all_processes_of_a_host_one_copies(source: Path, disk: Path) -> None:
    runs = [Run(source, disk) for _ in range(3)]
    gate = threading.Event()
    runs[0].stage.begin(runs[0].said.append, lambda size: gate.wait() or None)
    for run in runs[1:]:
        run.copy()
    gate.set()
    runs[0].stage.join()
    assert [len(run.said) for run in runs] == [1, 0, 0]
    assert runs[2].contents() == direct(source)
    for run in runs[:2]:
        run.stage.end(complete=True)
        assert run.folder.is_dir(), "others still read"
    runs[2].stage.end(complete=True)
    assert not any(disk.iterdir())


def test_a_disk_that_does_not_answer_does_not_hold_the_end_of_a_run(
    source: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tutti.data.packed.staging._END_SECONDS", 0.01)
    run, answers = Run(source, disk), threading.Event()
    run.stage.begin(run.said.append, lambda size: answers.wait() or None)
    run.stage.end(complete=True)
    assert run.folder.is_dir()
    assert run.said == [
        f"data: a copy into {run.folder} has not ended in 0.01 s: the copies stay there. Look at the disk, and remove "
        "the folder."
    ]
    answers.set()
    assert run.stage.join()


@pytest.mark.parametrize(("complete", "keep"), [(False, False), (True, True)])
def test_copies_that_stay_are_used_by_the_next_start(source: Path, disk: Path, complete: bool, keep: bool) -> None:
    first = Run(source, disk, keep).copy()
    first.stage.end(complete)
    kept = first.copies()
    (first.folder / kept[0]).unlink()
    (first.folder / kept[1]).write_bytes(b"cut off")
    (first.folder / "00099.part").touch()
    second = Run(source, disk).copy()
    assert second.copies() == kept
    assert ": 2 shards (" in second.said[0] and second.said[0].endswith(f", {len(kept) - 2} found there")


def test_another_packed_dataset_has_another_folder(tree: Path, source: Path, disk: Path, tmp_path: Path) -> None:
    options = PackOptions(size=48, shard_mb=0.02)
    pack(partial(open_source, str(tree)), str(tree), tmp_path / "other", options)
    assert Run(source, disk).folder != Run(tmp_path / "other", disk).folder


def test_only_shards_that_are_read_are_copied(source: Path, disk: Path) -> None:
    run = Run(source, disk, samples=1).copy()
    assert run.copies() == ["00000.tar"] and len(run.stage.shards) == 1


def test_damage_while_copying_is_found_and_the_source_is_read(source: Path, disk: Path) -> None:
    record = PackedSamples(source, "train").index.records[0]
    shard = source / "train-00000.tar"
    content = bytearray(shard.read_bytes())
    content[int(record["offset"])] ^= 4
    shard.write_bytes(content)
    run = Run(source, disk).copy()
    assert "00000.tar" not in run.copies() and len(run.copies()) == len(run.stage.shards) - 1
    assert run.said[0] == f"data: {shard} has wrong checksums: it is not staged"


def test_a_copy_that_was_damaged_later_leads_to_the_source(
    source: Path, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(source, disk).copy()
    copy = run.folder / run.copies()[0]
    copy.write_bytes(bytes(copy.stat().st_size))
    (run.folder / run.copies()[1]).write_bytes(b"")
    assert run.contents() == direct(source)
    text = capsys.readouterr().err
    assert f"warning: data: {copy} cannot be used (a sample has a wrong checksum): its samples are read from" in text
    assert "cannot be used (it is shorter than the source)" in text and text.count("warning") == 2


def test_a_disk_that_vanishes_leads_to_the_source(source: Path, disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(source, disk)
    half = threading.Event()
    gone = threading.Event()
    chunks = iter(range(100))

    def pace(_: int) -> None:
        if next(chunks) == 1:
            half.set()
            gone.wait()

    run.stage.begin(run.said.append, pace)
    half.wait()
    shutil.rmtree(disk)
    gone.set()
    run.stage.join()
    left = len(run.stage.shards) - 1
    assert run.said == [
        f"data: {left} shards cannot be staged in {run.folder} (No such file or directory): their samples are read "
        "from the source"
    ]
    assert run.contents() == direct(source)
    assert capsys.readouterr().err == f"warning: data: {run.folder} is gone: all samples are read from the source\n"
    run.stage.end(complete=True)


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("$NO_SUCH_VARIABLE/x", "expected an absolute path, with variables that are set here"),
        ("relative", "expected an absolute path"),
        ("/no/such/disk", "No such file or directory"),
    ],
)
def test_a_disk_that_is_not_there_is_told_and_the_source_read(
    source: Path, where: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(source, where).copy()
    assert len(run.said) == 1 and run.said[0].startswith(f"data: no shards are staged in {where} ({reason}")
    assert run.contents() == direct(source)
    assert capsys.readouterr().err == "", "what was never there is not gone"
    run.stage.end(complete=True)


def test_a_variable_names_the_disk(source: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_DISK_OF_TEST", str(disk))
    assert Run(source, "$LOCAL_DISK_OF_TEST").copy().folder.parent == disk


def test_a_tree_of_files_is_not_staged(tree: Path, packed: Path, disk: Path) -> None:
    with pytest.raises(DataError, match=r"data\.stage=.* copies the shards of a packed dataset: .* is a tree of files"):
        image_tree("train", str(tree), stage=str(disk))
    data = image_tree("train", str(packed), size=32, augment="none", stage=str(disk))
    assert data.stage is not None
    data.stage.begin()
    data.stage.join()
    plain = image_tree("train", str(packed), size=32, augment="none")
    first, second = data[0], plain[0]
    assert first and second and np.array_equal(first[0].numpy(), second[0].numpy())
    data.stage.end(complete=True)
    assert os.listdir(disk) == []
