"""The overhead of Horovod's API on tutti's engine: a training step compared with DDP, and many small messages with one.

Claims, on CPU ranks over Gloo: a step with `DistributedOptimizer` takes at most 1.10 times as long as a step with DDP;
100 named asynchronous all-reduces of 1 KB take at most 5 times as long as one all-reduce of 100 KB by torch.
On one GPU with one rank a step takes as long as a step without a wrapper, within the spread of the trials.

- ddp: torch.nn.parallel.DistributedDataParallel with its defaults, SGD with momentum.
- hvd: tutti.horovod.torch as in a script: broadcast_parameters, DistributedOptimizer with named parameters.
- plain (one rank only): the same loop without either.

The network is ResNet-18 for small images (11.2 M parameters in 62 tensors). All contenders start from the same weights
and have the same batch in every step, so they must end with the same weights: the largest difference is recorded.

Clock: time.perf_counter on rank 0 around a number of steps, between barriers of all ranks, after warm-up, in processes
that hold all contenders. Contenders alternate; a ratio is the median of the ratios within each trial.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tutti.horovod.torch as hvd
from tutti.models.resnet import resnet18
from tutti.ranks.process import end_with_parent

BAR_STEP, BAR_MESSAGES = 1.10, 5.0
MESSAGES, MESSAGE_FLOATS = 100, 256
LR, MOMENTUM = 0.01, 0.9

Step = Callable[[], None]


def training_step(model: nn.Module, optimizer: Any, images: torch.Tensor, labels: torch.Tensor) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def make_contenders(args: argparse.Namespace, device: torch.device) -> dict[str, tuple[nn.Module, Step]]:
    """Builds the contenders, all with the same initial weights."""
    generator = torch.Generator().manual_seed(args.seed + hvd.rank())
    images = torch.randn(args.batch, 3, args.size, args.size, generator=generator).to(device)
    labels = torch.randint(0, 10, (args.batch,), generator=generator).to(device)
    made: dict[str, tuple[nn.Module, Step]] = {}
    for name in ("ddp", "hvd") if hvd.size() > 1 else ("plain", "ddp", "hvd"):
        torch.manual_seed(args.seed)
        model = resnet18(num_classes=10, stem="small").to(device)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        if name == "hvd":
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        called = DistributedDataParallel(model) if name == "ddp" else model
        made[name] = model, training_step(called, optimizer, images, labels)
    return made


def time_steps(step: Step, steps: int, device: torch.device) -> float:
    """Seconds per step, between barriers."""
    _meet(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    _meet(device)
    return (time.perf_counter() - began) / steps


def small_messages(device: torch.device) -> dict[str, Step]:
    pieces = [torch.ones(MESSAGE_FLOATS, device=device) for _ in range(MESSAGES)]
    whole = torch.ones(MESSAGES * MESSAGE_FLOATS, device=device)

    def many() -> None:
        for handle in [hvd.allreduce_async_(piece, name=f"piece.{i}") for i, piece in enumerate(pieces)]:
            hvd.synchronize(handle)

    def one() -> None:
        dist.all_reduce(whole)
        whole.fill_(1)

    def one_by_hvd() -> None:
        hvd.allreduce_(whole, name="whole")

    return {"100 x 1 KB, hvd": many, "100 KB, torch": one, "100 KB, hvd": one_by_hvd}


def run_as_rank(args: argparse.Namespace) -> None:
    """Runs all trials on one number of ranks; rank 0 writes the results."""
    end_with_parent()
    hvd.init()
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    made = make_contenders(args, device)
    for _, step in made.values():
        time_steps(step, args.warmup, device)
    names = tuple(made)
    first = [list(model.parameters()) for model, _ in made.values()]
    difference = max(((a - b).abs().max().item() for other in first[1:] for a, b in zip(first[0], other, strict=True)))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for trial, name in measure.alternating(names, args.trials):
        seconds[name].append(time_steps(made[name][1], args.steps, device))
        if hvd.rank() == 0:
            print(f"{hvd.size()} rank(s), trial {trial + 1}/{args.trials}  {name:<5} {seconds[name][-1] * 1e3:.2f} ms")
    messages = small_messages(device) if hvd.size() > 1 else {}
    message_seconds: dict[str, list[float]] = {name: [] for name in messages}
    for step in messages.values():
        time_steps(step, 50, device)
    for _, name in measure.alternating(tuple(messages), args.trials):
        message_seconds[name].append(time_steps(messages[name], 200, device))
    if hvd.rank() == 0:
        found = {"steps": seconds, "messages": message_seconds, "largest_difference": difference}
        args.result.write_text(json.dumps(found))
    made.clear()
    hvd.shutdown()
    measure.leave_group()


def compare(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    facts = measure.conditions(device=device, batch=args.batch, size=args.size, ranks=args.ranks, trials=args.trials)
    measure.print_conditions(facts)
    found, bars = {}, {}
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory(prefix="hvd-vs-ddp-") as folder:
            result = Path(folder) / "result.json"
            words = [f"--{key}={getattr(args, key)}" for key in ("batch", "size", "steps", "warmup", "trials", "seed")]
            command = measure.torchrun(ranks, Path(folder), __file__, [*words, "--as-rank", f"--result={result}"])
            measure.run_command(command, Path.cwd(), args.deadline)
            measured = json.loads(result.read_text())
        steps, messages = measured["steps"], measured["messages"]
        peer = "ddp" if ranks > 1 else "plain"
        ratio = measure.paired(steps["hvd"], steps[peer])
        entry = measured | {"hvd_over": {peer: ratio}}
        if ranks > 1:
            bars[f"{ranks} ranks: a step at most {BAR_STEP:g} of DDP's"] = ratio["median"] <= BAR_STEP
            many = entry["messages_over"] = {
                name: measure.paired(messages["100 x 1 KB, hvd"], messages[name])
                for name in ("100 KB, torch", "100 KB, hvd")
            }
            met = many["100 KB, torch"]["median"] <= BAR_MESSAGES
            bars[f"{ranks} ranks: 100 x 1 KB at most {BAR_MESSAGES:g} of 100 KB"] = met
        else:
            entry["hvd_over"]["ddp"] = measure.paired(steps["hvd"], steps["ddp"])
            bars["1 rank: a step as long as with no wrapper, within the spread"] = ratio["min"] <= 1 <= ratio["max"]
        found[str(ranks)] = entry
    return {"program": "hvd_vs_ddp", "conditions": facts, "ranks": found, "bars": bars}


def show(result: dict[str, Any]) -> None:
    rows = []
    for ranks, entry in result["ranks"].items():
        for name, seconds in entry["steps"].items():
            cells = measure.shown(entry["hvd_over"][name], 3) if name in entry["hvd_over"] else ["", "", ""]
            rows.append([f"{ranks} rank(s), {name}", f"{measure.spread(seconds)['median'] * 1e3:.2f}", *cells])
        for name, seconds in entry["messages"].items():
            cells = measure.shown(entry["messages_over"][name], 2) if name in entry["messages_over"] else ["", "", ""]
            rows.append([f"{ranks} rank(s), {name}", f"{measure.spread(seconds)['median'] * 1e3:.3f}", *cells])
    print()
    measure.print_table(["what", "ms", "hvd over it", "min", "max"], rows)
    differences = [f"{ranks} rank(s) {entry['largest_difference']:.1e}" for ranks, entry in result["ranks"].items()]
    print("largest difference of weights after warm-up:", ", ".join(differences))
    measure.print_verdict(result["bars"])


def _meet(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if hvd.size() > 1:
        dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A training step through Horovod's API on tutti's engine, compared with torch's DDP.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks, one after the other")
    parser.add_argument("--batch", type=int, default=8, help="images of a rank in a step")
    parser.add_argument("--size", type=int, default=32, help="pixels on a side")
    parser.add_argument("--steps", type=int, default=20, help="steps in a trial")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the first trial")
    parser.add_argument("--trials", type=int, default=7, help="trials of every contender")
    parser.add_argument("--seed", type=int, default=42, help="seed of weights and images")
    parser.add_argument("--deadline", type=float, default=600, help="seconds that one number of ranks may take")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        run_as_rank(args)
        return
    measure.end_children_with_me()
    result = compare(args)
    show(result)
    measure.write_json(args.out, result)


if __name__ == "__main__":
    main()
