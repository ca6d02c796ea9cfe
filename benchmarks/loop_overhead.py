"""The overhead of tutti's training loop: samples/s compared with a hand-written DDP loop and Lightning's Trainer.

Claim: with records, metrics and logging, tutti trains at 0.97 or more of the speed of a hand-written loop without them,
and faster than Lightning. Monitoring (deadlines, stop agreement, detection of stragglers) and records together take at
most 1% of a step.

All three train the MNIST network (`mnist_torch`, with dropout) from the same initial weights on the same batches of 64
per rank. The images are in memory as bytes; a batch is gathered by a shuffled index, converted to float and normalised.
All use DDP over Gloo with gradient_as_bucket_view, fused SGD, and one thread per rank.

- tutti: `tutti.fit` on every rank, with metrics.jsonl, TensorBoard, log lines and training accuracy every --log-every
  steps, and the check for a loss that is not finite. The ledger is off, which is the default. There are no checkpoints
  and no validation.
- by hand: a minimal loop of batch, forward, backward and step, without logging and metrics.
- lightning: Trainer(strategy=ddp) with everything optional switched off: logger, self.log, progress bar, summary,
  checkpoints, validation, sanity steps. Its batches come from a plain iterable, without a DataLoader.

Clock: time.perf_counter on rank 0, after a barrier of all ranks. It is read inside the network, at the start of the
training forward passes of two steps, --steps apart. The timed window thus holds whole steps with everything between
them, is the same for every contender, and no loop is modified to be measured. Import, start and --warmup steps are not
timed. Each trial starts new ranks, and contenders alternate. A ratio is the median of the ratios within each trial. The
CPU time of rank 0 per step, which a busy machine affects less, is also reported.

The share of monitoring and records is measured in tutti's own trials: every call to them from the loop is timed, and
the CPU time of the monitoring threads is added. The overhead of this measurement is included.
"""

import argparse
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import measure
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tutti.data.dataset import ArrayDataset
from tutti.data.mnist import MEAN, STD
from tutti.data.order import permutation
from tutti.models.small import MnistTorch
from tutti.ranks.process import end_with_parent

CONTENDERS = ("tutti", "by hand", "lightning")
BAR_BY_HAND = 0.97
BAR_MONITORING = 0.01
SAMPLES = 60_000
PER_RANK = 64
LR, MOMENTUM = 0.01, 0.5
SCALE, OFFSET = 1 / (255 * STD), -MEAN / STD
CHECK_SAMPLES = 2_000


class Watch:
    """Reads the clock when the given training steps begin, after a barrier of all ranks."""

    def __init__(self, first_step: int, last_step: int, monitoring: Callable[[], float] = lambda: 0.0) -> None:
        self._steps = (first_step, last_step)
        self._step = 0
        self._monitoring = monitoring
        self._readings: list[tuple[float, float, float]] = []

    def step_begins(self) -> None:
        if self._step in self._steps:
            dist.barrier()
            self._readings.append((time.perf_counter(), time.process_time(), self._monitoring()))
        self._step += 1

    @property
    def seconds(self) -> list[float]:
        """Seconds between the two steps: wall time, CPU time of this rank, and time of monitoring and records."""
        return [later - before for before, later in zip(*self._readings, strict=True)]


class Monitoring:
    """Sums the time that the loop spends on monitoring and records, by wrapping every call to them."""

    def __init__(self) -> None:
        from tutti.ranks import hang_detection
        from tutti.runs.journal import Journal
        from tutti.train import job
        from tutti.train.timing import HostTimer, Stragglers

        self.seconds = 0.0
        self._threads: list[int] = []
        looked_at = {
            hang_detection.Monitor: ("enter", "continues_after"),
            HostTimer: ("begin", "ended", "lap"),
            Stragglers: ("compare",),
            Journal: ("write", "say"),
            job: ("combine",),
        }
        for owner, names in looked_at.items():
            for name in names:
                setattr(owner, name, self._clocked(getattr(owner, name)))
        begin = hang_detection.Monitor.__init__

        def begin_and_tell(looked: Any, *given: Any) -> None:
            begin(looked, *given)
            self._threads = [time.pthread_getcpuclockid(thread.ident) for thread in looked._threads]

        hang_detection.Monitor.__init__ = begin_and_tell

    def read(self) -> float:
        """Seconds so far, of calls and of threads."""
        return self.seconds + sum(time.clock_gettime(clock) for clock in self._threads)

    def _clocked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


class WatchedNet(MnistTorch):
    """The network, which reports every training pass to a Watch."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.watch.step_begins()
        return super().forward(images)


class Batches:
    """The batches of a rank, epoch after epoch, in tutti's order."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, rank: int, ranks: int, seed: int) -> None:
        self._images, self._labels = images, labels
        self._rank, self._ranks, self._seed = rank, ranks, seed
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._labels) // (PER_RANK * self._ranks)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.from_numpy(permutation(len(self._labels), self._seed, self._epoch))
        self._epoch += 1
        index = order[: len(self) * PER_RANK * self._ranks].view(len(self), self._ranks, PER_RANK)[:, self._rank]
        for ids in index:
            yield self._images[ids].to(torch.float32).mul_(SCALE).add_(OFFSET), self._labels[ids]


def train_tutti(net: WatchedNet, images: torch.Tensor, labels: torch.Tensor, args: argparse.Namespace) -> None:
    """Trains by `tutti.fit` with all defaults except checkpoints."""
    import tutti

    tutti.fit(
        net,
        ArrayDataset(images, labels, mean=255 * MEAN, std=255 * STD),
        optim={"name": "sgd", "lr": LR, "momentum": MOMENTUM},
        batch={"per_rank": PER_RANK, "base": PER_RANK},
        schedule={"scaling": "linear"},
        epochs=args.epochs,
        seed=args.seed,
        log={"every_steps": args.log_every},
        checkpoint={"every_epochs": None},
        runtime={"device": "cpu"},
        out=str(args.result.parent / "runs"),
    )


def train_by_hand(net: WatchedNet, images: torch.Tensor, labels: torch.Tensor, args: argparse.Namespace) -> None:
    """Trains by a minimal DDP loop for this network."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR * ranks, momentum=MOMENTUM, fused=True)
    criterion = nn.CrossEntropyLoss()
    batches = Batches(images, labels, rank, ranks, args.seed)
    model.train()
    for _ in range(args.epochs):
        for inputs, targets in batches:
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def train_lightning(net: WatchedNet, images: torch.Tensor, labels: torch.Tensor, args: argparse.Namespace) -> None:
    """Trains by Lightning's Trainer with everything optional switched off."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net
            self.criterion = nn.CrossEntropyLoss()

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
            inputs, targets = batch
            return self.criterion(self.net(inputs), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            lr = LR * self.trainer.world_size
            return torch.optim.SGD(self.parameters(), lr=lr, momentum=MOMENTUM, fused=True)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=args.ranks,
        strategy=DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True),
        max_epochs=args.epochs,
        log_every_n_steps=args.log_every,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )
    trainer.fit(Module(), Batches(images, labels, trainer.global_rank, trainer.world_size, args.seed))


def run_as_rank(args: argparse.Namespace) -> None:
    """Trains as one rank of a contender; rank 0 writes the seconds of the window."""
    end_with_parent()
    torch.set_num_threads(1)
    images, labels, source = measure.read_images(args.data, args.seed)
    torch.manual_seed(args.seed)
    monitoring = Monitoring().read if args.as_rank == "tutti" else lambda: 0.0
    window = Watch(args.warmup, args.warmup + args.steps, monitoring)
    net = WatchedNet(window)
    train = {"tutti": train_tutti, "by hand": train_by_hand, "lightning": train_lightning}[args.as_rank]
    train(net, images, labels, args)
    measure.leave_group()
    if os.environ["RANK"] == "0":
        net.eval()
        with torch.inference_mode():
            outputs = net(images[:CHECK_SAMPLES].to(torch.float32).mul_(SCALE).add_(OFFSET))
            loss = nn.functional.cross_entropy(outputs, labels[:CHECK_SAMPLES]).item()
        wall, cpu, monitored = window.seconds
        result = {"seconds": wall, "cpu_seconds": cpu, "monitoring_seconds": monitored, "loss": loss}
        result |= {"threads": torch.get_num_threads(), "data": source}
        args.result.write_text(json.dumps(result))


def measure_once(contender: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs one trial of one contender in new ranks."""
    with tempfile.TemporaryDirectory(prefix="loop-overhead-") as folder:
        result = Path(folder) / "result.json"
        given = {name: str(getattr(args, name)) for name in ("ranks", "steps", "warmup", "seed")}
        given |= {"log-every": str(args.log_every), "epochs": str(args.epochs)}
        given |= {"data": str(args.data.resolve()), "result": str(result), "as-rank": contender}
        options = [f"--{name}={value}" for name, value in given.items()]
        words = measure.torchrun(args.ranks, Path(folder), __file__, options)
        measure.run_command(words, Path(folder), args.deadline)
        return json.loads(result.read_text())


def check_same_training(losses: dict[str, list[float]]) -> None:
    """Checks that final losses agree, up to dropout, which tutti seeds by step."""
    medians = [measure.spread(values)["median"] for values in losses.values()]
    if max(medians) > 1.2 * min(medians):
        raise SystemExit(f"error: the contenders do not train the same model: their final losses are {losses}.")


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Runs all trials; returns the result."""
    facts = measure.conditions(
        ranks=args.ranks,
        threads_per_rank=1,
        per_rank_batch=PER_RANK,
        steps=args.steps,
        warmup_steps=args.warmup,
        log_every_steps=args.log_every,
        seed=args.seed,
        trials=args.trials,
    )
    measure.print_conditions(facts)
    rates: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    cpu_steps: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    losses: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    shares: list[float] = []
    for trial, name in measure.alternating(CONTENDERS, args.trials):
        found = measure_once(name, args)
        assert found["threads"] == 1
        facts["data"] = found["data"]
        rates[name].append(args.steps * PER_RANK * args.ranks / found["seconds"])
        cpu_steps[name].append(1e6 * found["cpu_seconds"] / args.steps)
        losses[name].append(found["loss"])
        if name == "tutti":
            shares.append(found["monitoring_seconds"] / found["seconds"])
        print(f"trial {trial + 1}/{args.trials}  {name:<10} {rates[name][-1]:>10,.0f} samples/s", flush=True)
    check_same_training(losses)
    ratios = {name: measure.paired(rates["tutti"], rates[name]) for name in CONTENDERS[1:]}
    return {
        "program": "loop_overhead",
        "conditions": facts,
        "samples_per_second": {name: measure.spread(values) | {"trials": values} for name, values in rates.items()},
        "cpu_microseconds_per_step": {name: measure.spread(values) for name, values in cpu_steps.items()},
        "loss_after": {name: measure.spread(values) for name, values in losses.items()},
        "tutti_over": ratios,
        "share_of_monitoring_and_records": measure.spread(shares),
        "bars": {
            f"monitoring and records at most {BAR_MONITORING:.0%} of a step": max(shares) <= BAR_MONITORING,
            f"at least {BAR_BY_HAND} of the loop by hand": ratios["by hand"]["median"] >= BAR_BY_HAND,
            "faster than lightning": ratios["lightning"]["median"] > 1,
        },
    }


def show(result: dict[str, Any]) -> None:
    """Prints the table and the verdict."""
    facts, ranks = result["conditions"], result["conditions"]["ranks"]
    rows = []
    for name, rate in result["samples_per_second"].items():
        wall = 1e6 * PER_RANK * ranks / rate["median"]
        cpu = result["cpu_microseconds_per_step"][name]["median"]
        ratio = result["tutti_over"].get(name)
        cells = measure.shown(ratio, 3) if ratio else ["", "", ""]
        loss = result["loss_after"][name]["median"]
        rows.append([name, *measure.shown(rate, 0), *cells, f"{wall:,.0f}", f"{cpu:,.0f}", f"{loss:.3f}"])
    print(f"\n{facts['data']}, {facts['steps']} steps of {ranks} x {PER_RANK} samples after {facts['warmup_steps']}:")
    head = ["contender", "samples/s", "min", "max", "tutti over it", "min", "max", "us/step", "cpu us/step", "loss"]
    measure.print_table(head, rows)
    share = result["share_of_monitoring_and_records"]
    print(f"\nmonitoring and records: {share['median']:.2%} of a step ({share['min']:.2%} to {share['max']:.2%})")
    measure.print_verdict(result["bars"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Samples per second of tutti's loop, of a hand-written DDP loop and of Lightning's Trainer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2, help="ranks of every contender")
    parser.add_argument("--steps", type=int, default=400, help="steps in the timed window")
    parser.add_argument("--warmup", type=int, default=50, help="steps before it")
    parser.add_argument("--trials", type=int, default=7, help="trials of every contender")
    parser.add_argument("--log-every", type=int, default=50, help="steps between two log lines of tutti")
    parser.add_argument("--seed", type=int, default=42, help="seed of the weights and of the order of samples")
    parser.add_argument("--data", type=Path, default=measure.default_data(), help="MNIST files; random if not there")
    parser.add_argument("--deadline", type=float, default=300, help="seconds that one trial of one contender may take")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    parser.add_argument("--as-rank", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        run_as_rank(args)
        return
    if importlib.util.find_spec("lightning") is None:
        parser.exit(2, "error: Lightning is not installed. Install it: pip install 'tutti-train[bench]'.\n")
    measure.end_children_with_me()
    steps_per_epoch = SAMPLES // (PER_RANK * args.ranks)
    args.epochs = -(-(args.warmup + args.steps + 1) // steps_per_epoch)
    result = compare(args)
    show(result)
    measure.write_json(args.out, result)


if __name__ == "__main__":
    main()
