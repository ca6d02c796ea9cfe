"""Memory and time of the sample order at 10^6, 10^8 and 10^10 samples, and reading in that order from a slow disk.

Claims: the memory of the keyed order does not grow with the samples, and the ids of a step take as long at 10^10
samples as at 10^6; a disk that seeks slowly is read in blocks almost as fast as in sequence.

Order. One rank of 8 with 256 samples a step takes the ids of its steps (`SampleOrder.rank_ids`):

- stored: the permutation of all samples, 8 bytes each, where it fits into --most-gib;
- keyed: `data.shuffle=keyed`, the sample of a position computed from the position;
- blocks: `data.shuffle=blocks` with --block samples in a block and windows of 8.

Memory is what tracemalloc counts: held after the first step of an epoch, and at its peak. The clock is
time.perf_counter: of the first step of an epoch, in which a permutation or the order of blocks is made, and the median
over --steps of the steps after it.

Reading. Records of --record-kib, in one file of --file-mib that is written first, come through tutti's `Loader` in
batches of 64; a record is one `pread`, eight of them at a time:

- random: the keyed order;
- blocks: blocks of 16 MiB in windows of 4, read ahead in sequence by a thread as the loader announces them;
- packed, random and packed, blocks: the same orders of records that `tutti data pack` wrote into shards of 16 MiB, by
  the dataset `packed` in two loader processes; a thread of the rank reads the shards of a window ahead;
- in sequence: the file from its beginning, 1 MiB at a time, without records. This is the limit.

The kernel throttles the disk to --megabytes and --requests a second, which a hard disk or a busy shared file system
has, through the blkio controller of cgroup v1 (as root). Without it nothing is throttled, and the table says so. The
page cache is dropped for all files before each trial. Clock: time.perf_counter around an epoch, or --seconds of one,
with the wait for the first batch. Contenders alternate; ratios are within each trial.
"""

import argparse
import contextlib
import gc
import os
import statistics
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch

from tutti.config.layout import Layout
from tutti.config.load import load
from tutti.config.plan import Plan
from tutti.data.loader import Loader
from tutti.data.order import SampleOrder, make_order
from tutti.data.packed.arrays import packed_arrays
from tutti.data.packed.encode import PackOptions
from tutti.data.packed.sources import DatasetSamples, PackSource
from tutti.data.packed.write import pack

RANKS, PER_RANK, RANK = 8, 256, 3
WINDOW = 8
BATCH, READ_WINDOW, BLOCK_BYTES, CHUNK, WORKERS = 64, 4, 16 << 20, 1 << 20, 2
CPU = torch.device("cpu")
CGROUPS = Path("/sys/fs/cgroup/blkio")


def make(plan: Plan, *overrides: str) -> SampleOrder:
    """Returns an order as a recipe names it."""
    return make_order(load("digits", *overrides), plan, None)


# Memory and time.


def measure_order(samples: int, overrides: tuple[str, ...], steps: int) -> dict[str, float]:
    """Returns the memory of an order, and the seconds of its first and its later steps."""
    plan = Plan(Layout(RANKS), RANKS * PER_RANK, PER_RANK, PER_RANK, samples, epochs=2)
    make(plan, *overrides).rank_ids(0, RANK)  # what is imported at the first call
    tracemalloc.start()
    traced = make(plan, *overrides)
    traced.rank_ids(plan.steps_per_epoch, RANK)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del traced
    order = make(plan, *overrides)
    began = time.perf_counter()
    order.rank_ids(plan.steps_per_epoch, RANK)
    first = time.perf_counter() - began
    later = []
    for step in range(plan.steps_per_epoch + 1, plan.steps_per_epoch + 1 + min(steps, plan.steps_per_epoch - 1)):
        began = time.perf_counter()
        order.rank_ids(step, RANK)
        later.append(time.perf_counter() - began)
    return {"held_bytes": held, "peak_bytes": peak, "first_seconds": first, "step_seconds": statistics.median(later)}


def measure_orders(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns what was measured for each contender and number of samples."""
    contenders = {
        "stored": ("data.shuffle=stored",),
        "keyed": ("data.shuffle=keyed",),
        "blocks": ("data.shuffle=blocks", f"data.shuffle_block={args.block}", f"data.shuffle_window={WINDOW}"),
    }
    found: dict[str, dict[str, Any]] = {name: {} for name in contenders}
    for samples in args.samples:
        for name, overrides in contenders.items():
            if name == "stored" and 8 * samples > args.most_gib * 2**30:
                found[name][str(samples)] = None
            else:
                found[name][str(samples)] = measure_order(samples, overrides, args.steps)
    return found


# Reading.


class Records:
    """Records of one size in a file; blocks that are told are read ahead in sequence."""

    def __init__(self, path: Path, record_bytes: int) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self._bytes, self._count = record_bytes, path.stat().st_size // record_bytes
        self.blocks = range(0, self._count, BLOCK_BYTES // record_bytes)
        self._readers = ThreadPoolExecutor(8)
        self._ahead = ThreadPoolExecutor(1)
        self._told: dict[int, threading.Event] = {}  # by block: set when it has been read

    def __len__(self) -> int:
        return self._count

    def batch(self, ids: torch.Tensor, draws: Any) -> tuple[torch.Tensor, torch.Tensor]:
        records = list(self._readers.map(self._read, ids.tolist()))
        return torch.from_numpy(np.stack(records)), ids

    def read_ahead(self, blocks: list[tuple[int, int]]) -> None:
        """Has a thread read blocks of records into the page cache."""
        for first, last in blocks:
            done = self._told[first // self.blocks.step] = threading.Event()
            self._ahead.submit(self._read_block, first * self._bytes, last * self._bytes, done)

    def close(self) -> None:
        self._ahead.shutdown(cancel_futures=True)
        self._readers.shutdown()
        os.close(self._file)

    def _read(self, number: int) -> np.ndarray:
        if told := self._told.get(number // self.blocks.step):
            told.wait()
        return np.frombuffer(os.pread(self._file, self._bytes, number * self._bytes), np.uint8)

    def _read_block(self, begin: int, end: int, done: threading.Event) -> None:
        read_in_sequence(self._file, begin, end)
        done.set()


def read_in_sequence(file: int, begin: int, end: int, until: float = float("inf")) -> int:
    """Reads a range of a file, and returns the bytes that were read before a time."""
    buffer = memoryview(bytearray(CHUNK))
    place = begin
    while place < end and time.perf_counter() < until:
        place += os.preadv(file, [buffer[: end - place]], place)
    return place - begin


@contextlib.contextmanager
def throttled(path: Path, bytes_per_second: int, requests_per_second: int) -> Iterator[bool]:
    """Limits what this process reads from the disk of a file; yields whether that was possible."""
    number = path.stat().st_dev
    disk = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    group = CGROUPS / f"tutti-order-{os.getpid()}"
    try:
        before = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":blkio:" in line)
        name = ((disk.parent if (disk / "partition").exists() else disk) / "dev").read_text().strip()
        group.mkdir()
    except (OSError, StopIteration):
        yield False
        return
    try:
        (group / "blkio.throttle.read_bps_device").write_text(f"{name} {bytes_per_second}")
        (group / "blkio.throttle.read_iops_device").write_text(f"{name} {requests_per_second}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield True
    finally:
        (CGROUPS / before.rpartition(":")[2].strip("/") / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def records_per_second(path: Path, record_bytes: int, overrides: tuple[str, ...], seconds: float) -> float:
    """Reads an epoch, or so many seconds of one, in an order."""
    records = Records(path, record_bytes)
    try:
        return read_records(records, overrides, seconds, workers=0)
    finally:
        records.close()


def read_records(records: Any, overrides: tuple[str, ...], seconds: float, workers: int) -> float:
    """Takes the batches of an epoch, or of so many seconds of one, from tutti's loader; returns records a second."""
    plan = Plan(Layout(1), BATCH, BATCH, BATCH, len(records), epochs=1)
    order = make_order(load("digits", *overrides), plan, records)
    began, taken, passed = time.perf_counter(), 0, 0.0
    batches = Loader(records, plan, order, 0, CPU, workers, prefetch=0).steps(0)
    with contextlib.closing(batches):  # pyright: ignore[reportArgumentType]
        for batch in batches:
            taken, passed = taken + len(batch.ids), time.perf_counter() - began
            if passed > seconds:
                break
    return taken / passed


class Noise:
    """Records to pack: random bytes of one size, with the label 0."""

    def __init__(self, count: int, record_bytes: int, seed: int) -> None:
        self._count, self._bytes, self._seed = count, record_bytes, seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.random.default_rng([self._seed, index]).integers(0, 256, self._bytes, np.uint8), 0


def pack_noise(records: Noise, folder: Path) -> Path:
    """Packs records into shards of 16 MB."""
    source = PackSource("arrays", [], {"train": DatasetSamples(records, "noise")})
    pack(lambda: source, "noise", folder, PackOptions(shard_mb=BLOCK_BYTES / 1e6), workers=2)
    return folder


def packed_per_second(folder: Path, overrides: tuple[str, ...], seconds: float) -> float:
    """Reads an epoch of packed records, or so many seconds of one, in an order."""
    return read_records(packed_arrays("train", str(folder)), overrides, seconds, WORKERS)


def sequence_per_second(path: Path, record_bytes: int, seconds: float) -> float:
    """Reads a file from its beginning, for so many seconds; the speed as records a second."""
    file = os.open(path, os.O_RDONLY)
    try:
        began = time.perf_counter()
        count = read_in_sequence(file, 0, path.stat().st_size, began + seconds)
        return count / record_bytes / (time.perf_counter() - began)
    finally:
        os.close(file)


def drop_cache(folder: Path) -> None:
    """Drops the page cache of all files of a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)


def measure_reading(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns records a second of every contender and trial."""
    path, size = folder / "records", args.record_kib << 10
    generator = np.random.default_rng(args.seed)
    with open(path, "wb") as file:
        for _ in range(args.file_mib):
            file.write(generator.bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    packed = pack_noise(Noise(path.stat().st_size // size, size, args.seed), folder / "packed")
    random, blocks = ("data.shuffle=keyed",), ("data.shuffle=blocks", f"data.shuffle_window={READ_WINDOW}")
    contenders: dict[str, Callable[[], float]] = {
        "random": lambda: records_per_second(path, size, random, args.seconds),
        "blocks": lambda: records_per_second(path, size, blocks, args.seconds),
        "packed, random": lambda: packed_per_second(packed, random, args.seconds),
        "packed, blocks": lambda: packed_per_second(packed, blocks, args.seconds),
        "in sequence": lambda: sequence_per_second(path, size, args.seconds),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    limited = []
    for _, name in measure.alternating(list(contenders), args.trials):
        drop_cache(folder)
        with throttled(path, args.megabytes * 10**6, args.requests) as done:
            rates[name].append(contenders[name]())
            gc.collect()  # ends the thread that reads ahead
        limited.append(done)
    return {"throttled": all(limited), "rates": rates}


# The result.


def show_orders(found: dict[str, dict[str, Any]], block: int) -> None:
    """Prints the table of memory and time."""
    print(f"\none rank of {RANKS}, {PER_RANK} samples a step; blocks of {block:,} in windows of {WINDOW}:")
    rows = []
    for samples in found["keyed"]:
        for name in found:
            row = found[name][samples]
            if row is None:
                rows.append([f"{int(samples):,} {name}", f"({8 * int(samples) / 2**20:,.0f})", "", "", ""])
                continue
            held, peak = (f"{row[key] / 2**20:,.3f}" for key in ("held_bytes", "peak_bytes"))
            first, later = f"{1e3 * row['first_seconds']:,.2f}", f"{1e6 * row['step_seconds']:,.0f}"
            rows.append([f"{int(samples):,} {name}", held, peak, first, later])
    measure.print_table(["samples", "MiB held", "MiB at peak", "ms first step", "us a step"], rows)


def show_reading(found: dict[str, Any], args: argparse.Namespace) -> None:
    """Prints the table of reading."""
    limits = f"throttled to {args.megabytes} MB/s and {args.requests} requests/s"
    print(f"\nrecords of {args.record_kib} KiB, disk {limits if found['throttled'] else 'NOT throttled'}:")
    rows = []
    for name, values in found["rates"].items():
        megabytes = f"{statistics.median(values) * args.record_kib * 1024 / 1e6:,.1f}"
        over = measure.shown(measure.paired(values, found["rates"]["random"]), 2)
        rows.append([name, *measure.shown(measure.spread(values), 0), megabytes, *over])
    measure.print_table(["order", "records/s", "min", "max", "MB/s", "over random", "min", "max"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Memory and time of the sample order, and reading in that order from a throttled disk.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--samples", type=int, nargs="+", default=[10**6, 10**8, 10**10], help="sizes of the dataset")
    parser.add_argument("--block", type=int, default=5000, help="samples in a block")
    parser.add_argument("--steps", type=int, default=400, help="steps over which the time is taken")
    parser.add_argument("--most-gib", type=float, default=2, help="the largest stored permutation that is made")
    parser.add_argument("--trials", type=int, default=3, help="trials of every reader")
    parser.add_argument("--seconds", type=float, default=6, help="the longest trial of a reader")
    parser.add_argument("--file-mib", type=int, default=512, help="size of the file that is read")
    parser.add_argument("--record-kib", type=int, default=112, help="size of a record; 4 KiB pages are not shared")
    parser.add_argument("--megabytes", type=int, default=100, help="MB/s of the throttled disk")
    parser.add_argument("--requests", type=int, default=200, help="requests/s of the throttled disk")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to read from; default: the temporary one")
    parser.add_argument("--seed", type=int, default=42, help="seed of the records")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts = measure.conditions(ranks=1, trials=args.trials, seed=args.seed)
    measure.print_conditions(facts)
    orders = measure_orders(args)
    show_orders(orders, args.block)
    with tempfile.TemporaryDirectory(prefix="tutti-order-", dir=args.folder) as folder:
        reading = measure_reading(args, Path(folder))
    show_reading(reading, args)
    few, many = (orders["keyed"][str(samples)] for samples in (min(args.samples), max(args.samples)))
    rates = reading["rates"]
    shares = {
        name: measure.paired(rates[name], rates["in sequence"])["median"] for name in ("blocks", "packed, blocks")
    }
    bars = {
        "keyed: at most 64 KiB at the most samples": many["peak_bytes"] <= 1 << 16,
        "keyed: a step at most 1.5 times that of the fewest samples": many["step_seconds"] <= 1.5 * few["step_seconds"],
    }
    bars |= {
        f"{name}: at least 0.8 of reading in sequence ({share:.2f})": share >= 0.8 for name, share in shares.items()
    }
    measure.print_verdict(bars)
    measure.write_json(
        args.out, {"program": "order", "conditions": facts, "orders": orders, "reading": reading, "bars": bars}
    )


if __name__ == "__main__":
    main()
