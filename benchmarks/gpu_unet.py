"""The 3-D U-Net on one GPU: the tutorial's first version, the tutorial's optimised versions, and tutti.

Claim: on one H200, at batch 64 and crops of 64^3, tutti's step is at least 2.6 times as fast as the tutorial's
optimised step, processes at least 4,600 samples/s in at most 6.0 GiB, and a training run from a box of 512^3 reaches at
least 97% of the samples/s of that step alone.

Compute only: one batch of random numbers stays on the GPU; a step is forward, backward and update.

- first version: fp32 with torch's defaults (convolutions in TF32), Adam, the loss read in every step.
- optimised, JIT: fp16 autocast with a gradient scaler, fused Adam, the loss through torch.jit.script.
- optimised, compile: the same, with model and loss through torch.compile. The faster of the two is the peer.
- tutti: the training step (`TorchLearner`) of the recipe nbody/short_opt: bf16, channels last, compiled, first and last
  layer as matrix products, kernels of its own for others, on inputs in bf16, as its dataset gives them to the run. The
  network has the same 117.0 M parameters in all versions.

Whole run: `tutti train nbody/short_opt` in this process with a box from `tutti data make nbody`, its crops and
symmetries, metrics and records; samples/s of the epochs after the first, from the record of the run. Under load for
seconds a GPU lowers its clock to keep its power limit: the whole run is compared with the step alone, repeated as often
as in an epoch, right before and after the run. Its ratio to the short trials is reported beside it.

Clock: time.perf_counter around steps, with the device synchronised before and after, after warm-up and compilation.
Trials alternate, and ratios are taken within each trial.
"""

import argparse
import json
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import gpu_measure
import measure
import torch
import torch.nn.functional as F
from gpu_measure import Step

from tutti.config.load import resolve
from tutti.data.nbody.make import make_nbody
from tutti.models.unet3d import UNet3d
from tutti.ranks.device import DTYPES
from tutti.ranks.environments import discover
from tutti.train.run import run_rank
from tutti.train.torch import TorchFramework

BAR_SPEED, BAR_RATE, BAR_MEMORY, BAR_WHOLE = 2.6, 4600, 6.0, 0.97
RECIPE = "nbody/short_opt"
FLOP_PER_SAMPLE = 5.15e12 / 64  # forward and backward


def l1(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.l1_loss(outputs, targets)


def network(model: UNet3d, volume: torch.Tensor) -> torch.Tensor:
    """The U-Net by torch's own convolutions, as in the tutorial."""
    levels: list[torch.Tensor] = []
    for layer in model.downs:
        volume = F.leaky_relu(F.conv3d(volume, layer.weight, layer.bias, stride=2, padding=1), inplace=True)  # pyright: ignore
        levels.append(volume)
    levels.pop()
    for layer in (*model.ups, model.last):
        if layer is not model.ups[0]:
            volume = torch.cat((volume, levels.pop()), 1)
        volume = F.conv_transpose3d(volume, layer.weight, layer.bias, stride=2, padding=1)  # pyright: ignore
        volume = torch.tanh(volume) if layer is model.last else F.relu(volume, inplace=True)
    return volume


def first_version(inputs: torch.Tensor, targets: torch.Tensor, width: int) -> Step:
    """The tutorial's first version: fp32, Adam, and a synchronisation in every step."""
    model = UNet3d(width=width).to(inputs.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss = l1(network(model, inputs), targets)
        loss.item()
        loss.backward()
        optimizer.step()

    return step


def optimised(inputs: torch.Tensor, targets: torch.Tensor, width: int, compiled: bool) -> Step:
    """The tutorial's optimised versions: fp16 autocast, fused Adam, and JIT for the loss or compile for everything."""
    kind = inputs.device.type
    model = UNet3d(width=width).to(inputs.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, fused=True)
    scaler = torch.amp.GradScaler(kind, enabled=kind == "cuda")
    criterion: Any = l1 if compiled else torch.jit.script(l1)

    def forward(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return criterion(network(model, inputs), targets)

    passed = torch.compile(forward, dynamic=False) if compiled else forward

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(kind, torch.float16 if kind == "cuda" else torch.bfloat16):
            loss = passed(inputs, targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def errors(device: torch.device, width: int, crop: int) -> dict[str, float]:
    """Errors of torch's convolutions and of tutti's forms in fp32 without TF32, relative to fp64."""
    torch.manual_seed(0)
    exact = UNet3d(width=width).to(device).double()
    inputs, weights = (torch.rand(2, c, *[crop] * 3, device=device, dtype=torch.float64) * 2 - 1 for c in (4, 5))
    found = {}
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        (exact(inputs) * weights).sum().backward()
        for name, fold in (("plain", False), ("tutti", True)):
            model = UNet3d(width=width, fold=fold).to(device)
            model.load_state_dict(exact.state_dict())
            (model(inputs.float()) * weights.float()).sum().backward()
            pairs = zip(exact.parameters(), model.parameters(), strict=True)
            found[name] = max(_distance(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None)
    return found


def _distance(exact: torch.Tensor, other: torch.Tensor) -> float:
    """The norm of the difference relative to the norm of the first."""
    return ((other - exact).norm() / exact.norm()).item()


def make_boxes(args: argparse.Namespace, folder: Path) -> None:
    """Makes the boxes of the whole run, where they are missing."""
    sides = {"train.h5": args.box, "valid.h5": max(args.box // 2, args.crop)}
    for seed, (name, side) in enumerate(sides.items(), start=1):
        path = (args.data or folder) / name
        if not path.exists():
            print(f"making {name}, {side}^3 cells", flush=True)
            make_nbody(path, box=side, seed=seed, memory_gib=16, device=gpu_measure.find_gpu().type)


def whole_run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Trains from a box; returns samples/s of the epochs after the first."""
    train, valid = (args.data or folder) / "train.h5", (args.data or folder) / "valid.h5"
    overrides = [
        f"data.train={train}", f"data.valid={valid}", f"data.crop={args.crop}", f"model.width={args.width}",
        f"data.train_samples={args.batch * args.epoch_steps}", f"data.valid_samples={args.batch}",
        f"batch.global={args.batch}", f"epochs={args.epochs}", f"out={folder / 'runs'}", "checkpoint.every_epochs=null",
    ]  # fmt: skip
    outcome = run_rank(TorchFramework(), resolve(RECIPE, overrides).config, discover({}))
    events = [json.loads(line) for line in outcome.folder.metrics.read_text().splitlines()]
    rates = [event["samples_per_second"] for event in events if event["event"] == "epoch"]
    return {"samples_per_second": rates[1:], "first_epoch": rates[0], "results": outcome.results}


def compare(args: argparse.Namespace) -> dict[str, Any]:
    device = gpu_measure.find_gpu()
    facts = measure.conditions(
        device=gpu_measure.device_name(device),
        batch=args.batch,
        crop=args.crop,
        box=args.box,
        ranks=1,
        trials=args.trials,
    )
    print(
        f"{facts['device']}, torch {facts['versions']['torch']}, batch {args.batch}, crops of {args.crop}^3", flush=True
    )
    generator = torch.Generator(device).manual_seed(0)
    shape = (args.batch, 4, args.crop, args.crop, args.crop)
    inputs = torch.rand(shape, generator=generator, device=device) * 2 - 1
    targets = torch.rand((args.batch, 5, *shape[2:]), generator=generator, device=device) * 2 - 1
    overrides = [f"batch.global={args.batch}", f"model.width={args.width}", f"data.crop={args.crop}", *args.override]
    last = torch.channels_last_3d
    contenders = {
        "first version": partial(first_version, inputs, targets, args.width),
        "optimised, JIT": partial(optimised, inputs, targets, args.width, False),
        "optimised, compile": partial(optimised, inputs, targets, args.width, True),
        "tutti": partial(
            gpu_measure.trainer_step,
            RECIPE,
            overrides,
            inputs.to(DTYPES[resolve(RECIPE, overrides).config.precision], memory_format=last),
            targets.to(memory_format=last),
        ),
    }
    distance = errors(device, args.width, args.crop)
    print("error of gradients:", ", ".join(f"{name} {value:.1e}" for name, value in distance.items()), flush=True)
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    memory: dict[str, float] = {}
    starts: dict[str, float] = {}
    steps: dict[str, Step] = {}
    for name, build in contenders.items():
        before = gpu_measure.memory_gib(device)  # the batch, and the contenders that are there already
        steps[name] = build()
        starts[name] = gpu_measure.warmed(steps[name], device)
        memory[name] = gpu_measure.peak_memory_gib(steps[name], device) - before
        print(f"{name}: first 5 steps {starts[name]:.1f} s", flush=True)
    for trial, name in measure.alternating(tuple(contenders), args.trials):
        seconds = gpu_measure.timed(steps[name], args.steps, device)
        rates[name].append(args.batch / seconds)
        print(f"trial {trial + 1}/{args.trials}  {name:<20} {rates[name][-1]:>8,.0f} samples/s", flush=True)
    alone = steps["tutti"]
    steps.clear()
    gpu_measure.memory_gib(device)

    def sustained() -> float:
        gpu_measure.timed(alone, args.epoch_steps, device)  # brings the GPU to the clock of a long run
        return args.batch / gpu_measure.timed(alone, args.epoch_steps, device)

    with tempfile.TemporaryDirectory(prefix="gpu-unet-", dir=args.scratch) as folder:
        make_boxes(args, Path(folder))
        long = [sustained()]
        whole = whole_run(args, Path(folder))
        long.append(sustained())
    peer = max(("optimised, JIT", "optimised, compile"), key=lambda name: statistics.median(rates[name]))
    ratio = measure.paired(rates["tutti"], rates[peer])
    rate = statistics.median(whole["samples_per_second"])
    share = rate / statistics.fmean(long)
    return {
        "program": "gpu_unet",
        "conditions": facts,
        "samples_per_second": {name: measure.spread(values) | {"trials": values} for name, values in rates.items()},
        "gradient_error": distance,
        "first_steps_seconds": starts,
        "peak_memory_gib": memory,
        "whole": whole,
        "peer": peer,
        "tutti_over": {name: measure.paired(rates["tutti"], rates[name]) for name in rates if name != "tutti"},
        "sustained_samples_per_second": long,
        "whole_over_compute_only": share,
        "whole_over_short_trials": rate / statistics.median(rates["tutti"]),
        "bars": {
            f"at least {BAR_SPEED:g} times {peer}": ratio["median"] >= BAR_SPEED,
            f"at least {BAR_RATE:,} samples/s": statistics.median(rates["tutti"]) >= BAR_RATE,
            f"at most {BAR_MEMORY:.1f} GiB": round(memory["tutti"], 1) <= BAR_MEMORY,
            f"whole run at least {BAR_WHOLE:.0%} of compute only": share >= BAR_WHOLE,
        },
    }


def show(result: dict[str, Any]) -> None:
    rows = []
    for name, rate in result["samples_per_second"].items():
        cells = measure.shown(result["tutti_over"][name], 2) if name != "tutti" else ["", "", ""]
        tflops = rate["median"] * FLOP_PER_SAMPLE / 1e12
        rows.append([name, *measure.shown(rate, 0), *cells, f"{tflops:.0f}", f"{result['peak_memory_gib'][name]:.1f}"])
    whole = result["whole"]["samples_per_second"]
    rows.append(["tutti, whole run", *measure.shown(measure.spread(whole), 0), "", "", "", "", ""])
    print()
    head = ["contender", "samples/s", "min", "max", "tutti over it", "min", "max", "TFLOP/s", "peak GiB"]
    measure.print_table(head, rows)
    long = ", ".join(f"{each:,.0f}" for each in result["sustained_samples_per_second"])
    print(
        f"whole run: {result['whole_over_compute_only']:.1%} of the step alone, as often as in an epoch before and "
        f"after it ({long} samples/s); {result['whole_over_short_trials']:.1%} of its short trials; {len(whole)} epochs"
    )
    measure.print_verdict(result["bars"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The 3-D U-Net on one GPU by the tutorial's code and by tutti: samples/s, memory, and a whole run.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--batch", type=int, default=64, help="samples in a step")
    parser.add_argument("--crop", type=int, default=64, help="cells on a side of a crop")
    parser.add_argument("--box", type=int, default=512, help="cells on a side of the box of the whole run")
    parser.add_argument("--width", type=int, default=64, help="channels of the network's first layer")
    parser.add_argument("--steps", type=int, default=20, help="steps in a trial")
    parser.add_argument("--trials", type=int, default=5, help="trials of each contender")
    parser.add_argument("--epochs", type=int, default=4, help="epochs of the whole run; the first is not counted")
    parser.add_argument("--epoch-steps", type=int, default=256, help="steps in an epoch of the whole run")
    parser.add_argument("--data", type=Path, help="folder of train.h5 and valid.h5; made there if missing")
    parser.add_argument("--scratch", type=Path, help="folder for temporary files")
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="more for tutti's step")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    args = parser.parse_args()
    result = compare(args)
    show(result)
    measure.write_json(args.out, result)


if __name__ == "__main__":
    main()
