"""Packing: samples shrunk by worker processes and written in order into tar shards, each complete or absent."""

import contextlib
import errno
import os
import zlib
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from tutti.data.packed.encode import PackedSample, PackOptions, encode, encode_chunk
from tutti.data.packed.index import (
    PLAN,
    SPLIT_NAMES,
    Index,
    PackPlan,
    PlannedSplit,
    index_path,
    is_packed,
    iterate_shards,
    read_plan,
)
from tutti.data.packed.shards import BLOCK, ShardWriter, find_complete, finish_index
from tutti.data.packed.sources import PackSource, SourceSplit
from tutti.data.processes import in_order
from tutti.errors import ConfigError, DataError
from tutti.runs.files import remove_unfinished, write_dataclass

Report = Callable[[str, int, int], None]  # split, samples so far, samples in all
_CHUNK = 16  # samples in a task of a worker
_MEASURED = 64  # samples from which the bytes of a sample are estimated


@dataclass(frozen=True)
class PackSummary:
    """What a packed folder holds, and how many shards other parts still have to write."""

    samples: dict[str, int]
    shards: int
    size_bytes: int
    skipped: list[str]
    missing: int = 0


def pack(
    source: Callable[[], PackSource],
    name: str,
    folder: Path,
    options: PackOptions,
    workers: int = 1,
    part: tuple[int, int] = (0, 1),
    skips: bool = False,
    report: Report = lambda *_: None,
) -> PackSummary:
    """Writes the shards of this part that are missing, and the index once there are all."""
    options.check()
    plan = read_plan(folder) if is_packed(folder) else None
    if plan is not None:
        _check_same(plan, options, folder)
    if plan is not None and not _count_missing(folder, plan):
        if plan.source != name:  # else it need not be there any more
            _check_source(plan, source(), name, folder)
    else:
        try:
            _write_missing(source(), name, folder, options, workers, part, skips, report)
        except OSError as error:
            fix = "Free disk space" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "Check the folder"
            raise DataError(_stopped(folder, f"{folder} cannot be written: {error.strerror}.", fix)) from error
        except BrokenProcessPool as error:
            raise DataError(_stopped(folder, "a packing process was killed.", "Use fewer --workers")) from error
    return _summarise(folder)


def _write_missing(
    source: PackSource,
    name: str,
    folder: Path,
    options: PackOptions,
    workers: int,
    part: tuple[int, int],
    skips: bool,
    report: Report,
) -> None:
    _check_text(source, name)
    folder.mkdir(parents=True, exist_ok=True)
    if not is_packed(folder):
        _check_free(folder)
        write_dataclass(folder / PLAN, _make_plan(source, name, options))
    plan = read_plan(folder)
    _check_source(plan, source, name, folder)
    complete = find_complete(folder, plan)
    own = [place for number, place in enumerate(iterate_shards(plan)) if number % part[1] == part[0]]
    for split in plan.splits:
        todo = [shard for each, shard in own if each == split and (split, shard) not in complete]
        _write_shards(source, split, plan, todo, folder, workers, skips, report)
    if _count_shards_missing(folder, plan):
        return
    for split, planned in plan.splits.items():
        finish_index(folder, split, planned.shards)
    if part[1] == 1:
        remove_unfinished(folder)


# The plan.


def _make_plan(source: PackSource, name: str, options: PackOptions) -> PackPlan:
    """Cuts every split into shards by the mean size of a few samples, so that workers and kills do not matter."""
    splits = {}
    for split, samples in source.splits.items():
        count = len(samples)
        chosen = sorted({count * number // _MEASURED for number in range(_MEASURED)})
        made = [encode(samples, index, source.kind, options) for index in chosen]
        sizes = [len(sample.content) + BLOCK for sample in made if not sample.problem] or [1]
        shards = max(1, round(count * sum(sizes) / len(sizes) / (options.shard_mb * 1e6)))
        splits[split] = PlannedSplit(count, min(shards, count), _names_checksum(samples))
    return PackPlan(1, source.kind, name, classes=source.classes, splits=splits, **asdict(options))


def _names_checksum(samples: SourceSplit) -> int:
    checksum = 0
    for index in range(len(samples)):
        checksum = zlib.crc32(os.fsencode(samples.name(index)) + b"\0", checksum)
    return checksum


def _check_source(plan: PackPlan, source: PackSource, name: str, folder: Path) -> None:
    """Raises DataError if the source has other samples than those that the plan divides."""
    planned = {split: (each.samples, each.names) for split, each in plan.splits.items()}
    found = {split: (len(each), _names_checksum(each)) for split, each in source.splits.items()}
    is_other = plan.kind == "arrays" and plan.source != name  # whose samples have numbers for names
    if is_other or (planned, plan.classes, plan.kind) != (found, source.classes, source.kind):
        raise DataError(
            f"{name} holds other samples than when {folder} was begun from {plan.source}: expected the same names and "
            "classes. Choose another folder, or remove it to pack anew."
        )


def _check_text(source: PackSource, name: str) -> None:
    """Raises DataError for names that the plan, which is JSON, cannot hold."""
    for each in (name, *source.classes):
        try:
            each.encode()
        except UnicodeEncodeError as error:
            shown = os.fsencode(each).decode(errors="backslashreplace")
            raise DataError(
                f"{shown} is not UTF-8: expected such names of the source and of its classes. Rename it."
            ) from error


def _check_same(plan: PackPlan, options: PackOptions, folder: Path) -> None:
    for name, given in asdict(options).items():
        if getattr(plan, name) != given:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} {given:g}, but {folder} was packed with {option} {getattr(plan, name):g}: expected the same "
                "options to finish it. Give those, or choose another folder."
            )


def _check_free(folder: Path) -> None:
    others = [path for path in folder.iterdir() if not path.name.startswith(".")]
    if others and not is_packed(folder):  # another part may have written the plan meanwhile
        raise DataError(f"{folder} is not empty and not a packed dataset: expected a new or an empty folder.")


def _count_missing(folder: Path, plan: PackPlan) -> int:
    """The shards and indexes that are not there."""
    indexes = sum(not index_path(folder, split).is_file() for split in plan.splits)
    return indexes + _count_shards_missing(folder, plan)


def _count_shards_missing(folder: Path, plan: PackPlan) -> int:
    return sum(planned.shards for planned in plan.splits.values()) - len(find_complete(folder, plan))


def _write_shards(
    source: PackSource,
    split: str,
    plan: PackPlan,
    todo: list[int],
    folder: Path,
    workers: int,
    skips: bool,
    report: Report,
) -> None:
    bounds = [plan.splits[split].bounds(shard) for shard in todo]
    chunks = [
        range(start, min(start + _CHUNK, each.stop))
        for each in bounds
        for start in range(each.start, each.stop, _CHUNK)
    ]
    shared = source, split, PackOptions(plan.size, plan.quality, plan.shard_mb)
    count, total = 0, sum(map(len, bounds))
    with closing(in_order(encode_chunk, shared, chunks, min(workers, len(chunks)))) as made:
        for shard, samples in zip(todo, bounds, strict=True):
            with ShardWriter(folder, split, shard) as writer:
                for _ in range(0, len(samples), _CHUNK):
                    for sample in next(made):
                        if sample.problem and not skips:
                            raise DataError(_refusal(folder, plan, sample))
                        writer.add(sample)
                        count += 1
                        report(SPLIT_NAMES[split], count, total)
                writer.finish()


def _refusal(folder: Path, plan: PackPlan, sample: PackedSample) -> str:
    return _stopped(
        folder,
        f"{plan.source}: {sample.name} cannot be decoded as an image ({sample.problem}).",
        "Replace it, or leave such images out with --corrupt skip",
    )


def _stopped(folder: Path, problem: str, fix: str) -> str:
    """The message of a pack that stopped: what is complete stays."""
    kept = ""
    with contextlib.suppress(DataError):
        plan = read_plan(folder)
        total = sum(planned.shards for planned in plan.splits.values())
        kept = f" {len(find_complete(folder, plan))} of {total} shards are complete and are kept."
    return f"{problem}{kept} {fix}, and run the command again."


def _summarise(folder: Path) -> PackSummary:
    plan = read_plan(folder)
    if _count_missing(folder, plan):
        return PackSummary({}, 0, 0, [], max(1, _count_shards_missing(folder, plan)))
    indexes = {split: Index(index_path(folder, split)) for split in plan.splits}
    return PackSummary(
        {split: len(index.records) for split, index in indexes.items()},
        sum(planned.shards for planned in plan.splits.values()),
        sum(size for index in indexes.values() for size in index.shard_bytes.values()),
        [name for index in indexes.values() for names in index.skipped.values() for name in names],
    )
