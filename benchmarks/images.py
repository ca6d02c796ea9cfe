"""Images per second of a training set like ImageNet on two cores: tutti, packed and from the tree, and DataLoaders.

Claim: with two loader processes on two cores, tutti delivers at least 5 times the images per second of Pillow in a
torch DataLoader from a packed folder, and at least 1.4 times from the same tree of files.

- tutti, packed: the dataset `images` from a folder that `tutti data pack` wrote with its default options (256 pixels on
  the shorter side, quality 90), through tutti's loader with two workers; batches are normalised in the rank.
- tutti, tree: the same from the tree of files.
- DataLoader, Pillow (the peer): a map-style dataset over the tree in a torch DataLoader with two persistent workers. A
  sample is decoded by Pillow, cropped at random and resized as torchvision's RandomResizedCrop does it, flipped, and
  normalised to float32.
- WebDataset, if it can be imported (--peers names a folder to import it from): the same work as the peer from tar
  shards, once of the files as they are and once of the shards that tutti packed.

All deliver normalised float32 batches of 32 x 3 x 224 x 224 from random resized crops (8 to 100% of the area), half of
them flipped. Before timing, the program checks that tutti and the peer give the same pixels for the same box, and that
the packed folder and the tree give the same labels in the same order.

The files are generated photographs of 500 x 375 with noise, about 110 KB each; --distinct of them are drawn, and each
is written under several names. They are read once before timing, so that they are in the page cache.

Clock: time.perf_counter around --batches batches, after as many as the workers of a contender make ahead. Contenders
alternate; a ratio is the median of the ratios within each trial. All processes run on two cores. The CPU time of this
process and its workers is measured beside it: where other processes use the same cores, images per CPU second tell what
two free cores would do.

Packing is timed too: images per second of each core with two workers, for a quarter, a half and all of the files.
"""

import argparse
import io
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch
from photos import HEIGHT, WIDTH, draw_photo
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from tutti.config.layout import Layout
from tutti.config.plan import Plan
from tutti.data.decode import View, decode_view
from tutti.data.image_tree import MEAN, STD, image_tree
from tutti.data.loader import Loader
from tutti.data.order import SampleOrder
from tutti.data.packed.encode import PackOptions
from tutti.data.packed.sources import open_source
from tutti.data.packed.write import pack
from tutti.errors import TuttiError

PEER, TREE, PACKED = "DataLoader, Pillow", "tutti, tree", "tutti, packed"
WEB_FILES, WEB_PACKED = "WebDataset, files", "WebDataset, packed"
BARS = {PACKED: 5.0, TREE: 1.4}
BATCH, SIZE, CLASSES = 32, 224, 8
DEADLINE_SECONDS = 120  # for one batch of a worker process
CPU = torch.device("cpu")
MEANS, STDS = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def write_tree(folder: Path, photos: list[bytes], images: int) -> Path:
    """Writes a tree of classes with the photos under as many names as there are images."""
    for number in range(images):
        place = folder / "train" / f"class_{number % CLASSES:03d}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:06d}.jpg").write_bytes(photos[number % len(photos)])
    return folder


def random_box(width: int, height: int) -> tuple[int, int, int, int]:
    """Draws a box as torchvision's RandomResizedCrop does: left, top, width, height."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            return random.randint(0, width - wide), random.randint(0, height - high), wide, high
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


def transform(image: Image.Image, box: tuple[int, int, int, int], flip: bool) -> torch.Tensor:
    """Crops, resizes, flips and normalises an image by Pillow and torch."""
    left, top, wide, high = box
    part = (
        image.convert("RGB").crop((left, top, left + wide, top + high)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    )
    if flip:
        part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = torch.from_numpy(np.array(part)).permute(2, 0, 1).contiguous()
    return pixels.to(torch.float32).div(255).sub_(MEANS).div_(STDS)


def random_transform(image: Image.Image) -> torch.Tensor:
    return transform(image, random_box(*image.size), random.random() < 0.5)


class TreeImages(Dataset[tuple[torch.Tensor, int]]):
    """The peer's map-style dataset; a sample number beyond the last begins anew."""

    def __init__(self, folder: Path) -> None:
        names = sorted(path.name for path in (folder / "train").iterdir())
        self._files = [(path, names.index(path.parent.name)) for path in sorted((folder / "train").glob("*/*.jpg"))]

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self._files[index % len(self._files)]
        with open(path, "rb") as file:
            return random_transform(Image.open(file)), label


class EndlessOrder:
    """Random sample numbers without an end."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from np.random.permutation(self._samples).tolist()


def peer_batches(folder: Path, images: int, workers: int) -> Batches:
    loader = DataLoader(
        TreeImages(folder),
        batch_size=BATCH,
        sampler=EndlessOrder(images),  # pyright: ignore[reportArgumentType]
        num_workers=workers,
        multiprocessing_context="fork",
        timeout=DEADLINE_SECONDS,
    )
    return iter(loader)


def tutti_batches(folder: Path, workers: int, seed: int) -> Batches:
    dataset = image_tree("train", str(folder))
    plan = Plan(Layout(1), BATCH, BATCH, BATCH, len(dataset), 1 << 20)
    loader = Loader(dataset, plan, SampleOrder(plan, seed), 0, CPU, workers, prefetch=0)
    for batch in loader.steps(0):
        yield batch.micro_batches[0]


def web_batches(folder: Path, workers: int) -> Batches:
    import webdataset  # pyright: ignore[reportMissingImports]

    def sample(found: dict[str, Any]) -> tuple[torch.Tensor, int]:
        label = int(found["__key__"].split("/")[0].rpartition("_")[2])
        return random_transform(Image.open(io.BytesIO(found["jpg"]))), label

    shards = [str(path) for path in sorted(folder.glob("train-*.tar"))]
    dataset = webdataset.WebDataset(shards, resampled=True, shardshuffle=False, empty_check=False)
    samples = dataset.shuffle(1000).map(sample).batched(BATCH)
    return iter(DataLoader(samples, batch_size=None, num_workers=workers, multiprocessing_context="fork"))


def check_same_work(tree: Path, packed: Path) -> None:
    """Checks pixels of the same box, and labels in the same order."""
    content = next((tree / "train").glob("*/*.jpg")).read_bytes()
    for box, flip in (((10, 20, 300, 250), False), ((0, 0, 500, 375), True), ((100, 50, 120, 130), True)):
        left, top, wide, high = box
        view = View((left, top, left + wide, top + high), (0, SIZE), (0, SIZE), flip)
        ours = torch.empty((SIZE, SIZE, 3), dtype=torch.uint8).permute(2, 0, 1)
        decode_view(content, ours, lambda *_, view=view: view)
        theirs = transform(Image.open(io.BytesIO(content)), box, flip).mul(STDS).add(MEANS).mul(255)
        if (ours - theirs).abs().max() > 3.01:
            raise SystemExit(f"error: the pixels of {box} differ from the peer's by more than 3 levels.")
    first, second = (image_tree("train", str(folder)) for folder in (tree, packed))
    if [first._files.label(i) for i in range(len(first))] != [second._files.label(i) for i in range(len(second))]:
        raise SystemExit("error: the packed folder has other labels than the tree.")


def cpu_seconds() -> float:
    """The CPU time of this process and of the workers that it has started."""
    total = time.process_time()
    for path in Path("/proc/self/task").glob("*/children"):
        for child in path.read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def images_per_second(batches: Batches, count: int, ahead: int) -> tuple[float, float]:
    """Times batches after those that were made ahead; returns images per second, and per second of CPU time."""
    for _ in range(ahead):
        next(batches)
    total = 0.0
    began, began_cpu = time.perf_counter(), cpu_seconds()
    for _ in range(count):
        images, _ = next(batches)
        assert images.shape == (BATCH, 3, SIZE, SIZE) and images.dtype == torch.float32
        total += float(images[:, :, ::56, ::56].abs().sum())
    seconds, used = time.perf_counter() - began, cpu_seconds() - began_cpu
    assert 0 < total < np.inf
    return BATCH * count / seconds, BATCH * count / used


def time_packing(tree: Path, folder: Path, workers: int) -> tuple[Path, float]:
    """Packs a tree with the default options; returns the folder and images per second of each core."""
    began = time.perf_counter()
    found = pack(partial(open_source, str(tree)), str(tree), folder, PackOptions(), workers)
    return folder, found.samples["train"] / (time.perf_counter() - began) / workers


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Makes the files, packs them and runs all trials; returns the result."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    facts = measure.conditions(
        images=args.images,
        per_rank_batch=BATCH,
        ranks=1,
        workers=args.workers,
        batches_per_trial=args.batches,
        seed=args.seed,
        trials=args.trials,
    )
    measure.print_conditions(facts)
    with ProcessPoolExecutor(args.workers) as pool:
        photos = list(pool.map(draw_photo, range(args.distinct)))
    facts["bytes_per_image"] = sum(map(len, photos)) / len(photos)
    trees = {n: write_tree(folder / f"tree{n}", photos, n) for n in (args.images // 4, args.images // 2, args.images)}
    packing = {n: time_packing(tree, folder / f"packed{n}", args.workers) for n, tree in trees.items()}
    tree, packed = trees[args.images], packing[args.images][0]
    facts["packed_bytes_per_image"] = sum(path.stat().st_size for path in packed.iterdir()) / args.images
    check_same_work(tree, packed)
    print("checked: same pixels for the same box, same labels in the same order", flush=True)
    makers: dict[str, Callable[[], Batches]] = {
        PEER: lambda: peer_batches(tree, args.images, args.workers),
        TREE: lambda: tutti_batches(tree, args.workers, args.seed),
        PACKED: lambda: tutti_batches(packed, args.workers, args.seed),
    }
    if find_spec("webdataset"):
        stored = folder / "stored"
        pack(partial(open_source, str(tree)), str(tree), stored, PackOptions(size=0, shard_mb=32), args.workers)
        makers |= {WEB_FILES: lambda: web_batches(stored, args.workers)}
        makers |= {WEB_PACKED: lambda: web_batches(packed, args.workers)}
    contenders = {name: make() for name, make in makers.items()}
    for batches in contenders.values():  # starts the workers
        next(batches)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _, name in measure.alternating(list(contenders), args.trials):
        found[name].append(images_per_second(contenders[name], args.batches, 2 * args.workers + 1))
    rates, of_cpu = ({name: [pair[each] for pair in pairs] for name, pairs in found.items()} for each in (0, 1))
    over = {name: measure.paired(values, rates[PEER]) for name, values in rates.items()}
    return {
        "program": "images",
        "conditions": facts,
        "images_per_second": {name: measure.spread(values) | {"trials": values} for name, values in rates.items()},
        "over_peer": over,
        "images_per_cpu_second": {name: measure.spread(values) | {"trials": values} for name, values in of_cpu.items()},
        "over_peer_in_cpu_time": {name: measure.paired(values, of_cpu[PEER]) for name, values in of_cpu.items()},
        "packing_images_per_second_of_a_core": {n: rate for n, (_, rate) in packing.items()},
        "bars": {f"{name}: at least {bar:g} times {PEER}": over[name]["median"] >= bar for name, bar in BARS.items()},
    }


def show(result: dict[str, Any]) -> None:
    """Prints the tables and the verdict."""
    facts = result["conditions"]
    print(
        f"\n{facts['images']:,} images of {WIDTH} x {HEIGHT}, {facts['bytes_per_image'] / 1e3:.0f} KB each (packed: "
        f"{facts['packed_bytes_per_image'] / 1e3:.0f} KB), batches of {BATCH}, {facts['workers']} workers and cores:"
    )
    rows = [
        [
            name,
            *measure.shown(rate, 0),
            *measure.shown(result["over_peer"][name], 2),
            measure.shown(result["images_per_cpu_second"][name], 0)[0],
            *measure.shown(result["over_peer_in_cpu_time"][name], 2),
        ]
        for name, rate in result["images_per_second"].items()
    ]
    head = ["contender", "images/s", "min", "max", "over peer", "min", "max", "per CPU s", "over peer", "min", "max"]
    measure.print_table(head, rows)
    rates = result["packing_images_per_second_of_a_core"]
    print("packing, images/s of a core: " + ", ".join(f"{rate:,.0f} ({n:,} images)" for n, rate in rates.items()))
    measure.print_verdict(result["bars"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Images per second on two cores: tutti, packed and from a tree, and DataLoaders.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--trials", type=int, default=5, help="trials of every contender")
    parser.add_argument("--batches", type=int, default=48, help="batches in a trial")
    parser.add_argument("--images", type=int, default=2048, help="files in the tree")
    parser.add_argument("--distinct", type=int, default=128, help="different images among them")
    parser.add_argument("--workers", type=int, default=2, help="loader processes, and cores")
    parser.add_argument("--seed", type=int, default=42, help="seed of the order and the crops")
    parser.add_argument("--peers", type=Path, help="a folder from which webdataset is imported")
    parser.add_argument("--keep", type=Path, help="a new folder for the files")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    args = parser.parse_args()
    if args.peers:
        sys.path.append(str(args.peers))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.workers])
    with measure.kept_folder(args.keep, "images.") as folder:
        try:
            result = compare(args, folder)
        except TuttiError as error:
            raise SystemExit(f"error: {error}") from error
    show(result)
    measure.write_json(args.out, result)


if __name__ == "__main__":
    main()
