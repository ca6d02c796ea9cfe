"""Augmented MNIST images per second: tutti's loader, and a DataLoader with two worker processes.

Claim: one process that gathers, shifts and normalises whole batches delivers at least 10 times the images per second of
a torch DataLoader in which two worker processes do the same for one sample at a time.

- tutti: the training data of the recipe `mnist` with shift=2 (`ArrayDataset`) through its `Loader`, in one process with
  one thread: without prefetch, the default on a CPU, and for comparison with 2 batches prefetched by a thread, the
  default on a GPU.
- DataLoader: an optimised map-style dataset. The images are padded once, as in tutti, so that a shift is a slice of a
  NumPy array, followed by one conversion to float and two operations in place; offsets come from Python's generator.
  Two persistent worker processes, default collate, shuffle; with the default prefetch_factor (2) and with --prefetch. A
  third variant pads in every sample, as such a transform is usually written.

Both give random shifts of up to 2 pixels in both directions and float32 batches of 64. Before timing, the program
checks that both pipelines give the same image for the same sample and shift, and that an epoch of each has the same
labels, each the right number of times.

Clock: time.perf_counter around --epochs whole epochs, in which every batch is taken and its labels are summed. All omit
the last, incomplete batch. The first epoch of every contender, in which worker processes start, is not timed.
Contenders alternate; a ratio is the median of the ratios within each trial. The threshold refers to the fastest
DataLoader.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from tutti.config.layout import Layout
from tutti.config.plan import Plan
from tutti.data.dataset import ArrayDataset
from tutti.data.loader import Loader
from tutti.data.mnist import MEAN, STD
from tutti.data.order import SampleOrder

BAR = 10.0
BATCH = 64
DEADLINE_SECONDS = 60  # for one batch of a worker process
SHIFT = 2
SCALE, OFFSET = np.float32(1 / (255 * STD)), np.float32(-MEAN / STD)
Sample = tuple[torch.Tensor, int]
Epoch = Callable[[int], Iterable[tuple[torch.Tensor, torch.Tensor]]]
CPU = torch.device("cpu")


class PaddedSamples(Dataset[Sample]):
    """Map-style dataset: windows of images that were padded once."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self._padded = np.pad(images, ((0, 0), (0, 0), (SHIFT, SHIFT), (SHIFT, SHIFT)))
        self._labels = labels.tolist()
        self._height, self._width = images.shape[2:]

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Sample:
        top, left = int(random.random() * (2 * SHIFT + 1)), int(random.random() * (2 * SHIFT + 1))
        return self.image(index, top, left), self._labels[index]

    def image(self, index: int, top: int, left: int) -> torch.Tensor:
        """Returns a sample at a given shift."""
        window = self._padded[index, :, top : top + self._height, left : left + self._width].astype(np.float32)
        window *= SCALE
        window += OFFSET
        return torch.from_numpy(window)


class PlainSamples(PaddedSamples):
    """Map-style dataset: images that are padded in every sample."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        super().__init__(images[:0], labels)
        self._images = torch.from_numpy(images)

    def image(self, index: int, top: int, left: int) -> torch.Tensor:
        padded = torch.nn.functional.pad(self._images[index], [SHIFT] * 4)
        window = padded[:, top : top + self._height, left : left + self._width]
        return window.to(torch.float32).mul_(float(SCALE)).add_(float(OFFSET))


def tutti_epoch(dataset: ArrayDataset, seed: int, per_rank_batch: int, prefetch: int) -> Epoch:
    """Returns a function that yields epoch number n of tutti's loader."""

    def batches(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        plan = Plan(Layout(1), per_rank_batch, per_rank_batch, per_rank_batch, len(dataset), epochs=epoch + 1)
        loader = Loader(dataset, plan, SampleOrder(plan, seed), 0, CPU, workers=0, prefetch=prefetch)
        for batch in loader.steps(epoch * plan.steps_per_epoch):
            yield batch.micro_batches[0]

    return batches


def torch_loader(samples: Dataset[Sample], workers: int, prefetch_factor: int, whole: bool = False) -> DataLoader[Any]:
    """The peer: a DataLoader with persistent workers; `whole` keeps the last, incomplete batch."""
    return DataLoader(
        samples,
        batch_size=BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=True,
        prefetch_factor=prefetch_factor,
        drop_last=not whole,
        timeout=DEADLINE_SECONDS,
    )


def check_same_images(dataset: ArrayDataset, peers: list[PaddedSamples], seed: int) -> None:
    """Checks that every image of tutti's loader equals the peer's image of the same sample at some shift."""
    plan = Plan(Layout(1), BATCH, BATCH, BATCH, len(dataset), epochs=1)
    batch = next(iter(Loader(dataset, plan, SampleOrder(plan, seed), 0, CPU, workers=0, prefetch=0).steps(0)))
    shifts = [(top, left) for top in range(2 * SHIFT + 1) for left in range(2 * SHIFT + 1)]
    met = set()
    for image, sample in zip(batch.micro_batches[0][0], batch.ids, strict=True):
        for peer in peers:
            gaps = [(image - peer.image(int(sample), *shift)).abs().max().item() for shift in shifts]
            best = min(range(len(shifts)), key=gaps.__getitem__)
            if gaps[best] > 1e-5:
                raise SystemExit(f"error: sample {sample} differs by {gaps[best]:g} from every shift of the peer's.")
            met.add(shifts[best])
    if len(met) < len(shifts) // 2:
        raise SystemExit(f"error: a batch shows only the shifts {sorted(met)}.")


def check_same_labels(dataset: ArrayDataset, peer: PaddedSamples, labels: torch.Tensor, seed: int) -> None:
    """Checks that an epoch of each has every label as often as the data."""
    whole = next(size for size in range(BATCH, 0, -1) if len(dataset) % size == 0)  # so that no sample is left out
    ours = torch.cat([targets for _, targets in tutti_epoch(dataset, seed, whole, prefetch=0)(0)])
    theirs = torch.cat([targets for _, targets in torch_loader(peer, 2, 2, whole=True)])
    for name, found in (("tutti", ours), ("DataLoader", theirs)):
        if found.bincount().tolist() != labels.bincount().tolist():
            raise SystemExit(f"error: an epoch of {name} does not hold the labels of the data.")


def images_per_second(batches: Epoch, epochs: range) -> float:
    """Times epochs in which every batch is taken and read."""
    images = total = 0
    began = time.perf_counter()
    for epoch in epochs:
        for inputs, targets in batches(epoch):
            total += int(targets.sum())
            images += len(inputs)
    seconds = time.perf_counter() - began
    assert total > 0
    return images / seconds


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the checks and all trials; returns the result."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    inputs, targets, source = measure.read_images(args.data, args.seed)
    ours = ArrayDataset(inputs, targets, mean=255 * MEAN, std=255 * STD, shift=SHIFT)
    padded = PaddedSamples(inputs.numpy(), targets.numpy())
    plain = PlainSamples(inputs.numpy(), targets.numpy())
    facts = measure.conditions(
        data=source,
        samples=len(targets),
        per_rank_batch=BATCH,
        shift=SHIFT,
        ranks=1,
        threads_per_rank=1,
        workers_of_peer=args.workers,
        epochs_per_trial=args.epochs,
        seed=args.seed,
        trials=args.trials,
    )
    measure.print_conditions(facts)
    check_same_images(ours, [padded, plain], args.seed)
    check_same_labels(ours, padded, targets, args.seed)
    print(f"checked on {source}: same images for the same shift, same labels in an epoch", flush=True)
    loaders = {
        "DataLoader, prefetch_factor 2": torch_loader(padded, args.workers, 2),
        f"DataLoader, prefetch_factor {args.prefetch}": torch_loader(padded, args.workers, args.prefetch),
        "DataLoader, pads each sample": torch_loader(plain, args.workers, args.prefetch),
    }
    contenders: dict[str, Epoch] = {
        "tutti": tutti_epoch(ours, args.seed, BATCH, 0),
        "tutti, prefetch 2": tutti_epoch(ours, args.seed, BATCH, 2),
    } | {name: lambda _, loader=loader: loader for name, loader in loaders.items()}
    for batches in contenders.values():
        images_per_second(batches, range(1))
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for trial, name in measure.alternating(list(contenders), args.trials):
        first = 1 + trial * args.epochs
        rates[name].append(images_per_second(contenders[name], range(first, first + args.epochs)))
    peer = max(loaders, key=lambda name: measure.spread(rates[name])["median"])
    ratios = {name: measure.paired(values, rates[peer]) for name, values in rates.items()}
    return {
        "program": "loader",
        "conditions": facts,
        "images_per_second": {name: measure.spread(values) | {"trials": values} for name, values in rates.items()},
        "peer": peer,
        "over_peer": ratios,
        "bars": {
            f"{name}: at least {BAR:g} times the fastest DataLoader": ratios[name]["median"] >= BAR
            for name in ("tutti", "tutti, prefetch 2")
        },
    }


def show(result: dict[str, Any]) -> None:
    """Prints the table and the verdict."""
    facts = result["conditions"]
    workers = facts["workers_of_peer"]
    print(f"\n{facts['samples']:,} images, batches of {BATCH}, shift {SHIFT}; {workers} workers of a DataLoader:")
    rows = []
    for name, rate in result["images_per_second"].items():
        micros = 1e6 * BATCH / rate["median"]
        ratio = measure.shown(result["over_peer"][name], 2)
        rows.append([name, *measure.shown(rate, 0), f"{micros:,.0f}", *ratio])
    measure.print_table(["contender", "images/s", "min", "max", "us/batch", "over fastest", "min", "max"], rows)
    measure.print_verdict(result["bars"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Augmented MNIST images per second: tutti's loader, and a DataLoader with workers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--trials", type=int, default=7, help="trials of every contender")
    parser.add_argument("--epochs", type=int, default=2, help="epochs in a trial")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of the DataLoader")
    parser.add_argument("--prefetch", type=int, default=8, help="the tuned prefetch_factor of the DataLoader")
    parser.add_argument("--seed", type=int, default=42, help="seed of the order and of the shifts")
    parser.add_argument("--data", type=Path, default=measure.default_data(), help="MNIST files; random if not there")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    args = parser.parse_args()
    result = compare(args)
    show(result)
    measure.write_json(args.out, result)


if __name__ == "__main__":
    main()
