"""Every member of every shard, compared with its checksum."""

import os
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tutti.data.packed.index import PLAN, SPLIT_NAMES, Index, index_path, is_packed, read_plan, shard_name
from tutti.data.processes import in_order
from tutti.errors import DataError

Report = Callable[[str, int, int], None]  # a name, samples so far, samples in all


def verify(folder: Path, workers: int = 1, report: Report = lambda *_: None) -> list[str]:
    """Returns what is damaged in a packed folder: shards and members by name, with the reason."""
    if not is_packed(folder):
        raise DataError(
            f"{folder} is not a packed dataset: expected a folder with {PLAN}. Give the folder into which you have "
            "packed: tutti data pack FOLDER --verify."
        )
    plan = read_plan(folder)
    found: list[str] = []
    for split, planned in plan.splits.items():
        try:
            index = Index(index_path(folder, split))
        except FileNotFoundError:
            found.append(f"{index_path(folder, split)} is missing: {folder} is not packed to its end")
            continue
        except DataError as error:
            found.append(str(error))
            continue
        if not index.check_names():
            found.append(f"{index.path}: the checksum of its names is wrong")
        done = 0
        for damaged, count in in_order(_verify_shard, (folder, split), range(planned.shards), workers):
            found += damaged
            done += count
            report(f"verify {SPLIT_NAMES[split]}", done, len(index.records))
    return found


def _verify_shard(place: tuple[Path, str], shard: int) -> tuple[list[str], int]:
    """Returns the damaged members of a shard, and how many members it should have."""
    folder, split = place
    index, path = Index(index_path(folder, split)), folder / shard_name(split, shard)
    first, end = (int(each) for each in np.searchsorted(index.records["shard"], [shard, shard + 1]))
    found = []
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        return [f"{path}: {error.strerror}"], end - first
    try:
        size = os.fstat(handle).st_size
        if size != index.shard_bytes[shard]:
            found.append(f"{path}: {size:,} bytes, expected {index.shard_bytes[shard]:,}")
        for number in range(first, end):
            record = index.records[number]
            offset, length = int(record["offset"]), int(record["length"])
            block = tarfile.BLOCKSIZE
            content = os.pread(handle, block + length, offset - block)
            if zlib.crc32(content[block:]) != record["checksum"]:
                found.append(f"{path}: {index.name(number)}: its content has changed")
            elif not _is_header(content[:block], length):
                found.append(f"{path}: {index.name(number)}: its header has changed")
    finally:
        os.close(handle)
    return found, end - first


def _is_header(block: bytes, length: int) -> bool:
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape").size == length
    except tarfile.TarError:
        return False
