"""What the recipes reach: validation accuracy and loss of several seeds, many runs at once on one GPU.

Claim: none is tested; the program writes the results that the docs state, each with n, mean and spread, and the curves.

- `cifar10`: the recipes cnn, resnet_small, alexnet and resnet18 as they are, on CIFAR-10 in TUTTI_DATA.
- `nbody`: the recipes nbody, bs64_opt, bs256_opt, bs512_test and bs512_opt, with a small box that is made first, epochs
  of 4,096 crops, and the warm-up of large batches shortened like the epochs. Batches are accumulated from micro-batches
  of 64 crops. Nothing is compiled, since runs at once would compile at once; `--compile` compiles as the recipes say.
- `warmup`: MNIST in TUTTI_DATA at global batch 4,096 and 8,192 with the linear rule, 12 epochs: without a warm-up, with
  a ramp over two epochs, and with the unscaled rate held for one and for two epochs (`schedule.warmup: hold`).

Each run is a process; --at-once of them share the GPU, on which processes take turns: on an H200 six runs of CIFAR-10
at once took 200 s for 24 epochs of the smallest network. Under NVIDIA's MPS they compute side by side: start it with
`export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps; nvidia-cuda-mps-control -d`, and let more of them run, but not nbody beside
the small networks of cifar10, whose kernels then wait for those of the U-Net: nine runs of both at once took 300 s for
the smallest network. All cases begin with the first seed, then the next seed follows, which gives way under MPS: where
--seconds end before all runs, every case has about as many seeds. A run that would not end in time, as an earlier one
of its case shows, is not begun; one that is cut off is left out, and said. Times are those of a shared GPU.

    TUTTI_DATA=data python benchmarks/recipe_results.py --only cifar10 warmup --out cifar.json
    python benchmarks/recipe_results.py --only nbody --out nbody.json
    python benchmarks/recipe_results.py --read cifar.json nbody.json --figures docs/figures --out recipe_results.json
"""

import argparse
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_measure
import measure
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tutti.config.load import resolve
from tutti.data.nbody.make import make_nbody
from tutti.errors import TuttiError
from tutti.ranks.environments import discover
from tutti.train.run import run_rank
from tutti.train.torch import TorchFramework

PLAIN = ["checkpoint.every_epochs=null", "log.tensorboard=false", "runtime.threads=1"]
PRELOADED = ["__main__", "tutti.train.torch", "tutti.data.cifar10", "tutti.data.mnist", "tutti.data.nbody.dataset"]
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666", "#000000")
HEAD = ("case", "n", "mean", "stdev", "min", "max", "best epoch", "seconds of a run")


@dataclass(frozen=True)
class Case:
    """A recipe with overrides, whose runs differ by their seed alone."""

    group: str
    name: str
    recipe: str
    overrides: tuple[str, ...] = ()

    @property
    def metric(self) -> str:
        return "valid_loss" if self.group == "nbody" else "valid_accuracy"


def make_cases(args: argparse.Namespace, data: Path) -> list[Case]:
    """Returns the cases of the chosen groups, the longest runs of each group first."""
    cases = [Case("cifar10", name, f"cifar10/{name}") for name in ("resnet18", "resnet_small", "alexnet", "cnn")]
    box = (
        f"data.train={data / 'train.h5'}", f"data.valid={data / 'valid.h5'}", f"data.train_samples={args.samples}",
        f"data.valid_samples={args.samples // 8}", f"batch.micro={args.micro}",
    )  # fmt: skip
    box += () if args.compile else ("speed.compile=false",)
    short = (f"schedule.warmup_steps={args.warmup_steps}",)
    cases += [
        Case("nbody", "batch 512, 40 epochs", "nbody/bs512_opt", box + short),
        Case("nbody", "batch 64, fp32", "nbody", box),
        Case("nbody", "batch 256, 20 epochs", "nbody/bs256_opt", box + short),
        Case("nbody", "batch 64", "nbody/bs64_opt", box),
        Case("nbody", "batch 512, 10 epochs", "nbody/bs512_test", box + short),
    ]
    for batch in (4096, 8192):
        plain = (f"batch.global={batch}", "epochs=12", "schedule.scaling=linear")
        for kind, epochs in (("none", 0), ("ramp", 2), ("hold", 1), ("hold", 2)):
            name = f"batch {batch:,}, " + (f"{kind} {epochs}" if epochs else "no warm-up")
            given = (f"schedule.warmup_epochs={epochs}", f"schedule.warmup={kind}") if epochs else ()
            cases.append(Case("warmup", name, "mnist", plain + given))
    return [case for case in cases if case.group in args.only and case.name in (args.cases or (case.name,))]


def shrink(case: Case) -> Case:
    """Returns a case that a CPU ends in seconds: to try the program, not to learn from."""
    small = ("epochs=2", "precision=fp32", "schedule.shorten_warmup=true")
    if case.group == "nbody":
        small += ("data.crop=8", "model.width=4", "model.depth=2", "data.train_samples=8", "data.valid_samples=4")
        return Case(case.group, case.name, case.recipe, (*case.overrides, *small, "batch.micro=4", "batch.global=4"))
    images = "[1,28,28]" if case.group == "warmup" else "[3,32,32]"
    small += ("data.name=synthetic", f"data.shape={images}", "data.train=32", "data.valid=16", "batch.eval=16")
    kept = tuple(word for word in case.overrides if not word.startswith(("batch.", "epochs=")))
    return Case(case.group, case.name, case.recipe, (*kept, *small, "batch.per_rank=null", "batch.global=16"))


# One run.


def train(case: Case, seed: int, folder: Path, extra: Sequence[str], gives_way: bool) -> None:
    """Trains one run in a process of its own, and writes its curve to a file; under MPS it may give way to others."""
    with open(folder.with_suffix(".log"), "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if gives_way:
        os.environ["CUDA_MPS_CLIENT_PRIORITY"] = "1"  # below that of others
    overrides = [*case.overrides, *PLAIN, *extra, f"seed={seed}", f"out={folder}"]
    outcome = run_rank(TorchFramework(), resolve(case.recipe, overrides).config, discover({}))
    events = [json.loads(line) for line in outcome.folder.metrics.read_text().splitlines()]
    epochs = [event for event in events if event["event"] == "epoch"]
    found = {
        "group": case.group,
        "case": case.name,
        "recipe": case.recipe,
        "seed": seed,
        "metric": case.metric,
        "steps": [event["step"] for event in epochs],
        "values": [event[case.metric] for event in epochs],
        "train_seconds": sum(event["seconds"] for event in epochs),
        "overrides": [
            word for word in overrides if not word.startswith(("data.train=", "data.valid=", "out=", "seed="))
        ],
    }
    aside = folder.with_suffix(".part")
    aside.write_text(json.dumps(found))
    aside.replace(folder.with_suffix(".json"))


# Many runs.


@dataclass
class Running:
    """A run that has begun."""

    case: Case
    seed: int
    folder: Path
    process: Any
    began: float = field(default_factory=time.monotonic)


def run_all(cases: Sequence[Case], args: argparse.Namespace, folder: Path, until: float) -> Iterator[dict[str, Any]]:
    """Runs all seeds of all cases until a moment; yields each result, or {"case", "seed", "problem"}, when it ends."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    waiting = [(case, seed) for seed in seeds for case in cases]
    running: list[Running] = []
    took: dict[Case, float] = {}
    try:
        while waiting or running:
            while waiting and len(running) < args.at_once:
                case, seed = waiting.pop(0)
                if took.get(case, 0.0) > until - time.monotonic():
                    yield {"case": case.name, "seed": seed, "problem": "not begun: it would not end in time"}
                    continue
                place = folder / f"{case.group}-{cases.index(case)}-{seed}"
                process = context.Process(target=train, args=(case, seed, place, args.override, seed > seeds[0]))
                process.start()
                running.append(Running(case, seed, place, process))
            multiprocessing.connection.wait([run.process.sentinel for run in running], timeout=1.0)
            for run in [run for run in running if not run.process.is_alive()]:
                running.remove(run)
                took[run.case] = max(took.get(run.case, 0.0), time.monotonic() - run.began)
                yield _read(run)
            if time.monotonic() > until:
                yield from ({"case": c.name, "seed": s, "problem": "not begun: no time was left"} for c, s in waiting)
                yield from ({"case": r.case.name, "seed": r.seed, "problem": "cut off by --seconds"} for r in running)
                return
    finally:
        for run in running:
            run.process.kill()
            run.process.join()


def _read(run: Running) -> dict[str, Any]:
    shutil.rmtree(run.folder, ignore_errors=True)  # weights, which nobody reads
    result = run.folder.with_suffix(".json")
    if run.process.exitcode == 0 and result.exists():
        return json.loads(result.read_text()) | {"seconds": time.monotonic() - run.began}
    lines = run.folder.with_suffix(".log").read_text(errors="replace").strip().splitlines()
    return {"case": run.case.name, "seed": run.seed, "problem": lines[-1][:200] if lines else "no output"}


# What they came to.


def summarise(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns for each case the last values of its seeds, their mean and their spread."""
    rows = []
    for group, case in dict.fromkeys((run["group"], run["case"]) for run in runs):
        own = [run for run in runs if (run["group"], run["case"]) == (group, case)]
        last = [run["values"][-1] for run in own]
        best = min if own[0]["metric"] == "valid_loss" else max
        rows.append(
            {
                "group": group,
                "case": case,
                "recipe": own[0]["recipe"],
                "metric": own[0]["metric"],
                "n": len(own),
                "mean": statistics.fmean(last),
                "stdev": statistics.stdev(last) if len(last) > 1 else None,
                "min": min(last),
                "max": max(last),
                "best": statistics.fmean(best(run["values"]) for run in own),
                "seconds": statistics.fmean(run["seconds"] for run in own),
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints a table for each group."""
    for group in dict.fromkeys(row["group"] for row in rows):
        cells = [_cells(row) for row in rows if row["group"] == group]
        print(f"\n{group}, {'validation loss' if group == 'nbody' else 'validation accuracy'} after the last epoch")
        measure.print_table(HEAD, cells)


def _cells(row: dict[str, Any]) -> list[str]:
    def text(value: float | None) -> str:
        if value is None:
            return "-"
        return f"{value:.5f}" if row["metric"] == "valid_loss" else f"{value:.2%}"

    values = [text(row[key]) for key in ("mean", "stdev", "min", "max", "best")]
    return [row["case"], str(row["n"]), *values, f"{row['seconds']:.0f}"]


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Draws a figure of curves for each group: the mean of the seeds, and their range."""
    folder.mkdir(parents=True, exist_ok=True)
    device, written = result["conditions"]["device"], []
    for group in dict.fromkeys(run["group"] for run in result["runs"]):
        runs = [run for run in result["runs"] if run["group"] == group]
        panels = 2 if group in ("nbody", "warmup") else 1
        figure = Figure(figsize=(4.8 * panels + 1.2, 3.8), layout="constrained")
        FigureCanvasAgg(figure)
        axes = [figure.add_subplot(1, panels, place + 1) for place in range(panels)]
        if group == "nbody":
            for axis, by_steps in zip(axes, (False, True), strict=True):
                _draw_curves(axis, runs, by_steps)
                axis.set_yscale("log")
        elif group == "warmup":
            for axis, batch in zip(axes, ("batch 4,096", "batch 8,192"), strict=True):
                _draw_curves(axis, [run for run in runs if run["case"].startswith(batch)], by_steps=False)
        else:
            _draw_curves(axes[0], runs, by_steps=False)
        axes[0].set_ylabel("validation loss" if group == "nbody" else "validation accuracy")
        figure.suptitle(f"{group} on one {device}: mean of the seeds and their range", fontsize=10)
        written.append(folder / f"recipe_results_{group}.png")
        figure.savefig(written[-1], dpi=150)
    return written


def _draw_curves(axis: Axes, runs: Sequence[dict[str, Any]], by_steps: bool) -> None:
    for place, case in enumerate(dict.fromkeys(run["case"] for run in runs)):
        own = [run for run in runs if run["case"] == case]
        curves = list(zip(*(run["values"] for run in own), strict=True))
        x = own[0]["steps"] if by_steps else range(1, len(curves) + 1)
        axis.plot(x, [statistics.fmean(each) for each in curves], color=COLOURS[place], label=f"{case} (n={len(own)})")
        axis.fill_between(
            x, [min(each) for each in curves], [max(each) for each in curves], color=COLOURS[place], alpha=0.2
        )
    axis.set_xlabel("steps" if by_steps else "epochs")
    axis.grid(alpha=0.3)
    if runs:
        axis.legend(fontsize=7)


# The program.


def prepare(args: argparse.Namespace, data: Path, device: str) -> None:
    """Makes the boxes, and has images decoded once before many processes ask for them."""
    if "nbody" in args.only:
        for file, side, seed in (("train.h5", args.box, 1), ("valid.h5", args.box // 2, 2)):
            make_nbody(data / file, box=side, seed=seed, memory_gib=16, device=device)
    if "cifar10" in args.only and not args.tiny:
        from tutti.data.cifar10 import cifar10

        cifar10("train", str(Path(os.environ.get("TUTTI_DATA", "data")) / "cifar10"))  # decodes both splits


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    """Runs everything, writes what has ended after each run, and returns the result."""
    until = time.monotonic() + args.seconds
    os.environ["OMP_NUM_THREADS"] = "1"  # of the runs, which share the cores
    device = gpu_measure.find_gpu()
    facts = measure.conditions(
        device=gpu_measure.device_name(device), at_once=args.at_once, box=args.box, samples=args.samples,
        compiled=args.compile, ranks=1, trials=args.seeds, tiny=args.tiny, mps="CUDA_MPS_PIPE_DIRECTORY" in os.environ,
    )  # fmt: skip
    runs: list[dict[str, Any]] = []
    problems: list[dict[str, Any]] = []
    result = {"program": "recipe_results", "conditions": facts, "rows": [], "runs": runs, "problems": problems}
    with tempfile.TemporaryDirectory(prefix="recipe-results-") as scratch:
        prepare(args, Path(scratch), device.type)
        gpu_measure.memory_gib(device)  # gives the memory of the boxes back
        cases = [shrink(case) if args.tiny else case for case in make_cases(args, Path(scratch))]
        print(f"{len(cases)} cases x {args.seeds} seeds, {args.at_once} at once; prepared", flush=True)
        with contextlib.closing(run_all(cases, args, Path(scratch), until)) as ended:
            for found in ended:
                (problems if "problem" in found else runs).append(found)
                result["rows"] = summarise(runs)
                measure.write_json(args.out, result)
    order = {case.name: place for place, case in enumerate(cases)}
    runs.sort(key=lambda run: (order[run["case"]], run["seed"]))
    result["rows"] = summarise(runs)
    return result


def join(paths: Sequence[Path]) -> dict[str, Any]:
    """Returns the results of several calls as one; each call has its own conditions."""
    parts = [json.loads(path.read_text()) for path in paths]
    runs = [run for part in parts for run in part["runs"]]
    counts = Counter((run["group"], run["case"], run["seed"]) for run in runs)
    if twice := [key for key, count in counts.items() if count > 1]:
        sys.exit(f"--read: {twice[0]} is in several files: expected other seeds in each. Leave one of the files out.")
    return {
        "program": "recipe_results",
        "conditions": parts[0]["conditions"],
        "conditions_of_others": [part["conditions"] for part in parts[1:]],
        "rows": summarise(runs),
        "runs": runs,
        "problems": [problem for part in parts for problem in part["problems"]],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Results of recipes on one GPU, several seeds.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    groups = ["cifar10", "nbody", "warmup"]
    parser.add_argument("--only", nargs="+", choices=groups, default=groups, help="groups of cases")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="of these groups, the cases with these names")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each case")
    parser.add_argument("--first-seed", type=int, default=0, help="the others follow it; for further calls")
    parser.add_argument("--seconds", type=float, default=540, help="time for everything")
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time")
    parser.add_argument("--box", type=int, default=256, help="cells on a side of the training box")
    parser.add_argument(
        "--samples", type=int, default=4096, help="crops in an epoch of nbody; an eighth for validation"
    )
    parser.add_argument("--micro", type=int, default=64, help="crops in a forward pass")
    parser.add_argument("--warmup-steps", type=int, default=8, help="warm-up of nbody at large batches")
    parser.add_argument("--compile", action="store_true", help="compile where the recipes do")
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="more for all runs")
    parser.add_argument("--tiny", action="store_true", help="try the program on a CPU: little data, two seeds")
    parser.add_argument("--read", nargs="+", type=Path, metavar="FILE", help="run nothing: join these results")
    parser.add_argument("--figures", type=Path, help="folder for figures of the curves")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file, after every run")
    args = parser.parse_args()
    if args.tiny:
        args.seeds, args.at_once, args.box = 2, 2, 32
    return args


def main() -> None:
    args = parse()
    try:
        result = join(args.read) if args.read else measure_all(args)
    except TuttiError as error:
        sys.exit(f"error: {error}")
    show(result["rows"])
    for problem in result["problems"]:
        print(f"left out: {problem['case']}, seed {problem['seed']}: {problem['problem']}")
    if args.figures and result["runs"]:
        print("figures: " + ", ".join(str(path) for path in draw(result, args.figures)))
    measure.write_json(args.out, result)
    sys.exit(0 if result["runs"] else 1)


if __name__ == "__main__":
    main()
