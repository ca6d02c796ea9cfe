"""The measured gradient noise scale beside the critical batch, found by short branches from one checkpoint.

A trunk is trained to a checkpoint. From there branches are trained at the batch B and at multiples of it, each at
learning rates a factor of 2 apart around the best one so far, scaled (linear with the batch for SGD, by its square root
for Adam), on the same samples in the same order. The target is the training loss of the best branch of batch B after
--steps steps. The samples that each batch needs to reach it, at its best rate, follow E(B) = E_min (1 + B / B_crit);
the fitted B_crit is the critical batch, at which a run needs twice the samples that it would need in small steps.
Beside it, the largest batch that has the target within --tolerance after the same samples. The noise scale is measured
in every step of the branches, over micro-batches, so that it is that of the same stretch of training; that of the
smallest batch with a value counts.

Threshold: noise scale and critical batch agree within a factor of 2.

    python benchmarks/critical_batch.py --recipe mnist --out critical_mnist.json
    python benchmarks/critical_batch.py --recipe nbody/short --set data.source=device --set data.box=256 \\
        --set precision=bf16 --batch 8 --micro 64 --trunk 200 --steps 400 --multiples 1,2,4,8,16,32,64 --most 4
    python benchmarks/critical_batch.py --recipe digits --set 'optim={name: sgd, lr: 0.05}' --batch 16 --trunk 40 \\
        --set 'model={name: mlp, hidden: [64], dropout: 0.0}' --steps 250 --multiples 1,2,4,8,16
"""

import argparse
import contextlib
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch

from tutti.checkpoint import store
from tutti.config.load import resolve
from tutti.config.run import RunConfig
from tutti.errors import DivergedError
from tutti.parallel import gradient_noise
from tutti.ranks.environments import discover
from tutti.runs.noise_scale import NoiseScale, read_noise_scale
from tutti.train.job import Job
from tutti.train.learner import TorchLearner
from tutti.train.run import TrainingResult, run_rank
from tutti.train.torch import TorchFramework, TorchParts

AGREE = 2.0
WINDOWS = 20  # means of the loss until the target
MOST_RATES = 6  # of a batch
PLAIN = [
    "schedule={scaling: none, decay: constant, warmup_epochs: null, warmup_steps: null, milestones: []}",
    "log.tensorboard=false",
    "log.phases=false",
    "epochs=100000",
    "stop_at=null",
    "checkpoint.best=null",
    "checkpoint.every_epochs=null",
]
SQUARE_ROOT = ("adam", "adamw", "lamb", "muon")


@dataclass(frozen=True)
class Branch:
    """The loss of a branch over the samples that it has seen, and the samples at which it has reached the target."""

    batch: int
    rate: float
    samples: list[int]
    losses: list[float]
    reached: float | None
    noise: NoiseScale | None


class FromCheckpoint(TorchFramework):
    """Trains from the weights and the optimizer of a checkpoint at another batch, until the target is reached."""

    def __init__(self, checkpoint: Path, window: int, most_samples: int, target: float | None) -> None:
        super().__init__()
        self._checkpoint, self._window, self._most_samples, self._target = checkpoint, window, most_samples, target
        self.samples: list[int] = []
        self.losses: list[float] = []

    def build_parts(self, config: RunConfig, placement: Any, device: torch.device) -> TorchParts:
        parts = super().build_parts(config, placement, device)
        store.load_state(self._checkpoint, parts.model, parts.optimizer)
        return parts

    def train(self, job: Job[TorchLearner]) -> None:
        job.valid_data = None
        job.begin()
        total, steps = torch.zeros(()), 0
        for batch in job.batches():
            loss = job.learner.forward_backward(batch, False)
            job.learner.clip_gradients()
            job.learner.update_weights(job.lr)
            job.end_step(loss)
            total, steps = loss.double() + total, steps + 1
            seen = job.step * job.plan.global_batch
            if steps * job.plan.global_batch >= self._window:
                self.samples.append(seen - steps * job.plan.global_batch // 2)
                self.losses.append(float(total) / steps)
                total, steps = torch.zeros(()), 0
            is_past = bool(self.samples) and self.samples[-1] > 1.2 * (self.reached or math.inf)
            ends = is_past or seen >= self._most_samples
            if ends or job.logs_after(job.step):
                job.log()
            if ends:
                break
        job.finish()

    @property
    def reached(self) -> float | None:
        """The samples at which the loss, a mean over three windows, first passes the target."""
        if self._target is None:
            return None
        return crossing(self.samples, self.losses, self._target)


def crossing(samples: list[int], losses: list[float], target: float) -> float | None:
    """The samples at which a mean over three windows first passes a target, interpolated."""
    if len(losses) < 3:
        return None
    means = np.convolve(losses, np.ones(3) / 3, "valid")
    places = samples[1:-1]
    below = np.flatnonzero(means <= target)
    if not len(below):
        return None
    last = int(below[0])
    if last == 0:
        return float(places[0])
    share = (means[last - 1] - target) / (means[last - 1] - means[last])
    return float(places[last - 1] + share * (places[last] - places[last - 1]))


def run_quietly(framework: TorchFramework, config: RunConfig) -> TrainingResult:
    """Trains on this one rank without lines of the run on the screen."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        return run_rank(framework, config, discover({}))


def train_trunk(args: argparse.Namespace, folder: Path) -> Path:
    """Trains to the checkpoint from which branches begin, and returns it."""
    overrides = [*args.set, *PLAIN, f"batch={{global: {args.batch}}}", f"out={folder}", f"max_steps={args.trunk}"]
    config = resolve(args.recipe, [*overrides, f"checkpoint.every_steps={args.trunk}"]).config
    done = run_quietly(TorchFramework(), config)
    return done.folder.checkpoints / (done.folder.checkpoints / "latest").read_text().strip()


def train_branch(
    args: argparse.Namespace, folder: Path, checkpoint: Path, batch: int, factor: float, target: float | None
) -> Branch:
    """Trains a branch at the scaled rate times a factor."""
    micro = max(1, batch // 4 if batch == args.batch else min(batch // 2, args.micro))
    config = resolve(args.recipe, [*args.set, *PLAIN]).config
    ratio = batch / args.batch
    scaled = ratio**0.5 if config.optim.name in SQUARE_ROOT else ratio
    rate = config.optim.lr * scaled * factor
    overrides = [
        f"batch={{global: {batch}, micro: {micro}}}", f"optim.lr={rate:.6g}", f"out={folder}", f"seed={args.seed}",
        "log.noise_scale=true", "log.every_steps=50",
    ]  # fmt: skip
    samples = args.steps * args.batch
    window = max(samples // WINDOWS, batch)
    framework = FromCheckpoint(checkpoint, window, samples if target is None else args.most * samples, target)
    try:
        done = run_quietly(framework, resolve(args.recipe, [*args.set, *PLAIN, *overrides]).config)
    except DivergedError:
        print(f"batch {batch:,}, rate {rate:.3g}: diverged", flush=True)
        return Branch(batch, rate, [], [], None, None)
    noise = read_noise_scale(done.folder.path)
    branch = Branch(batch, rate, framework.samples, framework.losses, framework.reached, noise)
    shown = "" if branch.reached is None else f", target after {branch.reached:,.0f} samples"
    print(f"batch {batch:,}, rate {rate:.3g}: loss {loss_at(branch, samples):.4f}{shown}", flush=True)
    return branch


def fit_critical(batches: list[int], samples: list[float]) -> tuple[float, float]:
    """E_min and B_crit of E(B) = E_min (1 + B / B_crit), by least squares of logarithms."""
    sizes, logs = np.array(batches, dtype=float), np.log(samples)
    candidates = np.geomspace(sizes.min() / 8, sizes.max() * 8, 400)
    rests = [logs - np.log1p(sizes / critical) for critical in candidates]
    best = int(np.argmin([rest.var() for rest in rests]))
    return float(np.exp(rests[best].mean())), float(candidates[best])


def loss_at(branch: Branch, samples: int) -> float:
    """The mean of the last three windows before a number of samples."""
    seen = [loss for place, loss in zip(branch.samples, branch.losses, strict=True) if place <= samples]
    return float(np.mean(seen[-3:])) if seen else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="mnist")
    parser.add_argument("--set", action="append", default=[], help="an override of the recipe; may be repeated")
    parser.add_argument("--batch", type=int, default=32, help="the smallest batch, B; its rate is that of the recipe")
    parser.add_argument("--trunk", type=int, default=300, help="steps of batch B before the checkpoint")
    parser.add_argument("--steps", type=int, default=600, help="steps of batch B to the target")
    parser.add_argument("--multiples", type=_numbers, default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--micro", type=int, default=1024, help="the most samples of a forward pass")
    parser.add_argument("--most", type=int, default=6, help="a branch ends after so many times the samples of B")
    parser.add_argument("--tolerance", type=float, default=0.05, help="of the loss after the same samples")
    parser.add_argument("--seed", type=int, default=7, help="of the order of samples in branches")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    args = parser.parse_args()
    gradient_noise.EVERY_STEPS = 1  # branches are short
    facts = measure.conditions(ranks=1, trials=1, recipe=args.recipe)
    with tempfile.TemporaryDirectory(prefix="critical-batch-") as scratch:
        result = find_critical(args, Path(scratch))
    print_result(args, result)
    measure.write_json(args.out, {"program": "critical_batch", "conditions": facts} | result)


def climb(train: Callable[[float], Branch], factor: float, samples: int) -> list[tuple[float, Branch]]:
    """Trains at the scaled rate times a factor, half and double of it, and beyond while that is better; best first."""

    def cost(pair: tuple[float, Branch]) -> tuple[float, float]:
        return pair[1].reached or math.inf, loss_at(pair[1], samples)

    tried = [(each, train(each)) for each in (factor / 2, factor, 2 * factor)]
    for step in (0.5, 2.0):
        edge = factor * step
        while min(tried, key=cost)[0] == edge and len(tried) < MOST_RATES:
            edge *= step
            tried.append((edge, train(edge)))
    return sorted(tried, key=cost)


def find_critical(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Trains the trunk and all branches; returns the noise scale, the branches and the critical batch."""
    checkpoint = train_trunk(args, folder)
    samples = args.steps * args.batch
    base = climb(lambda factor: train_branch(args, folder, checkpoint, args.batch, factor, None), 1.0, samples)
    factor, best = base[0]
    target = loss_at(best, samples)
    found = {args.batch: crossing(best.samples, best.losses, target) or float(best.samples[-1])}
    losses, noises, every = {args.batch: target}, {args.batch: best.noise}, [branch for _, branch in base]
    for multiple in args.multiples:
        if multiple == 1:
            continue
        batch = multiple * args.batch
        train = partial(train_branch, args, folder, checkpoint, batch, target=target)
        tried = climb(train, factor, samples)
        factor, best = tried[0]
        every += [branch for _, branch in tried]
        losses[batch], noises[batch] = min(loss_at(branch, samples) for _, branch in tried), best.noise
        if best.reached is None:
            break  # no rate reaches the target at this batch
        found[batch] = best.reached
    least, critical = fit_critical(list(found), list(found.values())) if len(found) > 2 else (None, None)
    kept = [batch for batch, loss in losses.items() if loss <= target * (1 + args.tolerance)]
    return {
        "noise_scale": {batch: noise and asdict(noise) for batch, noise in noises.items()},
        "target": target, "samples": found, "losses": losses, "least_samples": least, "critical_batch": critical,
        "largest_within_tolerance": max(kept), "branches": [asdict(branch) for branch in every],
    }  # fmt: skip


def print_result(args: argparse.Namespace, result: dict[str, Any]) -> None:
    found, losses, critical, noises = (result[key] for key in ("samples", "losses", "critical_batch", "noise_scale"))
    rows = [
        [
            f"{batch:,}",
            f"{losses[batch]:.4f}",
            f"{found[batch]:,.0f}" if batch in found else "not reached",
            show_noise(noises[batch]),
        ]
        for batch in losses
    ]
    head = ["batch", "loss after equal samples", f"samples to {result['target']:.4f}", "noise scale"]
    measure.print_table(head, rows)
    print(f"largest batch within {args.tolerance:.0%} after equal samples: {result['largest_within_tolerance']:,}")
    if critical is None:
        print("critical batch: too few batches reach the target; give smaller --multiples or more --steps")
        return
    print(f"critical batch by the fit: {critical:,.0f} samples")
    values = {batch: noise["value"] for batch, noise in noises.items() if noise and noise["value"]}
    if not values:
        print("noise scale: no value; give more --steps")
        return
    batch = min(values)
    ratio = values[batch] / critical
    print(f"noise scale at batch {batch:,} over critical batch: {values[batch]:,.0f} / {critical:,.0f} = {ratio:.2f}")
    measure.print_verdict({f"within a factor of {AGREE:g}": 1 / AGREE <= ratio <= AGREE})


def show_noise(noise: dict[str, Any] | None) -> str:
    if noise is None:
        return "too few steps"
    if noise["value"] is None:
        return f"larger than {noise['low']:,.0f}"
    return f"{noise['value']:,.0f} ({noise['low']:,.0f} to {noise['high']:,.0f})"


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    main()
