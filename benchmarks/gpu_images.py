"""ResNet-50 on one GPU from generated photographs: packed, from the tree of files, and without reading.

Claims, on one H200 with 16 cores: a run from a packed folder reaches at least 95% of the images/s of its steps alone;
it trains on the same samples in the same order as from the tree, to the same accuracy on held-out photographs within
the spread of the seeds; and where too few processes read, `tutti bench` names data loading.

The photographs are 500 x 375 with noise, about 110 KB each, with stripes whose hue and direction depend on the class.
Training photographs are written under several names each, held-out ones under one. `tutti data pack` packs them with
its default options. All files are in the page cache.

- compute only: the training step (`TorchLearner`) of imagenet/resnet50_opt on one batch of random numbers that stays on
  the GPU. Clock: time.perf_counter around steps, with the device synchronised before and after.
- loader alone: batches as the run gets them, on the GPU and normalised, without a step. Clock: time.perf_counter around
  batches, after those that were made ahead.
- whole run: `tutti train imagenet/resnet50_opt` in this process for one epoch, --seeds of them from the packed folder
  and from the tree in turn, with --workers loader processes (default: as many as cores, less one). Images/s are those
  of the last log window of the run, when the batches that were made ahead before the first step are used up. The
  ledgers of both runs of a seed are compared.
- verdict: `tutti bench` of the tree in a process of its own, with so few loader processes that reading takes about 1.5
  times as long as the step, by what was measured before.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gpu_measure
import measure
import torch
from photos import Photo, write_tree

from tutti.config.load import resolve
from tutti.config.plan import make_plan
from tutti.config.run import RunConfig
from tutti.data.loader import Loader
from tutti.data.order import SampleOrder
from tutti.data.packed.encode import PackOptions
from tutti.data.packed.sources import open_source
from tutti.data.packed.write import pack
from tutti.ranks.environments import discover
from tutti.runs.step_parts import StepPart
from tutti.train.build import build_data, choose_prefetch
from tutti.train.run import run_rank
from tutti.train.torch import TorchFramework

REPOSITORY = Path(__file__).resolve().parent.parent
RECIPE = "imagenet/resnet50_opt"
PACKED, TREE = "packed", "tree"
BAR_WHOLE = 0.95
READ_OVER_COMPUTE = 1.5  # of the verdict
DEADLINE_SECONDS = 300  # of tutti bench
WINDOWS = 4  # of an epoch, after each of which the run logs
TINY: dict[str, Any] = {"distinct": 32, "names": 4, "held_out": 16, "classes": 4, "batch": 8, "size": 32}
TINY |= {"workers": 2, "steps": 8, "trials": 2, "seeds": 2, "bench_seconds": 4.0}
TINY_OVERRIDES = ["model.name=resnet18", "precision=fp32", "runtime.threads=1"]


# The photographs.


def make_data(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Writes the tree and packs it; returns the seconds of both, and the bytes of a file."""
    tree, packed = folder / TREE, folder / PACKED
    began = time.perf_counter()
    shown = [Photo(seed, seed % args.classes, args.names) for seed in range(args.distinct)]
    hidden = [Photo(args.distinct + seed, seed % args.classes, 1) for seed in range(args.held_out)]
    cores = len(os.sched_getaffinity(0))
    size = write_tree(tree / "train", shown, cores)
    write_tree(tree / "validation", hidden, cores)
    made = time.perf_counter()
    pack(partial(open_source, str(tree)), str(tree), packed, PackOptions(), cores)
    stored = sum(path.stat().st_size for path in packed.glob("train-*.tar")) / (args.distinct * args.names)
    facts = {"making_seconds": made - began, "packing_seconds": time.perf_counter() - made}
    return facts | {"bytes_per_image": size, "packed_bytes_per_image": stored}


def settings(args: argparse.Namespace, path: Path, workers: int) -> list[str]:
    """The overrides of every run: a short schedule in place of 100 epochs."""
    steps = args.distinct * args.names // args.batch
    return [
        f"data.path={path}", f"data.size={args.size}", f"data.workers={workers}", f"batch.per_rank={args.batch}",
        "epochs=1", "schedule.warmup_epochs=0.2", "schedule.decay=cosine", "schedule.milestones=[]",
        f"log.every_steps={max(1, steps // WINDOWS)}", "log.to=[]", "checkpoint.every_epochs=null", *args.override,
    ]  # fmt: skip


# Speed.


def time_compute(args: argparse.Namespace, device: torch.device) -> list[float]:
    """Images per second of the training step alone, in each trial."""
    generator = torch.Generator(device).manual_seed(0)
    images = torch.rand((args.batch, 3, args.size, args.size), generator=generator, device=device)
    labels = torch.randint(0, args.classes, (args.batch,), generator=generator, device=device)
    laid_out = images.to(memory_format=torch.channels_last)
    overrides = [f"batch.per_rank={args.batch}", *args.override]
    step = gpu_measure.trainer_step(RECIPE, overrides, laid_out, labels, args.classes)
    print(f"compute only: first 5 steps {gpu_measure.warmed(step, device):.1f} s", flush=True)
    return [args.batch / gpu_measure.timed(step, args.steps, device) for _ in range(args.trials)]


def time_loader(config: RunConfig, device: torch.device, batches: int) -> float:
    """Images per second of the batches on the device, without a step."""
    train, _ = build_data(config, discover({}), device)
    repeated = config.model_copy(update={"epochs": 1000})
    plan, prefetch = make_plan(repeated, 1, len(train)), choose_prefetch(config, device)
    loader = Loader(train, plan, SampleOrder(plan, config.seed), 0, device, config.data.workers, prefetch)
    with contextlib.closing(loader.steps(0)) as made:  # pyright: ignore[reportArgumentType]
        for _ in range(2 * config.data.workers + prefetch + 2):
            next(made)
        seconds = gpu_measure.timed(lambda: next(made), batches, device)
    return plan.per_rank_batch / seconds


def train(config: RunConfig, log: Path) -> dict[str, Any]:
    """Trains once; returns the images/s of each log window, the accuracy and the samples of every step."""
    with quiet(log):
        outcome = run_rank(TorchFramework(), config, discover({}))
    events = [json.loads(line) for line in outcome.folder.metrics.read_text().splitlines()]
    return {
        "windows": [event["samples_per_second"] for event in events if event["event"] == "step"],
        "data_share": [event["data_share"] for event in events if event["event"] == "step"],
        "accuracy": outcome.results["valid_accuracy"],
        "ledger": outcome.folder.ledger(0).read_text(),
    }


@contextlib.contextmanager
def quiet(log: Path) -> Iterator[None]:
    """Sends what is printed to a file, and shows its end if something fails."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    try:
        with open(log, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield
    except BaseException:
        os.dup2(saved[1], 2)
        print("\n".join(log.read_text().splitlines()[-30:]), file=sys.stderr)
        raise
    finally:
        for number, kept in zip((1, 2), saved, strict=True):
            os.dup2(kept, number)
            os.close(kept)


# The verdict.


def bench_tree(args: argparse.Namespace, folder: Path, workers: int) -> dict[str, Any]:
    """Runs `tutti bench` of the tree in a process; returns its verdict."""
    out = folder / "bench"
    words = [sys.executable, "-m", "tutti", "bench", RECIPE, "--seconds", f"{args.bench_seconds:g}", f"out={out}"]
    words += settings(args, folder / TREE, workers)
    threads = str(torch.get_num_threads())  # as in this process, in place of one
    seconds = measure.run_command(words, REPOSITORY, DEADLINE_SECONDS, OMP_NUM_THREADS=threads)
    found = json.loads(next(out.rglob("bench.json")).read_text())
    times = {name: statistics.median(each[0]) for name, each in found["measurements"][0]["seconds"].items()}
    return found["verdicts"][0] | {"phase_seconds": times, "workers": workers, "wall_seconds": seconds}


# The whole.


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Makes the data and measures everything; returns the result."""
    facts = measure.conditions(
        workers=args.workers, batch=args.batch, size=args.size, ranks=1, trials=args.trials, seeds=args.seeds
    )
    facts |= make_data(args, folder)
    images = args.distinct * args.names
    print(
        f"{images:,} photographs of {facts['bytes_per_image'] / 1e3:.0f} KB made in {facts['making_seconds']:.1f} s, "
        f"packed in {facts['packing_seconds']:.1f} s ({facts['packed_bytes_per_image'] / 1e3:.0f} KB each)",
        flush=True,
    )
    device = gpu_measure.find_gpu()
    torch._dynamo.config.recompile_limit = 64  # each run compiles a model of its own
    facts["device"] = gpu_measure.device_name(device)
    measure.print_conditions(facts)
    compute = time_compute(args, device)
    gpu_measure.memory_gib(device)
    print(f"compute only: {statistics.median(compute):,.0f} images/s on {facts['device']}", flush=True)
    loader = {}
    for source in (PACKED, TREE):
        config = resolve(RECIPE, settings(args, folder / source, args.workers)).config
        loader[source] = time_loader(config, device, args.steps)
        print(f"loader alone, {source}: {loader[source]:,.0f} images/s, {args.workers} processes", flush=True)
    runs: dict[str, list[dict[str, Any]]] = {PACKED: [], TREE: []}
    for seed, source in measure.alternating((PACKED, TREE), args.seeds):
        more = [f"seed={seed}", f"out={folder / 'runs'}", "log.ledger=true"]
        config = resolve(RECIPE, [*settings(args, folder / source, args.workers), *more]).config
        began = time.perf_counter()
        run = train(config, folder / f"{source}-{seed}.log")
        gpu_measure.memory_gib(device)
        runs[source].append(run)
        windows = ", ".join(f"{rate:,.0f}" for rate in run["windows"])
        print(
            f"seed {seed}, {source}: images/s by window {windows}; waits for data {run['data_share'][-1]:.1%} at the "
            f"end; accuracy {run['accuracy']:.2%} ({time.perf_counter() - began:.0f} s)",
            flush=True,
        )
    slow = statistics.median(compute) / READ_OVER_COMPUTE / (loader[TREE] / args.workers)
    verdict = bench_tree(args, folder, max(1, min(args.workers, round(slow))))
    return conclude(facts, compute, loader, runs, verdict)


def conclude(
    facts: dict[str, Any],
    compute: list[float],
    loader: dict[str, float],
    runs: dict[str, list[dict[str, Any]]],
    verdict: dict[str, Any],
) -> dict[str, Any]:
    """Returns the result with the claims that hold."""
    ledgers = [[run.pop("ledger") for run in runs[source]] for source in (PACKED, TREE)]
    whole = {source: [run["windows"][-1] for run in runs[source]] for source in runs}
    share = {source: statistics.median(rates) / statistics.median(compute) for source, rates in whole.items()}
    accuracy = {source: [run["accuracy"] for run in runs[source]] for source in runs}
    away = statistics.mean(accuracy[PACKED]) - statistics.mean(accuracy[TREE])
    deviation = statistics.mean(statistics.variance(values) for values in accuracy.values()) ** 0.5
    return {
        "program": "gpu_images",
        "conditions": facts,
        "compute_only": measure.spread(compute) | {"trials": compute},
        "loader_alone": loader,
        "whole": {source: measure.spread(rates) | {"runs": runs[source]} for source, rates in whole.items()},
        "whole_over_compute_only": share,
        "accuracy": accuracy,
        "accuracy_difference": {"of_means": away, "deviation_of_a_seed": deviation},
        "verdict": verdict,
        "bars": {
            f"packed: whole run at least {BAR_WHOLE:.0%} of compute only": share[PACKED] >= BAR_WHOLE,
            "same ledger": ledgers[0] == ledgers[1] and all(ledgers[0]),
            "accuracy within two deviations of a seed": abs(away) <= 2 * deviation,
            "verdict: data loading": verdict["bound"] == StepPart.DATA.share_key,
        },
    }


def show(result: dict[str, Any]) -> None:
    """Prints the table and the verdict."""
    compute, whole, loader = result["compute_only"], result["whole"], result["loader_alone"]
    rows = [["compute only", *measure.shown(compute, 0), "", "", ""]]
    for source, found in whole.items():
        values = result["accuracy"][source]
        accuracy = f"{statistics.mean(values):.2%} +- {statistics.stdev(values):.2%}"
        of_compute = f"{result['whole_over_compute_only'][source]:.1%}"
        rows.append([f"whole run, {source}", *measure.shown(found, 0), of_compute, f"{loader[source]:,.0f}", accuracy])
    print()
    measure.print_table(["", "images/s", "min", "max", "of compute", "loader alone", "accuracy"], rows)
    verdict, phases = result["verdict"], result["verdict"]["phase_seconds"]
    read, step, both = (1e3 * phases[name] for name in ("read", "compute", "whole"))
    print(
        f"tree with {verdict['workers']} loader process(es): reading {read:.1f} ms, compute {step:.1f} ms, step "
        f"{both:.1f} ms: {verdict['sentence']}"
    )
    measure.print_verdict(result["bars"])


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        description="ResNet-50 on one GPU from packed photographs and from their tree: whole runs and their steps.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--distinct", type=int, default=2048, help="training photographs that are drawn")
    parser.add_argument("--names", type=int, default=20, help="files of each of them")
    parser.add_argument("--held-out", type=int, default=1024, help="photographs for validation")
    parser.add_argument("--classes", type=int, default=32, help="classes of photographs")
    parser.add_argument("--batch", type=int, default=256, help="images in a step")
    parser.add_argument("--size", type=int, default=224, help="pixels on a side of a crop")
    parser.add_argument("--workers", type=int, default=max(1, cores - 1), help="loader processes of a run")
    parser.add_argument("--steps", type=int, default=30, help="steps, or batches of the loader, in a trial")
    parser.add_argument("--trials", type=int, default=5, help="trials of compute only")
    parser.add_argument("--seeds", type=int, default=3, help="runs from each source, with the seeds 0, 1, ...")
    parser.add_argument("--bench-seconds", type=float, default=15.0, help="how long tutti bench measures")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="few small images, to try the program without a GPU, whose bars it does not reach",
    )
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="more for the recipe")
    parser.add_argument("--keep", type=Path, help="a new or empty folder for images and runs; default: a temporary one")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    args = parser.parse_args()
    if args.tiny:
        torch.set_num_threads(1)
        vars(args).update(TINY | {"override": [*TINY_OVERRIDES, *args.override]})
    if args.seeds < 2:
        parser.error(f"--seeds {args.seeds}: expected 2 or more, so that there is a spread.")
    measure.end_children_with_me()
    with measure.kept_folder(args.keep, "gpu-images-") as folder:
        result = compare(args, folder)
    show(result)
    measure.write_json(args.out, result)


if __name__ == "__main__":
    main()
