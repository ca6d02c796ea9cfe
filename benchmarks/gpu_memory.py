"""The memory of a rank as `tutti plan` predicts it, against what torch's allocator measures on one GPU.

Claim: the predicted peak is within 10 % of `torch.cuda.max_memory_allocated` for ResNet-50 (fp32, bf16), the U-Net
(bf16) and a GPT of 124.1 M parameters on 1, 2, 4 and 8 ranks; what the GPT holds between steps is within 10 % of 1.59,
0.85, 0.44 and 0.26 GiB, which were measured on another GPT of that name; and no process uses more of the GPU than the
plan says is needed.

Predictions are made by processes that see no GPU. Each measurement is a process of its own: one rank trains by tutti's
learner; several ranks share the GPU over Gloo (NCCL refuses that), with weights sharded by `shard_model`. Peaks are of
the third step and later, when kernels are chosen; "whole run" is the peak since the start, "in use" what the driver
says. With `parallel.recompute=layers` the U-Net's memory and the time of a step are given beside those without, and the
U-Net on crops of 256^3 cells is split in space over 1, 2 and 4 ranks, whose halos pass through host memory. With
`--at-once 6` cases are measured beside each other, which says nothing about time or what is in use.

`--tiny` runs small sizes, also without a GPU, where nothing is measured.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 1 << 30
BAR = 0.10
BETWEEN_GIB = {1: 1.59, 2: 0.85, 4: 0.44, 8: 0.26}  # of the GPT, measured on an H200
STEPS, WARM_UP = 4, 3
TIMEOUT_SECONDS = 200


@dataclass(frozen=True)
class Case:
    """A recipe with overrides on a number of ranks."""

    name: str
    recipe: str
    overrides: tuple[str, ...]
    ranks: int = 1

    @property
    def in_space(self) -> bool:
        """Whether samples are split in space over the ranks."""
        return any(each.startswith("parallel.space=") for each in self.overrides)

    @property
    def all_overrides(self) -> list[str]:
        shard = ["parallel.shard=all"] if self.ranks > 1 and not self.in_space else []
        return ["data.prefetch=0", "batch.micro=null", *self.overrides, *shard]


def cases(tiny: bool) -> list[Case]:
    """The workloads of the claim, then those that show what recomputing saves."""
    images = ("data.name=synthetic", "data.shape=[3,224,224]", "data.classes=1000", "data.train=512", "optim.lr=0.01")
    gpt = ("data.context=512", "data.characters=100000", "batch.global=8")
    volumes, sizes = ((),), ((128, 4), (256, 1))
    if tiny:
        images = ("data.name=synthetic", "data.shape=[3,32,32]", "data.classes=10", "data.train=512")
        gpt = ("data.context=32", "data.characters=20000", "model.width=64", "model.heads=4", "model.depth=2")
        gpt += ("model.vocabulary=512", "batch.global=8")
        volumes, sizes = (("model.width=4", "model.depth=3"),), ((16, 2),)
    batch = 16 if tiny else 128
    found = [
        Case("ResNet-50 fp32", "imagenet/resnet50", (*images, f"batch.per_rank={batch // 4}", "batch.eval=null")),
        Case("ResNet-50 fp32", "imagenet/resnet50", (*images, f"batch.per_rank={batch}", "batch.eval=null")),
        Case(
            "ResNet-50 bf16",
            "imagenet/resnet50",
            (*images, f"batch.per_rank={batch}", "batch.eval=null", "precision=bf16"),
        ),
    ]
    crop = 16 if tiny else 64
    for precision, samples, fold in (
        ("bf16", 8, "gpu"),
        ("bf16", 64, "gpu"),
        ("bf16", 64, "false"),
        ("fp32", 64, "gpu"),
    ):
        settings = (f"data.crop={crop}", f"precision={precision}", f"batch.global={samples}", f"speed.fold={fold}")
        name = f"U-Net {precision}{'' if fold == 'gpu' else ' unfolded'}"
        found.append(Case(name, "nbody", (*volumes[0], *settings)))
    found += [Case("GPT 124 M bf16", "text/gpt124m", gpt, ranks) for ranks in ((1, 2) if tiny else (1, 2, 4, 8))]
    for side, samples in sizes:
        for how in ("none", "layers"):
            settings = (f"data.crop={side}", "precision=bf16", f"batch.global={samples}", f"parallel.recompute={how}")
            found.append(Case(f"U-Net {side}^3 recompute={how}", "nbody", (*volumes[0], *settings)))
    side = 16 if tiny else 256
    for parts in (1, 2) if tiny else (1, 2, 4):
        settings = (f"data.crop={side}", "precision=bf16", "batch.global=1", f"parallel.space={parts}")
        found.append(
            Case(f"U-Net {side}^3 space={parts}", "nbody", (*volumes[0], *settings, "speed.fold=false"), parts)
        )
    return found


# In processes of their own.


def predict_case(case: Case) -> dict[str, Any]:
    from tutti.config.load import resolve
    from tutti.memory.advice import needed_bytes
    from tutti.memory.prediction import predict

    began = time.perf_counter()
    found = predict(resolve(case.recipe, case.all_overrides).config, case.ranks, "cuda")
    return {
        "peak": found.peak_bytes,
        "between": found.between_bytes,
        "needed": needed_bytes(found)[1],
        "samples": found.micro_batch,
        "phase": found.phase,
        "seconds": time.perf_counter() - began,
    }


def measure_case(case: Case) -> dict[str, Any]:
    """Train a rank of a case for some steps on a fixed batch; its memory and the seconds of a step."""
    import torch

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.backends.cudnn.benchmark = True
    step = make_step(case, device)
    losses = [step() for _ in range(WARM_UP)]
    if device.type != "cuda":
        return {"losses": losses}
    torch.cuda.synchronize()
    whole = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {
        "losses": losses,
        "seconds": (time.perf_counter() - began) / STEPS,
        "peak": torch.cuda.max_memory_allocated(),
        "whole": max(whole, torch.cuda.max_memory_allocated()),
        "between": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "in_use": total - free,
    }


def make_step(case: Case, device: Any) -> Any:
    """A training step of a rank: by tutti's learner, or with sharded weights on several ranks over Gloo."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from tutti.config.load import resolve
    from tutti.data.dataset import find_part
    from tutti.data.loader import RankBatch
    from tutti.memory.samples import describe_samples
    from tutti.optim.optimizers import build_optimizer
    from tutti.parallel.mesh import Mesh
    from tutti.parallel.shard import allocate, shard_model
    from tutti.ranks.environments import discover
    from tutti.ranks.group import join
    from tutti.train.learner import Pass, autocast, channels_last
    from tutti.train.torch import Objects, build_parts

    config = resolve(case.recipe, case.all_overrides).config
    placement = discover(os.environ if case.ranks > 1 else {})
    samples = describe_samples(config)
    parts = build_parts(config, Objects(train_data=FixedBatch(samples)), placement, device)
    count = parts.plan.per_rank_batch
    torch.manual_seed(7)  # of the samples: where they are split in space, every rank makes the same whole ones
    inputs, targets = (FixedBatch(samples).make(each, count).to(device) for each in (samples.inputs, samples.targets))
    if case.ranks == 1:
        learner = parts.make_learner(config, join(placement, config.runtime), device)
        learner.model.train()
        batch = RankBatch(0, 0, np.arange(count), [(inputs, targets)])

        def step() -> float:
            loss = learner.forward_backward(batch, measure=False)
            learner.clip_gradients()
            learner.update_weights(config.optim.lr)
            return loss.item()

        return step
    store = f"file://{os.environ['GPU_MEMORY_STORE']}"
    dist.init_process_group("gloo", init_method=store, rank=placement.rank, world_size=case.ranks)
    mesh = Mesh(parts.plan.layout, placement.rank, device)
    forward: Any = parts.model
    if parts.space is not None:
        parts.space.connect(*mesh.neighbours)
        forward = DistributedDataParallel(Pass(parts.model, lambda outputs, _: outputs, parts.space))
        part = find_part(parts.plan.layout, placement.rank)
        assert part is not None
        inputs, targets = part.cut_batch(inputs, targets)
    else:
        shard_model(parts.model, mesh.weights)
        allocate(parts.model, device, config.seed)
    optimizer = build_optimizer(config.optim, parts.model)

    def sharded_step() -> float:
        with autocast(config.precision, device):
            outputs = forward(inputs) if parts.space is None else forward(channels_last(inputs), None)[1]
            loss = parts.criterion(outputs, targets)
        loss.backward()
        mean = loss.detach().cpu() / case.ranks
        del outputs, loss
        if config.optim.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parts.model.parameters(), config.optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean)
        return mean.item()

    return sharded_step


class FixedBatch:
    """Random samples of the shapes of a recipe's data."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples
        self.input_shape = samples.shapes["input_shape"]
        self.num_classes = samples.shapes.get("num_classes")

    def __len__(self) -> int:
        return 4096

    def batch(self, ids: Any, draws: Any) -> Any:
        return tuple(self.make(each, len(ids)) for each in (self._samples.inputs, self._samples.targets))

    def make(self, like: Any, count: int) -> Any:
        import torch

        shape = (count, *like.shape[1:])
        return torch.randn(shape) if like.is_floating_point() else torch.randint(0, self.num_classes, shape)


# In the process that the user starts.


def run_child(what: str, index: int, tiny: bool, **more: str) -> subprocess.Popen[str]:
    words = [sys.executable, __file__, what, str(index), *(["--tiny"] if tiny else [])]
    return subprocess.Popen(words, env=os.environ | more, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answer(child: subprocess.Popen[str]) -> dict[str, Any]:
    """What a child printed last, as JSON; the end of its error if it failed."""
    try:
        out, err = child.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        out, err = child.communicate()
        err += "\ntimed out"
    if child.returncode:
        return {"error": (err.strip().splitlines() or ["?"])[-1][:160]}
    return json.loads(out.strip().splitlines()[-1])


def predict_all(asked: list[int], tiny: bool) -> dict[int, dict[str, Any]]:
    """The predictions of cases by their numbers."""

    def predict(index: int) -> dict[str, Any]:
        return answer(run_child("predict", index, tiny, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"))

    with ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 2) // 2))) as pool:
        return dict(zip(asked, pool.map(predict, asked), strict=True))


def measure(case: Case, index: int, tiny: bool) -> dict[str, Any]:
    """The answer of rank 0; all ranks of a case run at once."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(case.ranks):
            more = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.ranks, "LOCAL_WORLD_SIZE": case.ranks}
            more |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500, "OMP_NUM_THREADS": 2}
            more |= {"GPU_MEMORY_STORE": Path(folder, "store"), "GLOO_SOCKET_IFNAME": "lo"}
            given = {key: str(value) for key, value in more.items()} if case.ranks > 1 else {}
            children.append(run_child("measure", index, tiny, **given))
        answers = [answer(child) for child in children]
    return next((each for each in answers if "error" in each), answers[0])


def gib(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / GIB:.3f}"


def error_of(predicted: float, measured: float | None) -> float | None:
    return None if not measured else predicted / measured - 1


def show_error(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"


def judge(case: Case, predicted: dict[str, Any], found: dict[str, Any], alone: bool) -> list[str]:
    """What of the claim does not hold."""
    if "peak" not in predicted or "peak" not in found:
        return ["failed"] if "error" in predicted | found else []
    wrong = []
    if abs(error_of(predicted["peak"], found["peak"]) or 0) > BAR:
        wrong.append("peak")
    if alone and case.ranks == 1 and found["in_use"] > predicted["needed"]:
        wrong.append("in use")
    expected = BETWEEN_GIB.get(case.ranks) if case.name.startswith("GPT") else None
    if expected and abs(found["between"] / GIB / expected - 1) > BAR:
        wrong.append("between")
    return wrong


def print_row(name: str, cells: list[str], end: str = "") -> None:
    print(f"{name:28}" + "".join(f"{cell:>11}" for cell in cells) + end, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("predict", "measure"), help=argparse.SUPPRESS)
    parser.add_argument("index", nargs="?", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the program")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--at-once", type=int, default=1, help="cases that are measured at the same time")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    chosen = cases(options.tiny)
    if options.what:
        function = predict_case if options.what == "predict" else measure_case
        print(json.dumps(function(chosen[options.index])))
        return
    began = time.perf_counter()
    alone, failures, results = options.at_once == 1, 0, []
    asked = [index for index, case in enumerate(chosen) if options.only in case.name]
    asked.sort(key=lambda index: -chosen[index].ranks)  # those that take longest first
    predictions = ThreadPoolExecutor(1).submit(predict_all, asked, options.tiny)
    if alone:
        predictions.result()
    pool = ThreadPoolExecutor(options.at_once)
    waiting = {pool.submit(measure, chosen[index], index, options.tiny): index for index in asked}
    predicted = predictions.result()
    print(f"{len(asked)} predictions in {time.perf_counter() - began:.0f} s; GiB of a rank:")
    titles = ("samples", "ranks", "predicted", "peak", "error", "between", "measured", "error", "whole run", "reserved")
    print_row("case", [*titles, "in use", "needed", "ms/step"])
    for done in as_completed(waiting):
        index = waiting[done]
        case, plan, found = chosen[index], predicted[index], done.result()
        wrong = judge(case, plan, found, alone)
        failures += bool(wrong)
        results.append({"case": case.name, "ranks": case.ranks, "predicted": plan, "measured": found, "wrong": wrong})
        if "error" in plan or "error" in found:
            print(f"{case.name:28}  {plan.get('error') or found.get('error')}", flush=True)
            if "peak" in found:
                print(
                    f"{'':28}  measured: peak {gib(found['peak'])}, between steps {gib(found['between'])}", flush=True
                )
            continue
        cells = [str(plan["samples"]), str(case.ranks), gib(plan["peak"]), gib(found.get("peak"))]
        cells += [
            show_error(error_of(plan["peak"], found.get("peak"))),
            gib(plan["between"]),
            gib(found.get("between")),
        ]
        cells += [show_error(error_of(plan["between"], found.get("between"))), gib(found.get("whole"))]
        cells += [gib(found.get("reserved")), gib(found.get("in_use")), gib(plan["needed"])]
        cells.append(f"{found['seconds'] * 1000:.1f}" if "seconds" in found else "-")
        verdict = f"  WRONG: {', '.join(wrong)}" if wrong else ""
        print(f"{case.name:28}  " + "  ".join(f"{cell:>9}" for cell in cells) + verdict, flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(
        f"{'all claims hold' if not failures else f'{failures} cases do not hold'}; {time.perf_counter() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
