"""Random crops per second from a simulation box: tutti, and h5py in a DataLoader with two worker processes.

Claim: on a CPU, tutti delivers at least 5 times (`memory` source) and 3 times (`disk` source) the crops per second of
h5py in a torch DataLoader with two worker processes.

- tutti: `NbodyCrops.batch` with symmetries and vectors, as the recipe `nbody` uses it, in one process with as many
  threads as the peers have workers. The box is in memory or in its file.
- DataLoader, h5py: a map-style dataset as in the tutorial. Each worker opens the file once. A sample draws a corner and
  one of the 24 rotations with NumPy, reads both crops into reused buffers (`read_direct`), rotates and copies them.
- DataLoader, in memory: the same with crops from a box in memory, which forked workers share. For information only: the
  thresholds refer to h5py.

All deliver random crops of 64^3, 4 + 5 channels, float32, in batches of 8. tutti applies all 48 symmetries of the cube
and transforms velocities, which is more work. Before timing, the program checks that all four give the same crop for
the same corner and rotation (without the transformation of velocities), and that both sources of tutti give the same
batch for the same draws.

The file is one that `tutti data make nbody` writes (chunks of 16^3), or --file. `--layout contiguous` rewrites it
without chunks, for information. It is read once before timing, so that it is in the page cache.

Clock: time.perf_counter around --crops crops; every batch is taken and some of its values are summed. The first pass of
every contender, in which worker processes start, is not timed. Contenders alternate; a ratio is the median of the
ratios within each trial.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import permutations, product
from pathlib import Path
from typing import Any

import h5py
import measure
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from tutti.data.nbody.box import CHANNELS, BoxFile, open_box, read_field
from tutti.data.nbody.dataset import NbodyCrops, nbody
from tutti.data.nbody.make import make_nbody
from tutti.data.nbody.sources import AXES, FLIPS, Choices, HostSource, InMemory, read_disk
from tutti.data.order import Draws
from tutti.errors import TuttiError

BARS = {"tutti, memory": 5.0, "tutti, disk": 3.0}
PEER, PEER_IN_MEMORY = "DataLoader, h5py", "DataLoader, in memory"
BATCH = 8
CROP = 64
DEADLINE_SECONDS = 120  # for one batch of a worker process
CPU = torch.device("cpu")
Pair = tuple[torch.Tensor, torch.Tensor]
Pass = Callable[[int], Iterable[Pair]]


def rotations() -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """The 24 rotations of the cube as permutations and reversals of axes, without reflections."""
    found = []
    for axes, flips in product(permutations(range(3)), product((False, True), repeat=3)):
        matrix = np.eye(3)[list(axes)] * np.where(flips, -1, 1)[:, None]
        if np.linalg.det(matrix) > 0:
            found.append((axes, flips))
    return found


ROTATIONS = rotations()


def turned(crop: np.ndarray, rotation: int) -> torch.Tensor:
    """Returns a rotated copy of a crop."""
    axes, flips = ROTATIONS[rotation]
    view = crop.transpose(0, *(1 + axis for axis in axes))
    for axis, flip in enumerate(flips, start=1):
        view = np.flip(view, axis) if flip else view
    return torch.from_numpy(np.copy(view, order="C"))


class FileCrops(Dataset[Pair]):
    """Map-style dataset: random crops through h5py, from a file that each worker opens."""

    def __init__(self, box: BoxFile, samples: int) -> None:
        self._box, self._samples = box, samples
        self._file: Any = None
        self._buffers: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Pair:
        corner = np.random.randint(0, self._box.side - CROP + 1, 3)
        return self.sample(corner, np.random.randint(len(ROTATIONS)))

    def sample(self, corner: np.ndarray, rotation: int) -> Pair:
        """Returns the crops at a corner under a rotation."""
        x, y, z = (slice(int(start), int(start) + CROP) for start in corner)
        inputs, targets = (turned(self.read(name, (slice(None), x, y, z)), rotation) for name in CHANNELS)
        return inputs, targets

    def read(self, name: str, window: tuple[slice, ...]) -> np.ndarray:
        if self._file is None:
            self._file = h5py.File(self._box.path, "r")
            self._buffers = {
                name: np.empty((channels, CROP, CROP, CROP), np.float32) for name, channels in CHANNELS.items()
            }
        self._file[name].read_direct(self._buffers[name], window)
        return self._buffers[name]


class MemoryCrops(FileCrops):
    """Map-style dataset: random crops of a box in memory, which forked workers share."""

    def __init__(self, box: BoxFile, samples: int) -> None:
        super().__init__(box, samples)
        self._fields = {name: read_field(box, name) for name in CHANNELS}

    def read(self, name: str, window: tuple[slice, ...]) -> np.ndarray:
        return self._fields[name][window]


def seed_worker(_: int) -> None:
    """Seeds NumPy's generator in a worker with torch's seed of that worker."""
    np.random.seed(torch.initial_seed() % 2**32)


def torch_loader(samples: Dataset[Pair], workers: int, prefetch_factor: int) -> DataLoader[Pair]:
    """The peer: a DataLoader with persistent workers."""
    return DataLoader(
        samples,
        batch_size=BATCH,
        num_workers=workers,
        persistent_workers=True,
        prefetch_factor=prefetch_factor,
        multiprocessing_context="fork",
        worker_init_fn=seed_worker,
        timeout=DEADLINE_SECONDS,
    )


def tutti_pass(crops: NbodyCrops, seed: int) -> Pass:
    """Returns a function that yields pass number n over tutti's crops."""

    def batches(number: int) -> Iterator[Pair]:
        for ids in torch.arange(len(crops)).split(BATCH):
            yield crops.batch(ids, Draws(seed, number, ids))

    return batches


def prepare(args: argparse.Namespace, folder: Path) -> BoxFile:
    """Returns the box file in the requested layout, after reading it once."""
    path = args.file
    if path is None:
        print(f"making a box of {args.box}^3 cells (--file FILE uses an existing one)", flush=True)
        path = make_nbody(folder / "box.h5", box=args.box, seed=args.seed)
    box = open_box(path, CROP)
    if args.layout == "contiguous":
        path = folder / "contiguous.h5"
        with h5py.File(path, "w") as file:
            for name in CHANNELS:
                file.create_dataset(name, data=read_field(box, name))
        box = open_box(path, CROP)
    with path.open("rb") as file:
        while file.read(2**24):
            pass
    return box


def check_same_crops(box: BoxFile, ours: dict[str, NbodyCrops], seed: int) -> None:
    """Checks that equal corners and rotations give equal crops, and equal draws equal batches of tutti."""
    fields = {name: read_field(box, name) for name in CHANNELS}
    sources = [HostSource(read, CROP, CPU, threads=1) for read in (InMemory(fields), read_disk(box))]
    symmetries = {(tuple(axes), tuple(flips)): row for row, (axes, flips) in enumerate(zip(AXES, FLIPS, strict=True))}
    corners = np.random.default_rng(seed).integers(0, box.side - CROP + 1, (len(ROTATIONS), 3))
    for peer in (FileCrops(box, 1), MemoryCrops(box, 1)):
        for rotation, corner in enumerate(corners):
            theirs = peer.sample(corner, rotation)
            choices = Choices(corner[None], np.array([symmetries[ROTATIONS[rotation]]]), vectors=False)
            for source in sources:
                if not all(torch.equal(a[0], b) for a, b in zip(source.crops(choices), theirs, strict=True)):
                    raise SystemExit(f"error: rotation {rotation} of the crop at {corner} differs from the peer's.")
    ids = torch.arange(BATCH)
    first, second = (crops.batch(ids, Draws(seed, 0, ids)) for crops in ours.values())
    if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        raise SystemExit(f"error: {' and '.join(ours)} differ in a batch of the same draws.")


def crops_per_second(batches: Iterable[Pair]) -> float:
    """Times a pass in which every batch is taken and read."""
    crops, total = 0, 0.0
    began = time.perf_counter()
    for inputs, targets in batches:
        total += sum(float(values[..., :: CROP // 4, 1::16, -1].abs().sum()) for values in (inputs, targets))
        crops += len(inputs)
    seconds = time.perf_counter() - began
    assert 0 < total < np.inf
    return crops / seconds


def compare(args: argparse.Namespace, box: BoxFile) -> dict[str, Any]:
    """Runs the checks and all trials; returns the result."""
    torch.set_num_threads(args.workers)
    torch.manual_seed(args.seed)
    facts = measure.conditions(
        box=box.side,
        layout=args.layout,
        crop=CROP,
        per_rank_batch=BATCH,
        ranks=1,
        threads_per_rank=args.workers,
        workers_of_peer=args.workers,
        prefetch_factor=args.prefetch,
        crops_per_trial=args.crops,
        seed=args.seed,
        trials=args.trials,
    )
    measure.print_conditions(facts)
    loaders = {
        name: torch_loader(samples(box, args.crops), args.workers, args.prefetch)
        for name, samples in ((PEER, FileCrops), (PEER_IN_MEMORY, MemoryCrops))
    }
    for loader in loaders.values():  # before this process has threads: forking with threads is not safe
        crops_per_second(loader)
    ours = {
        f"tutti, {kind}": nbody("train", str(box.path), "", source=kind, crop=CROP, train_samples=args.crops)
        for kind in ("memory", "disk")
    }
    check_same_crops(box, ours, args.seed)
    print("checked: same crops for the same corner and rotation, same batch for the same draws", flush=True)
    contenders: dict[str, Pass] = {name: tutti_pass(crops, args.seed) for name, crops in ours.items()}
    for batches in contenders.values():
        crops_per_second(batches(0))
    contenders |= {name: lambda _, loader=loader: loader for name, loader in loaders.items()}
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for trial, name in measure.alternating(list(contenders), args.trials):
        rates[name].append(crops_per_second(contenders[name](1 + trial)))
    over = {peer: {name: measure.paired(rates[name], rates[peer]) for name in rates} for peer in loaders}
    return {
        "program": "crops",
        "conditions": facts,
        "crops_per_second": {name: measure.spread(values) | {"trials": values} for name, values in rates.items()},
        "over": over,
        "bars": {
            f"{name}: at least {bar:g} times {PEER}": over[PEER][name]["median"] >= bar
            for name, bar in BARS.items()
            if args.layout == "chunked"
        },
    }


def show(result: dict[str, Any]) -> None:
    """Prints the table and the verdict."""
    facts = result["conditions"]
    workers = facts["workers_of_peer"]
    print(
        f"\n{facts['crops_per_trial']:,} crops of {CROP}^3 from a {facts['layout']} box of {facts['box']}^3, "
        f"batches of {BATCH}; tutti with {workers} threads, DataLoader with {workers} workers:"
    )
    rows = []
    for name, rate in result["crops_per_second"].items():
        ratios = [measure.shown(result["over"][peer][name], 2) for peer in (PEER, PEER_IN_MEMORY)]
        rows.append([name, *measure.shown(rate, 1), f"{1e3 * BATCH / rate['median']:,.0f}", *ratios[0], *ratios[1]])
    head = ["contender", "crops/s", "min", "max", "ms/batch", "over h5py", "min", "max", "over in memory", "min", "max"]
    measure.print_table(head, rows)
    if result["bars"]:
        measure.print_verdict(result["bars"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Random crops per second of a box: tutti, and a DataLoader with worker processes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--trials", type=int, default=7, help="trials of every contender")
    parser.add_argument("--crops", type=int, default=256, help="crops in a trial")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of the DataLoader, threads of tutti")
    parser.add_argument("--prefetch", type=int, default=2, help="the prefetch_factor of the DataLoader")
    parser.add_argument("--seed", type=int, default=42, help="seed of the box and of the draws")
    parser.add_argument("--file", type=Path, help="an existing box; otherwise one is made, in about a minute")
    parser.add_argument("--box", type=int, default=256, help="side of the box that is made")
    parser.add_argument(
        "--layout", choices=("chunked", "contiguous"), default="chunked", help="the file as it is, or without chunks"
    )
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="crops.") as folder:
        try:
            result = compare(args, prepare(args, Path(folder)))
        except TuttiError as error:
            raise SystemExit(f"error: {error}") from error
    show(result)
    measure.write_json(args.out, result)


if __name__ == "__main__":
    main()
