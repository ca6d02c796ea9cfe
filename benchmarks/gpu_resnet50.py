"""ResNet-50 on one GPU with synthetic images: eager PyTorch, and the training step of tutti.

Claim: on one H200, in bf16, tutti's step processes at least 7,000 images/s.

- eager, channels first: bf16 autocast, SGD, torch's default memory format.
- eager, channels last: the same in channels-last memory format, with fused SGD.
- tutti: the training step (`TorchLearner`) of the recipe imagenet/resnet50_opt: bf16, channels last, compiled, fused
  SGD, the stem over squares of pixels.

One batch of random images stays on the GPU; a step is forward, backward and update. Clock: time.perf_counter around
steps, with the device synchronised before and after, after warm-up and compilation. Trials alternate, and ratios are
taken within each trial.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import gpu_measure
import measure
import torch
import torch.nn.functional as F
from gpu_measure import Step

from tutti.models.resnet import resnet50
from tutti.train.learner import put_channels_last

BAR = 7000
RECIPE = "imagenet/resnet50_opt"


def eager(images: torch.Tensor, labels: torch.Tensor, channels_last: bool) -> Step:
    """A plain PyTorch training step."""
    kind = images.device.type
    model = resnet50().to(images.device)
    if channels_last:
        put_channels_last(model)
        images = images.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5, fused=channels_last)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(kind, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()

    return step


def compare(args: argparse.Namespace) -> dict[str, Any]:
    device = gpu_measure.find_gpu()
    facts = measure.conditions(
        device=gpu_measure.device_name(device), batch=args.batch, size=args.size, ranks=1, trials=args.trials
    )
    print(f"{facts['device']}, torch {facts['versions']['torch']}, batch {args.batch}, {args.size} pixels", flush=True)
    generator = torch.Generator(device).manual_seed(0)
    images = torch.randn(args.batch, 3, args.size, args.size, generator=generator, device=device)
    labels = torch.randint(0, 1000, (args.batch,), generator=generator, device=device)
    overrides = [f"batch.per_rank={args.batch}", *args.override]
    laid_out = images.to(memory_format=torch.channels_last)
    contenders = {
        "eager, channels first": partial(eager, images, labels, False),
        "eager, channels last": partial(eager, images, labels, True),
        "tutti": partial(gpu_measure.trainer_step, RECIPE, overrides, laid_out, labels),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    memory: dict[str, float] = {}
    steps: dict[str, Step] = {}
    for name, build in contenders.items():
        before = gpu_measure.memory_gib(device)  # the batch, and the contenders that are there already
        steps[name] = build()
        seconds = gpu_measure.warmed(steps[name], device)
        memory[name] = gpu_measure.peak_memory_gib(steps[name], device) - before
        print(f"{name}: first 5 steps {seconds:.1f} s", flush=True)
    for trial, name in measure.alternating(tuple(contenders), args.trials):
        rates[name].append(args.batch / gpu_measure.timed(steps[name], args.steps, device))
        print(f"trial {trial + 1}/{args.trials}  {name:<26} {rates[name][-1]:>8,.0f} images/s", flush=True)
    ours = measure.spread(rates["tutti"])
    return {
        "program": "gpu_resnet50",
        "conditions": facts,
        "images_per_second": {name: measure.spread(values) | {"trials": values} for name, values in rates.items()},
        "peak_memory_gib": memory,
        "tutti_over": {name: measure.paired(rates["tutti"], rates[name]) for name in rates if name != "tutti"},
        "bars": {f"at least {BAR:,} images/s": ours["median"] >= BAR},
    }


def show(result: dict[str, Any]) -> None:
    rows = []
    for name, rate in result["images_per_second"].items():
        cells = measure.shown(result["tutti_over"][name], 2) if name != "tutti" else ["", "", ""]
        rows.append([name, *measure.shown(rate, 0), *cells, f"{result['peak_memory_gib'][name]:.1f}"])
    print()
    measure.print_table(["contender", "images/s", "min", "max", "tutti over it", "min", "max", "peak GiB"], rows)
    measure.print_verdict(result["bars"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="ResNet-50 on one GPU, synthetic images: plain eager PyTorch and tutti's step.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--batch", type=int, default=256, help="images in a step")
    parser.add_argument("--size", type=int, default=224, help="pixels on a side")
    parser.add_argument("--steps", type=int, default=30, help="steps in a trial")
    parser.add_argument("--trials", type=int, default=5, help="trials of each contender")
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="more for tutti's step")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    args = parser.parse_args()
    result = compare(args)
    show(result)
    measure.write_json(args.out, result)


if __name__ == "__main__":
    main()
