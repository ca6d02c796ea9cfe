"""What a layout costs where it has nothing to share: sharded weights and samples split in space on one rank.

Claim: against a plain loop of torch over the same model in the same process, FSDP2 as `parallel.shard` applies it takes
at most 3 % more time on the U-Net and at most 5 % more on a compiled GPT of 124 M parameters, and the mode of
`parallel.space` with one part at most 2 % more on the U-Net. A recipe on one rank takes none of these paths: they are
forced here. The form "recipe" is what one rank does with `parallel.shard=all`: the step of tutti's learner.

Clock: after warm-up, rounds of steps of every form in turn, each between two synchronisations; given are the median of
the rounds and the range of the ratio over rounds. `--tiny` runs small sizes, also without a GPU.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_measure
import torch
import torch.nn.functional as F
from torch import nn

from tutti.config.layout import Layout
from tutti.models.transformer import gpt
from tutti.models.unet3d import UNet3d
from tutti.parallel.mesh import Mesh
from tutti.parallel.recompute import recompute
from tutti.parallel.shard import find_compiled, find_units, shard_model
from tutti.parallel.space.halo import SpaceGrid
from tutti.parallel.space.mode import SpaceMode
from tutti.ranks.group import Group, drop_group
from tutti.train.learner import put_channels_last
from tutti.train.metrics import CrossEntropy

GIB = 1 << 30
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
Step = Callable[[], None]


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    crop: int = 64
    batch: int = 64
    width: int = 64
    depth: int = 6
    gpt_width: int = 768
    gpt_depth: int = 12
    vocabulary: int = 25152
    context: int = 1024
    sequences: int = 8
    volumes: tuple[tuple[int, int], ...] = ((128, 4), (256, 1))
    rounds: int = 9
    steps: int = 10


TINY = Sizes(16, 2, 4, 3, 64, 2, 512, 32, 2, ((16, 1),), 2, 2)


@functools.cache
def group() -> Group:
    """The process group of this process."""
    return gpu_measure.join_alone()


def make_step(model: nn.Module, forward: Callable[[], torch.Tensor]) -> Step:
    """A training step in bf16 with fused Adam."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-4, fused=True)

    def step() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def unet(sizes: Sizes, form: str, fold: bool, crop: int = 0, batch: int = 0) -> Step:
    """The U-Net: as plain torch, with sharded weights, within the mode of space, or with its levels recomputed."""
    torch.manual_seed(1)
    model = UNet3d(4, 5, sizes.width, sizes.depth, fold=fold).to(DEVICE)
    if form != "shard":  # FSDP2 takes contiguous weights alone
        put_channels_last(model)
    side, count = crop or sizes.crop, batch or sizes.batch
    inputs = torch.randn(count, 4, side, side, side, device=DEVICE).to(memory_format=torch.channels_last_3d)
    targets = torch.randn(count, 5, side, side, side, device=DEVICE)
    run: Callable[[torch.Tensor], torch.Tensor] = model
    if form == "shard":
        shard_model(model, Mesh(Layout(1), 0, DEVICE).devices["shard"])
    if form == "space":
        mode = SpaceMode(SpaceGrid((1,), (0,)))
        mode.parts.is_recording = False
        run = lambda part: mode.run(model, part)  # noqa: E731
    if form == "recompute":
        recompute(find_units(model))
    if form == "recipe":
        overrides = [
            f"data.crop={side}",
            f"model.width={sizes.width}",
            f"model.depth={sizes.depth}",
            "speed.graphs=false",
        ]
        overrides += [
            f"batch.global={count}",
            "precision=bf16",
            "speed.compile=false",
            f"speed.fold={str(fold).lower()}",
        ]
        overrides += ["parallel.shard=all", "batch.micro=null", "optim.name=adam", "optim.lr=0.0001"]
        return gpu_measure.trainer_step("nbody", overrides, inputs, targets, group=group())
    return make_step(model, lambda: F.l1_loss(run(inputs), targets))


def transformer(sizes: Sizes, form: str) -> Step:
    """The compiled GPT: model and loss in one piece, or in the pieces of sharded weights."""
    torch.manual_seed(1)
    width, depth = sizes.gpt_width, sizes.gpt_depth
    model = gpt((sizes.context,), sizes.vocabulary, width=width, depth=depth, heads=width // 64).to(DEVICE)
    tokens = torch.randint(0, sizes.vocabulary, (sizes.sequences, sizes.context), device=DEVICE)
    targets = torch.randint(0, sizes.vocabulary, (sizes.sequences, sizes.context), device=DEVICE)
    criterion = CrossEntropy()
    if form == "plain":
        whole = torch.compile(lambda inputs, wanted: criterion(model(inputs), wanted), dynamic=False)
        return make_step(model, lambda: whole(tokens, targets))
    if form == "recipe":
        overrides = [f"model.width={width}", f"model.depth={depth}", f"model.heads={width // 64}", "speed.compile=true"]
        overrides += [f"model.vocabulary={sizes.vocabulary}", f"data.context={sizes.context}", "model.dropout=0"]
        overrides += [f"batch.global={sizes.sequences}", "precision=bf16", "batch.micro=null", "parallel.shard=all"]
        overrides += ["optim.name=adam", "optim.lr=0.0001", "optim.clip_norm=null", "schedule.warmup_steps=0"]
        return gpu_measure.trainer_step("text/gpt124m", overrides, tokens, targets, sizes.vocabulary, group())
    shard_model(model, Mesh(Layout(1), 0, DEVICE).devices["shard"])
    for each in find_compiled(model):
        each.compile(dynamic=False)
    compiled = torch.compile(criterion, dynamic=False)
    return make_step(model, lambda: compiled(model(tokens), targets))


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def compare(name: str, forms: dict[str, Step], bar: dict[str, float], sizes: Sizes) -> dict[str, Any]:
    """Rounds of every form in turn; the first is the peer of the others."""
    for step in forms.values():
        for _ in range(5):
            step()
    synchronize()
    seconds: dict[str, list[float]] = {form: [] for form in forms}
    for _ in range(sizes.rounds):
        for form, step in forms.items():
            began = time.perf_counter()
            for _ in range(sizes.steps):
                step()
            synchronize()
            seconds[form].append((time.perf_counter() - began) / sizes.steps)
    first = next(iter(forms))
    found: dict[str, Any] = {}
    for form, each in seconds.items():
        ratios = sorted(own / peer for own, peer in zip(each, seconds[first], strict=True))
        ratio = statistics.median(ratios)
        found[form] = {"ms": 1000 * statistics.median(each), "ratio": ratio, "range": [ratios[0], ratios[-1]]}
        limit = bar.get(form)
        verdict = "" if limit is None else f"  bar {limit:.2f}: {'met' if ratio <= limit else 'MISSED'}"
        print(
            f"{name:24} {form:10} {found[form]['ms']:9.2f} ms  {ratio:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
            f"{verdict}",
            flush=True,
        )
    return found


def measure_recompute(sizes: Sizes) -> dict[str, Any]:
    """Memory and time of the U-Net whose levels are computed again."""
    found: dict[str, Any] = {}
    for crop, batch in sizes.volumes:
        for form in ("plain", "recompute"):
            step = unet(sizes, form, fold=True, crop=crop, batch=batch)
            for _ in range(3):
                step()
            synchronize()
            if DEVICE.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            for _ in range(5):
                step()
            synchronize()
            ms = 1000 * (time.perf_counter() - began) / 5
            peak = torch.cuda.max_memory_allocated() / GIB if DEVICE.type == "cuda" else 0.0
            found[f"{crop}^3 x {batch} {form}"] = {"ms": ms, "peak_gib": peak}
            print(f"U-Net {crop}^3 x {batch:<11} {form:10} {ms:9.2f} ms  {peak:.2f} GiB", flush=True)
            del step
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the program")
    parser.add_argument("--only", choices=("gpt", "unet", "folded", "recompute"), help="one part of it")
    parser.add_argument("--out", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    sizes = TINY if options.tiny else Sizes()
    torch.backends.cudnn.benchmark = True
    group()
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {sizes}", flush=True)
    shard, space = {"shard": 1.03, "recipe": 1.03}, {"space": 1.02}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "gpt": lambda: compare(
            "GPT 124 M, compiled",
            {form: transformer(sizes, form) for form in ("plain", "recipe", "shard")},
            {"shard": 1.05, "recipe": 1.05},
            sizes,
        ),
        "unet": lambda: compare(
            "U-Net, convolutions",
            {form: unet(sizes, form, fold=False) for form in ("plain", "recipe", "shard", "space")},
            shard | space,
            sizes,
        ),
        "folded": lambda: compare(
            "U-Net, folded", {form: unet(sizes, form, fold=True) for form in ("plain", "recipe", "shard")}, shard, sizes
        ),
        "recompute": lambda: measure_recompute(sizes),
    }
    found = {name: part() for name, part in parts.items() if options.only in (None, name)}
    drop_group()
    if options.out:
        options.out.write_text(json.dumps({"device": name, "torch": torch.__version__, **found}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
