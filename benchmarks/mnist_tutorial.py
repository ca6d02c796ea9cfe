"""MNIST on two ranks: wall time and accuracy of a tutorial's DDP script and of `tutti train mnist`.

Claim: `tutti train mnist -n 2 epochs=10` reaches 98.2% test accuracy in at most half the wall time of the script.

- tutorial: this file as a rank (`--as-rank`), started by torchrun with one thread per rank, as tutti does on two cores.
  DDP over Gloo; a map-style dataset that converts one image at a time to a PIL image, a tensor and normalised floats
  (the steps of torchvision, done with Pillow and torch); DataLoader(batch_size=64) without worker processes,
  DistributedSampler; SGD with lr 0.01 x ranks and momentum 0.5, seed 42; the test set after each epoch, with metrics
  averaged over ranks. It saves nothing and logs as often as tutti.
- tutti: the command as a user types it, in an empty folder, with all defaults: records, TensorBoard, validation before
  the first step and after each epoch, a checkpoint each epoch, the curves at the end.
- tutorial, all cores (only with `--all-cores`, not part of the claim): the script without a number of threads, as under
  mpirun or horovodrun; torch then uses all cores on every rank.

The network is the same (conv 1->10 5x5, pool, conv 10->20 5x5 with 2-D dropout, pool, dense 320->50, dropout, dense
50->10), as are batch size, learning rate and number of epochs.

Clock: time.perf_counter from the start of the command to the end of its process, including imports and reading the
files. The files are read once before, so that they are in the page cache. Contenders alternate; the ratio is the median
of the ratios within each trial. The accuracy is that of the test set after the last epoch. The seed is fixed, so trials
differ only in time.
"""

import argparse
import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from tutti.data.mnist import FILES, find_file, read_idx
from tutti.errors import DataError
from tutti.ranks.process import end_with_parent
from tutti.runs.record import read_record

BAR_ACCURACY, BAR_TIME = 0.982, 0.5
BAR_PEER = "tutorial"  # with equal threads; the other row shows the cost of oversubscribed cores
PER_RANK, TEST_BATCH = 64, 1000
LOG_EVERY = 50


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """Map-style dataset with the steps of torchvision's MNIST: PIL image, tensor, normalisation."""

    def __init__(self, folder: Path, split: str) -> None:
        images, labels = (find_file(folder, name) for name in FILES[split])
        self.images, self.labels = read_idx(images, 3), read_idx(labels, 1)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = Image.fromarray(self.images[index])
        return normalise(to_tensor(image), (0.1307,), (0.3081,)), int(self.labels[index])


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Converts a PIL image to floats from 0 to 1, channels first."""
    pixels = torch.from_numpy(np.array(image, np.uint8, copy=True))
    pixels = pixels.view(image.size[1], image.size[0], len(image.getbands()))
    return pixels.permute((2, 0, 1)).contiguous().to(torch.float32).div(255)


def normalise(image: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    """Normalises a copy, channel by channel."""
    means = torch.as_tensor(mean, dtype=image.dtype).view(-1, 1, 1)
    stds = torch.as_tensor(std, dtype=image.dtype).view(-1, 1, 1)
    return image.clone().sub_(means).div_(stds)


class Net(nn.Module):
    """The tutorial's network, which returns log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = x.view(-1, 320)
        x = F.relu(self.fc1(x))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def test(model: nn.Module, loader: DataLoader[Any], samples: int) -> tuple[float, float]:
    """Returns loss and accuracy of the test set, averaged over ranks."""
    model.eval()
    loss = correct = 0.0
    with torch.no_grad():
        for images, labels in loader:
            output = model(images)
            loss += F.nll_loss(output, labels, reduction="sum").item()
            correct += output.argmax(dim=1).eq(labels).float().sum().item()
    means = torch.tensor([loss / samples, correct / samples])
    dist.all_reduce(means)
    means /= dist.get_world_size()
    return means[0].item(), means[1].item()


def train_tutorial(args: argparse.Namespace) -> float:
    """Runs the tutorial's script; returns the accuracy after the last epoch."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    train_set, test_set = Digits(args.data, "train"), Digits(args.data, "valid")
    train_sampler = DistributedSampler(train_set, ranks, rank, shuffle=True, seed=args.seed)
    test_sampler = DistributedSampler(test_set, ranks, rank, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=PER_RANK, sampler=train_sampler)
    test_loader = DataLoader(test_set, batch_size=TEST_BATCH, sampler=test_sampler)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * ranks, momentum=0.5)
    accuracy = 0.0
    for epoch in range(1, args.epochs + 1):
        model.train()
        train_sampler.set_epoch(epoch)
        for step, (images, labels) in enumerate(train_loader):
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            if step % LOG_EVERY == 0 and rank == 0:
                print(f"epoch {epoch} [{step}/{len(train_loader)}]  loss {loss.item():.6f}", flush=True)
        test_loss, accuracy = test(model, test_loader, len(test_sampler))
        if rank == 0:
            print(f"test set: loss {test_loss:.4f}, accuracy {accuracy:.2%}", flush=True)
    return accuracy


def run_as_rank(args: argparse.Namespace) -> None:
    """Trains as one rank; rank 0 writes the accuracy."""
    end_with_parent()
    accuracy = train_tutorial(args)
    if dist.get_rank() == 0:
        args.result.write_text(json.dumps({"accuracy": accuracy}))
    measure.leave_group()


def time_tutorial(folder: Path, args: argparse.Namespace, threads: int) -> tuple[float, float]:
    """Returns wall time and accuracy of the script under torchrun."""
    result = folder / "result.json"
    given = {"data": args.data.resolve(), "epochs": args.epochs, "seed": args.seed, "result": result}
    options = ["--as-rank", *(f"--{name}={value}" for name, value in given.items())]
    words = measure.torchrun(args.ranks, folder, __file__, options)
    seconds = measure.run_command(words, folder, args.deadline, OMP_NUM_THREADS=str(threads))
    return seconds, json.loads(result.read_text())["accuracy"]


def time_tutti(folder: Path, args: argparse.Namespace) -> tuple[float, float]:
    """Returns wall time of the command and the accuracy in its record."""
    overrides = [f"epochs={args.epochs}", f"data.path={args.data.resolve()}", *args.override]
    words = [sys.executable, "-m", "tutti", "train", "mnist", "-n", str(args.ranks), *overrides]
    seconds = measure.run_command(words, folder, args.deadline, OMP_NUM_THREADS="")  # tutti divides the cores
    record = read_record(next((folder / "runs").glob("mnist/*/record.json")))
    assert record is not None and record["state"] == "finished"
    return seconds, record["results"]["valid_accuracy"]


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Runs all trials; returns the result."""
    facts = measure.conditions(
        data="MNIST",
        ranks=args.ranks,
        per_rank_batch=PER_RANK,
        epochs=args.epochs,
        seed=args.seed,
        overrides=args.override,
        trials=args.trials,
    )
    measure.print_conditions(facts)
    contenders = {"tutti": time_tutti, BAR_PEER: functools.partial(time_tutorial, threads=1)}
    if args.all_cores:
        contenders["tutorial, all cores"] = functools.partial(time_tutorial, threads=os.cpu_count() or 1)
    names = tuple(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    accuracies: dict[str, list[float]] = {name: [] for name in names}
    for trial, name in measure.alternating(names, args.trials):
        with tempfile.TemporaryDirectory(prefix="mnist-tutorial-") as folder:
            wall, accuracy = contenders[name](Path(folder), args)
        seconds[name].append(wall)
        accuracies[name].append(accuracy)
        print(f"trial {trial + 1}/{args.trials}  {name:<18} {wall:>7.1f} s  accuracy {accuracy:.2%}", flush=True)
    ratios = {peer: measure.paired(seconds["tutti"], seconds[peer]) for peer in names[1:]}
    return {
        "program": "mnist_tutorial",
        "conditions": facts,
        "wall_seconds": {name: measure.spread(values) | {"trials": values} for name, values in seconds.items()},
        "test_accuracy": {name: measure.spread(values) for name, values in accuracies.items()},
        "tutti_time_over": ratios,
        "bars": {
            f"test accuracy {BAR_ACCURACY:.1%} or more": min(accuracies["tutti"]) >= BAR_ACCURACY,
            f"at most {BAR_TIME:g} of the time of {BAR_PEER}": ratios[BAR_PEER]["median"] <= BAR_TIME,
        },
    }


def show(result: dict[str, Any]) -> None:
    """Prints the table and the verdict."""
    facts = result["conditions"]
    print(f"\nMNIST, {facts['epochs']} epochs on {facts['ranks']} ranks, whole command:")
    rows = []
    for name, wall in result["wall_seconds"].items():
        cells = measure.shown(result["tutti_time_over"][name], 3) if name != "tutti" else ["", "", ""]
        rows.append([name, *measure.shown(wall, 1), *cells, f"{result['test_accuracy'][name]['median']:.2%}"])
    measure.print_table(["contender", "seconds", "min", "max", "tutti over it", "min", "max", "test accuracy"], rows)
    measure.print_verdict(result["bars"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="MNIST by a tutorial's DDP script and by `tutti train mnist`: wall time and test accuracy.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=10, help="epochs of both")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of both")
    parser.add_argument("--trials", type=int, default=3, help="trials of both")
    parser.add_argument("--all-cores", action="store_true", help="also the script with all cores on every rank")
    parser.add_argument("--seed", type=int, default=42, help="seed of the tutorial's script; the recipe has 42 too")
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="more for `tutti train`")
    parser.add_argument("--data", type=Path, default=measure.default_data(), help="folder of the MNIST files")
    parser.add_argument("--deadline", type=float, default=900, help="seconds that one command may take")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        run_as_rank(args)
        return
    measure.end_children_with_me()
    try:
        for name in (*FILES["train"], *FILES["valid"]):
            find_file(args.data, name).read_bytes()
    except DataError as error:
        parser.exit(2, f"error: {error}\n")
    result = compare(args)
    show(result)
    measure.write_json(args.out, result)


if __name__ == "__main__":
    main()
