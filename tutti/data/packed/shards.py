"""Shards that are complete or absent, and the index that joins what is known of each."""

import contextlib
import fcntl
import os
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tutti.data.packed.encode import PackedSample
from tutti.data.packed.index import (
    RECORD,
    SPLIT_NAMES,
    Index,
    IndexPart,
    PackPlan,
    index_path,
    join_parts,
    shard_name,
    write_index,
)
from tutti.errors import DataError
from tutti.runs.files import sync_path

BLOCK = tarfile.BLOCKSIZE


class ShardWriter:
    """A tar file under a temporary name, which gets its own name and its part of the index when it is complete."""

    def __init__(self, folder: Path, split: str, shard: int) -> None:
        self._path = folder / shard_name(split, shard)
        self._partial = self._path.with_name(f".{self._path.name}.partial")
        self._part_path = _part_path(folder, split, shard)
        self._shard = shard
        self._records: list[tuple[int, ...]] = []
        self._names: list[str] = []
        self._skipped: list[str] = []
        self._length = 0

    def __enter__(self) -> "ShardWriter":
        self._file = open(self._partial, "ab")
        if not self._is_own():
            self._file.close()
            raise DataError(
                f"{self._partial} is being written by another process: expected one that packs into this folder. "
                "Wait for its end, or give each its own --part."
            )
        self._file.truncate(0)
        return self

    def _is_own(self) -> bool:
        """Locks the file; returns whether no other process writes it, or has just given it the name of the shard."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # a file system without locks
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._partial))
        except FileNotFoundError:
            return False

    def __exit__(self, kind: Any, *_: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk, which has been reported
            self._file.close()
        if kind is not None:
            self._partial.unlink(missing_ok=True)

    def add(self, sample: PackedSample) -> None:
        """Appends a sample, or notes that it is left out."""
        if sample.problem:
            self._skipped.append(sample.name)
            return
        member = tarfile.TarInfo(sample.name)
        member.size, member.mode = len(sample.content), 0o644
        header = member.tobuf(tarfile.GNU_FORMAT, errors="surrogateescape")
        offset = self._length + len(header)
        padding = bytes(-len(sample.content) % BLOCK)
        for content in (header, sample.content, padding):
            self._file.write(content)
        self._length = offset + len(sample.content) + len(padding)
        checksum = zlib.crc32(sample.content)
        sizes = sample.width, sample.height
        self._records.append((offset, 0, self._shard, len(sample.content), sample.label, checksum, *sizes))
        self._names.append(sample.name)

    def finish(self) -> None:
        """Makes the shard durable, then its part of the index, which says that it is complete."""
        self._file.write(bytes(2 * BLOCK))
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._partial, self._path)
        sync_path(self._path.parent)
        records = np.array(self._records, RECORD)
        sizes, skipped = {self._shard: self._length + 2 * BLOCK}, {self._shard: self._skipped}
        write_index(self._part_path, IndexPart(records, self._names, sizes, skipped))


def _part_path(folder: Path, split: str, shard: int) -> Path:
    return folder / f".{shard_name(split, shard)}.index"


def find_complete(folder: Path, plan: PackPlan) -> set[tuple[str, int]]:
    """The split and number of every shard that is there as an index says."""
    found = set()
    for split, planned in plan.splits.items():
        sizes: dict[int, int] = {}
        for path in (index_path(folder, split), *(_part_path(folder, split, each) for each in range(planned.shards))):
            with contextlib.suppress(FileNotFoundError, DataError):
                sizes |= Index(path).shard_bytes
        for shard, size in sizes.items():
            with contextlib.suppress(FileNotFoundError):
                if (folder / shard_name(split, shard)).stat().st_size == size:
                    found.add((split, shard))
    return found


def finish_index(folder: Path, split: str, shards: int) -> None:
    """Joins what is known of all shards into the index of the split; another process may do so at the same time."""
    paths = [_part_path(folder, split, shard) for shard in range(shards)]
    whole = index_path(folder, split)
    if whole.is_file() and not any(path.is_file() for path in paths):
        return
    try:
        before = Index(whole).as_part() if whole.is_file() else None
    except DataError:  # damaged: every shard then has a part
        before = None
    try:
        parts = [
            before.of_shard(shard) if before is not None and not path.is_file() else Index(path).as_part()
            for shard, path in enumerate(paths)
        ]
    except FileNotFoundError:  # the other process has removed the parts, after it had written the index
        return
    joined = join_parts(parts)
    if not len(joined.records):
        raise DataError(f"none of the {SPLIT_NAMES[split]} images can be decoded: expected at least one.")
    write_index(whole, joined)
    for path in paths:
        path.unlink(missing_ok=True)
