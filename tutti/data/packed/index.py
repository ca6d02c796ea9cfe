"""The index of a packed split, and its samples read by position from the shards."""

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tutti.data.packed.open_shards import OpenShards, ReadAhead
from tutti.data.packed.staging import Stage, StagedShards
from tutti.errors import DataError
from tutti.runs.files import read_dataclass, write_durably

PLAN = "pack.json"
SPLIT_NAMES = {"train": "train", "valid": "validation"}
RECORD = np.dtype(
    [
        ("offset", "<u8"),  # of the content in its shard
        ("name_end", "<u8"),  # in the names, which follow the records
        ("shard", "<u4"),
        ("length", "<u4"),
        ("label", "<i4"),
        ("checksum", "<u4"),  # CRC-32 of the content
        ("width", "<u4"),  # in pixels, before shrinking; 0 if the sample is no image
        ("height", "<u4"),
    ]
)
_MAGIC = b"tutti index 1\n"
_ALIGNMENT = 64


@dataclass(frozen=True)
class PlannedSplit:
    """The source samples of a split, cut into shards of about equal numbers."""

    samples: int
    shards: int
    names: int  # CRC-32 of the names of all samples, in order

    def bounds(self, shard: int) -> range:
        """The source samples of a shard."""
        return range(self.samples * shard // self.shards, self.samples * (shard + 1) // self.shards)


@dataclass(frozen=True)
class PackPlan:
    """What a packed folder holds, decided before the first shard is written."""

    format: int
    kind: str  # images, or arrays
    source: str
    size: int
    quality: int
    shard_mb: float
    classes: list[str]
    splits: dict[str, PlannedSplit]


@dataclass(frozen=True)
class IndexPart:
    """Records of some samples in order, with their names, and what was left out of each shard."""

    records: np.ndarray
    names: list[str]
    shard_bytes: dict[int, int]
    skipped: dict[int, list[str]] = field(default_factory=dict)

    def of_shard(self, shard: int) -> "IndexPart":
        """The part that belongs to one shard."""
        first, end = np.searchsorted(self.records["shard"], [shard, shard + 1])
        names = self.names[first:end]
        return IndexPart(
            self.records[first:end], names, {shard: self.shard_bytes[shard]}, {shard: self.skipped.get(shard, [])}
        )


def is_packed(folder: Path) -> bool:
    return (folder / PLAN).is_file()


def shard_name(split: str, shard: int) -> str:
    return f"{SPLIT_NAMES[split]}-{shard:05d}.tar"


def shard_path(folder: Path, split: str, shard: int) -> Path:
    return folder / shard_name(split, shard)


def index_path(folder: Path, split: str) -> Path:
    return folder / f"{SPLIT_NAMES[split]}.index"


def read_plan(folder: Path) -> PackPlan:
    """Reads what a packed folder should hold."""
    try:
        return read_dataclass(folder / PLAN, PackPlan)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder / PLAN} cannot be read as the plan of a packed dataset ({error}). Remove the folder "
            "and pack again."
        ) from error


def join_parts(parts: Sequence[IndexPart]) -> IndexPart:
    """Joins the parts of consecutive shards."""
    sizes = {shard: size for part in parts for shard, size in part.shard_bytes.items()}
    skipped = {shard: names for part in parts for shard, names in part.skipped.items() if names}
    names = [name for part in parts for name in part.names]
    return IndexPart(np.concatenate([part.records for part in parts]), names, sizes, skipped)


def write_index(path: Path, part: IndexPart) -> None:
    """Writes an index: a header of JSON, the records, and the names."""
    encoded = [os.fsencode(name) for name in part.names]
    records = part.records.copy()
    records["name_end"] = np.cumsum([len(name) for name in encoded], dtype=np.uint64)
    body, names = records.tobytes(), b"".join(encoded)
    header = {
        "samples": len(records),
        "names_bytes": len(names),
        "records_checksum": zlib.crc32(body),
        "names_checksum": zlib.crc32(names),
        "shard_bytes": {str(shard): size for shard, size in part.shard_bytes.items()},
        "skipped": {str(shard): found for shard, found in part.skipped.items()},
    }
    text = json.dumps(header).encode()
    length = -(-(len(_MAGIC) + len(text) + 1) // _ALIGNMENT) * _ALIGNMENT
    write_durably(path, _MAGIC + text.ljust(length - len(_MAGIC) - 1) + b"\n" + body + names)


class Index:
    """An index file in mapped memory: its pages are shared by all processes of a host."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._map = np.memmap(path, np.uint8, "r").view(np.ndarray)  # its subclass is slow to index
            start, header = _read_header(self._map)
            end = start + header["samples"] * RECORD.itemsize
            if end + header["names_bytes"] != len(self._map):
                raise ValueError("it is shorter or longer than its header says")
            self.records = self._map[start:end].view(RECORD)
            self._names = self._map[end:]
            self._names_checksum = int(header["names_checksum"])
            if zlib.crc32(self._map[start:end].data) != header["records_checksum"]:
                raise ValueError("the checksum of its records is wrong")
            self.shard_bytes = {int(shard): int(size) for shard, size in header["shard_bytes"].items()}
            self.skipped = {int(shard): [str(name) for name in names] for shard, names in header["skipped"].items()}
        except FileNotFoundError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} cannot be read as the index of a packed dataset ({error}). Remove it and the shards of its "
                "split, and run tutti data pack again."
            ) from error

    def name(self, index: int) -> str:
        start = int(self.records["name_end"][index - 1]) if index else 0
        return os.fsdecode(bytes(self._names[start : int(self.records["name_end"][index])]))

    def check_names(self) -> bool:
        """Returns whether the names are as they were written."""
        return zlib.crc32(self._names.data) == self._names_checksum

    def as_part(self) -> IndexPart:
        names = [self.name(index) for index in range(len(self.records))]
        return IndexPart(np.array(self.records), names, self.shard_bytes, self.skipped)


class PackedSamples:
    """The samples of a packed split, read in any order by any number of processes."""

    def __init__(self, folder: Path, split: str, staged: StagedShards | None = None) -> None:
        self.folder, self.split, self.staged = folder, split, staged
        self.plan = read_plan(folder)
        if split not in self.plan.splits:
            raise DataError(
                f"{folder} holds no packed {SPLIT_NAMES[split]} samples: its source had none. Pack a source with them."
            )
        try:
            self.index = Index(index_path(folder, split))
        except FileNotFoundError:
            raise DataError(
                f"{folder} is not packed to its end: {index_path(folder, split).name} is missing. "
                f"Run it again: tutti data pack {self.plan.source} {folder}"
            ) from None
        for shard, size in self.index.shard_bytes.items():
            _check_size(folder / shard_name(split, shard), size)
        self._path = partial(shard_path, folder, split)
        self._open = OpenShards(self._path)
        self._ahead = ReadAhead(self._path, max(self.index.shard_bytes, default=0) + 1)

    def __reduce__(self) -> Any:
        return PackedSamples, (self.folder, self.split, self.staged)

    def stage(self, disk: str, keep: bool, samples: int | None = None) -> Stage:
        """Prepare to copy the shards of the first samples to a disk of this host, and read from there."""
        stage = Stage(self._path, self.index.records[:samples], self.index.shard_bytes, disk, self.split, keep)
        self.staged = stage.staged
        return stage

    def __len__(self) -> int:
        return len(self.index.records)

    def blocks(self, samples: int) -> list[int]:
        """The first sample of each shard, up to a number of samples."""
        return np.unique(self.index.records["shard"][:samples], return_index=True)[1].tolist()

    def read_ahead(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Has a thread read the samples of blocks in sequence; copies on a disk of the host are not read ahead."""
        if self.staged is not None:
            return
        for first, last in blocks:
            records = self.index.records[first:last]
            for shard in np.unique(records["shard"]).tolist():
                own = records[records["shard"] == shard]
                self._ahead.add(shard, int(own["offset"].min()), int((own["offset"] + own["length"]).max()))

    def label(self, index: int) -> int:
        return int(self.index.records["label"][index])

    def path(self, index: int) -> str:
        """The shard of a sample and its name there."""
        shard = self._path(int(self.index.records["shard"][index]))
        return f"{shard}:{self.index.name(index)}"

    def read(self, index: int) -> bytes:
        """Reads the content of a sample; raises ValueError if its checksum is wrong."""
        record = self.index.records[index]
        shard, length, offset = int(record["shard"]), int(record["length"]), int(record["offset"])
        if self.staged is not None and (content := self.staged.read(shard, length, offset)) is not None:
            if zlib.crc32(content) == record["checksum"]:
                return content
            self.staged.give_up(shard, "a sample has a wrong checksum")
        self._ahead.wait(shard, offset + length)
        content = self._open.read(shard, length, offset)
        if zlib.crc32(content) != record["checksum"]:
            raise ValueError("its checksum is wrong")
        return content


def _read_header(content: np.ndarray) -> tuple[int, dict[str, Any]]:
    """Returns the position of the first record, and the header."""
    if bytes(content[: len(_MAGIC)]) != _MAGIC:
        raise ValueError(f"it does not begin with {_MAGIC.decode().strip()!r}")
    end = _find_line_end(content, len(_MAGIC))
    header = json.loads(bytes(content[len(_MAGIC) : end]))
    if not isinstance(header, dict) or min(header["samples"], header["names_bytes"]) < 0:
        raise ValueError("its header is damaged")
    return end + 1, header


def _find_line_end(content: np.ndarray, start: int) -> int:
    step = 1 << 16
    for begin in range(start, len(content), step):
        found = bytes(content[begin : begin + step]).find(b"\n")
        if found >= 0:
            return begin + found
    raise ValueError("its header has no end")


def _check_size(path: Path, expected: int) -> None:
    fix = "Remove it, and run tutti data pack again: it writes what is missing."
    try:
        found = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. {fix}") from error
    if found != expected:
        raise DataError(f"{path} has {found:,} bytes: expected {expected:,}, as its index says. {fix}")


def iterate_shards(plan: PackPlan) -> Iterator[tuple[str, int]]:
    """Yields every split and shard of a plan."""
    for split, planned in plan.splits.items():
        yield from ((split, shard) for shard in range(planned.shards))
