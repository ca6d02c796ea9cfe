"""The overhead of measuring the parts of a step: the same training with `log.phases` on and off.

Contenders: two runs of one recipe in the same ranks, which alternate by log windows of --steps steps: on, off, off, on.
Both use tutti's own loop (`Job`), with log windows, monitoring and records; they differ only in `log.phases`.
Clock: time.perf_counter on rank 0, from a barrier before a window to the end of its log line, at which ranks (and a
GPU) synchronise; the first windows of both are not timed. A ratio is that of two consecutive windows.
Threshold: the median ratio of times, on over off, is at most 1.01.

    python benchmarks/phase_timing.py
    python benchmarks/phase_timing.py --ranks 1 --recipe nbody/short_opt --set data.source=device --trials 20
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measure

BAR = 1.01
DEFAULT = ["data={name: synthetic, shape: [1, 28, 28], train: 20000, valid: 100}"]
QUIET = ["log.tensorboard=false", "checkpoint.every_epochs=null", "epochs=100000"]


def steps_of(job: Any) -> Iterator[None]:
    """Yields after each step of the training loop, without validation and checkpoints."""
    learner = job.learner
    job.begin()
    for batch in job.batches():
        loss = learner.forward_backward(batch, job.logs_after(batch.step + 1))
        learner.clip_gradients()
        learner.update_weights(job.lr)
        job.end_step(loss)
        if job.logs_after(job.step):
            job.log()
        yield


def be_rank(args: argparse.Namespace, switch: str, default: list[str]) -> None:
    """Trains both runs, with a key of `log` on and off, window by window; rank 0 writes the time of every window."""
    from tutti.config.load import resolve
    from tutti.ranks.device import choose_device, set_threads
    from tutti.ranks.environments import discover
    from tutti.ranks.group import join
    from tutti.ranks.hang_detection import Monitor
    from tutti.runs.folder import RunFolder
    from tutti.train.build import build_job
    from tutti.train.torch import TorchFramework

    config = resolve(args.recipe, [*(args.set or default), *QUIET, f"log.every_steps={args.steps}"]).config
    placement = discover(os.environ)
    set_threads(config.runtime, placement)
    device = choose_device(config.runtime, placement)
    group = join(placement, config.runtime)
    monitor = Monitor(placement, group.hub, group.hosts, config.runtime)
    runs = {}
    for state in ("on", "off"):
        folder = RunFolder(args.result.parent / state)
        folder.logs.mkdir(parents=True, exist_ok=True)
        log = config.log.model_copy(update={switch: state == "on"})
        job = build_job(TorchFramework(), config.model_copy(update={"log": log}), group, monitor, device, folder, None)
        job.valid_data = None
        runs[state] = steps_of(job)
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    for trial, name in measure.alternating(("on", "off"), args.trials + 2):
        group.barrier("a window")
        began = time.perf_counter()
        for _ in range(args.steps):
            next(runs[name])
        if trial >= 2:
            seconds[name].append(time.perf_counter() - began)
    if group.is_first:
        args.result.write_text(json.dumps({"seconds": seconds, "device": str(device)}))
    monitor.close()
    group.barrier("the end")
    os._exit(0)  # at a normal exit torch could abort: two DDP models outlive the process group


def interval(ratios: list[float]) -> tuple[float, float]:
    """Returns the 95% bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


def compare(program: str, description: str | None, switch: str, default: list[str]) -> None:
    """Measures the time of a run with a key of `log` on over that of the same run with it off."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--recipe", default="mnist")
    parser.add_argument("--set", action="append", help="an override of the recipe; may be repeated")
    parser.add_argument("--steps", type=int, default=50, help="steps of a log window")
    parser.add_argument("--trials", type=int, default=60, help="timed windows of each run")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    parser.add_argument("--deadline", type=float, default=900)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.result:
        be_rank(args, switch, default)
    facts = measure.conditions(ranks=args.ranks, trials=args.trials, recipe=args.recipe, steps=args.steps)
    measure.print_conditions(facts)
    with tempfile.TemporaryDirectory(prefix="on-and-off-") as folder:
        result = Path(folder) / "result.json"
        options = [f"--recipe={args.recipe}", f"--steps={args.steps}", f"--trials={args.trials}", f"--result={result}"]
        options += [f"--set={each}" for each in args.set or ()]
        measure.run_command(measure.torchrun(args.ranks, Path(folder), program, options), Path.cwd(), args.deadline)
        found = json.loads(result.read_text())
    on, off = found["seconds"]["on"], found["seconds"]["off"]
    ratios = [a / b for a, b in zip(on, off, strict=True)]
    ratio, (low, high) = statistics.median(ratios), interval(ratios)
    step = statistics.median(off) / args.steps
    print(f"{args.recipe} on {found['device']}: a step takes {step * 1e3:.3f} ms")
    print(f"time with log.{switch} over time without: {ratio:.4f} (95% interval of the median {low:.4f} to {high:.4f})")
    measure.print_verdict({f"at most {BAR}": ratio <= BAR})
    measure.write_json(args.out, {"program": Path(program).stem, "conditions": facts, "ratio": ratio, "ratios": ratios})


if __name__ == "__main__":
    compare(__file__, __doc__, "phases", DEFAULT)
