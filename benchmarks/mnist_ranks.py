"""MNIST on more and more CPU ranks of one machine: the time of an epoch, as in the tutorial's figure of time and ranks.

Claim: none is tested but that the training is the same; the program writes the figure and the numbers that the docs
state, each with n and its range.

- strong: `tutti train mnist` with a global batch of --batch samples in forward passes of --micro. Every number of ranks
  makes the same steps: the samples of each step are compared (ledgers), and the losses of the first 10 steps, which
  differ only by the order in which numbers are added. Training amplifies such differences, here to some 1e-2 of a loss
  after an epoch; on one number of ranks all runs are the same.
- per rank: the recipe as it is, 64 samples for each rank, as the tutorial trains on Theta. The global batch, and with
  it the learning rate, grows with the ranks; an epoch has fewer steps. It is another training on each number of ranks.

A rank has one thread. Ranks meet over Gloo on the loopback interface; tutti averages gradients as small as these in
shared memory (`--override ddp.direct=false` sends them through Gloo). More ranks than cores are left out, unless
--oversubscribe is given.

The ranks of a run are processes, forked from one that has imported torch. The first epoch of a run is a warm-up; those
after it are timed, more of them on more ranks. Clock: `seconds` of an epoch in the run's metrics.jsonl, which are those
of training, without validation. Within a round every number of ranks runs once, in random order; speed-ups are ratios
within a round, and their median and range are reported. All rounds of `strong` come first. A run that would not end
within --seconds, as an earlier one shows, is not begun, and this is said.

    TUTTI_DATA=data python benchmarks/mnist_ranks.py --out mnist_ranks.json --figures docs/figures
"""

import argparse
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from tutti.config.load import resolve
from tutti.data.mnist import FILES, find_file
from tutti.errors import DataError
from tutti.launch.hosts import LOOPBACK, reserve_port
from tutti.ranks.environments import discover
from tutti.ranks.secret import make_secret
from tutti.train.run import run_rank
from tutti.train.torch import TorchFramework

PRELOADED = ["__main__", "tutti.train.torch", "tutti.train.run", "tutti.data.mnist", "tutti.models.small"]
MODES = ("strong", "per rank")
PER_RANK = 64  # samples of a step on each rank, in the recipe
MOST_TIMED = 4  # epochs of a run
FIRST_STEPS, TOLERANCE = 10, 1e-5  # of whose losses the relative difference is tested
PLAIN = [
    "checkpoint.every_epochs=null", "log.to=[]", "log.ledger=true", f"log.every_steps={FIRST_STEPS}",
    "runtime.threads=1", "runtime.device=cpu",
]  # fmt: skip
TINY = ["data.name=synthetic", "data.shape=[1,28,28]", "data.train=2048", "data.valid=64", "batch.eval=64"]
HEAD = ("", "ranks", "n", "epoch, s", "min", "max", "speed-up", "min", "max", "efficiency", "communication")
COLOURS = {"strong": "#0072b2", "per rank": "#d55e00"}


@dataclass(frozen=True)
class Run:
    """One training on a number of ranks."""

    mode: str
    ranks: int
    round: int

    @property
    def timed_epochs(self) -> int:
        """More of them on more ranks, which take less time for each."""
        return max(1, min(MOST_TIMED, self.ranks // 2))


def plan(args: argparse.Namespace) -> list[Run]:
    """Returns the runs in their order."""
    order, found = random.Random(args.seed), []
    for mode in args.modes:
        for number in range(args.repeats):
            one = [Run(mode, ranks, number) for ranks in args.ranks]
            order.shuffle(one)
            found += one
    return found


def overrides(run: Run, args: argparse.Namespace) -> list[str]:
    """Returns what differs from the recipe."""
    batch = [f"batch.global={args.batch}", f"batch.micro={args.micro}"] if run.mode == "strong" else []
    return [f"epochs={1 + run.timed_epochs}", *batch, *PLAIN, *(TINY if args.tiny else []), *args.override]


# Runs.


def be_rank(own: dict[str, str], words: list[str], log: Path) -> None:
    """Trains as one rank, in a process of its own."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(own)
    run_rank(TorchFramework(), resolve("mnist", words).config, discover(os.environ))


def start_ranks(run: Run, words: list[str], out: Path) -> list[Any]:
    """Starts the ranks of a run, forked from a process that has imported torch, as those of `tutti train` are."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    secret = make_secret().environment()
    with reserve_port() as reserved:
        shared = {"WORLD_SIZE": run.ranks, "LOCAL_WORLD_SIZE": run.ranks, "GROUP_RANK": 0}
        shared |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": reserved.getsockname()[1]}
        processes = []
        for rank in range(run.ranks):
            own = {name: str(value) for name, value in {"RANK": rank, "LOCAL_RANK": rank, **shared}.items()}
            arguments = (own | secret, words, out.with_name(f"{out.name}-{rank}.log"))
            processes.append(context.Process(target=be_rank, args=arguments))
            processes[-1].start()
    return processes


def train(run: Run, args: argparse.Namespace, scratch: Path, until: float) -> dict[str, Any]:
    """Trains once; returns its epochs, or {"problem"}."""
    out = scratch / f"{run.mode.replace(' ', '-')}-{run.round}-{run.ranks}"
    began, processes = time.monotonic(), list[Any]()
    try:
        processes += start_ranks(run, [*overrides(run, args), f"out={out}"], out)
        waiting = list(processes)
        while waiting and time.monotonic() < until:
            multiprocessing.connection.wait([each.sentinel for each in waiting], timeout=1.0)
            waiting = [each for each in waiting if each.is_alive()]
            if any(each.exitcode for each in processes):
                break
        codes = [each.exitcode for each in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    if any(codes):
        rank = next(place for place, code in enumerate(codes) if code)
        lines = out.with_name(f"{out.name}-{rank}.log").read_text(errors="replace").strip().splitlines()
        return vars(run) | {"problem": f"rank {rank}: {lines[-1][:200] if lines else f'exit code {codes[rank]}'}"}
    if None in codes:
        return vars(run) | {"problem": "cut off by --seconds"}
    lines = next(out.glob("mnist/*/metrics.jsonl")).read_text().splitlines()
    events = [json.loads(line) for line in lines]
    epochs = [event for event in events if event["event"] == "epoch"]
    steps = [event for event in events if event["event"] == "step"]
    timed = [event for event in steps if event["epoch"] > 1]
    return vars(run) | {
        "epoch_seconds": [event["seconds"] for event in epochs[1:]],
        "first_epoch_seconds": epochs[0]["seconds"],
        "train_loss": [event["train_loss"] for event in epochs],
        "valid_loss": [event["valid_loss"] for event in epochs],
        "valid_accuracy": [event["valid_accuracy"] for event in epochs],
        "first_losses": {event["step"]: event["loss"] for event in steps if event["step"] <= FIRST_STEPS},
        "samples": samples_digest(out),
        "communication": sum(event["communication_seconds"] for event in timed) / sum(e["seconds"] for e in timed),
        "steps": epochs[0]["step"],
        "wall_seconds": time.monotonic() - began,
    }


def samples_digest(out: Path) -> list[str]:
    """Returns a digest of the samples of the steps of each epoch, of all ranks together."""
    samples: dict[int, dict[int, list[int]]] = {}
    for ledger in out.glob("mnist/*/logs/ledger-*.jsonl"):
        for line in ledger.read_text().splitlines():
            event = json.loads(line)
            samples.setdefault(event["epoch"], {}).setdefault(event["step"], []).extend(event["ids"])
    steps = [[(step, sorted(ids)) for step, ids in sorted(samples[epoch].items())] for epoch in sorted(samples)]
    return [hashlib.sha256(str(each).encode()).hexdigest()[:16] for each in steps]


def run_all(runs: Sequence[Run], args: argparse.Namespace, scratch: Path, until: float) -> Iterator[dict[str, Any]]:
    """Yields each result when its run has ended; runs that would not end in time are not begun."""
    took: dict[int, float] = {}
    for run in runs:
        if took.get(run.ranks, max(took.values(), default=0.0)) > until - time.monotonic():
            yield vars(run) | {"problem": "not begun: it would not end within --seconds"}
            continue
        began = time.monotonic()
        yield train(run, args, scratch, until)
        took[run.ranks] = max(took.get(run.ranks, 0.0), time.monotonic() - began)


# What they came to.


def summarise(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each mode and number of ranks."""
    rows = []
    for mode in dict.fromkeys(run["mode"] for run in runs):
        times = {
            ranks: {run["round"]: statistics.median(run["epoch_seconds"]) for run in _of(runs, mode, ranks)}
            for ranks in sorted({run["ranks"] for run in runs if run["mode"] == mode})
        }
        fewest = min(times)
        for ranks, by_round in times.items():
            rounds = [number for number in by_round if number in times[fewest]]
            row = {
                "mode": mode,
                "ranks": ranks,
                "n": len(by_round),
                "epoch_seconds": measure.spread([*by_round.values()]),
            }
            row["communication"] = statistics.median(run["communication"] for run in _of(runs, mode, ranks))
            if rounds:
                faster = measure.paired([times[fewest][each] for each in rounds], [by_round[each] for each in rounds])
                row |= {"speed_up": faster, "efficiency": faster["median"] * fewest / ranks, "over": fewest}
            rows.append(row)
    return rows


def _of(runs: Sequence[dict[str, Any]], mode: str, ranks: int) -> list[dict[str, Any]]:
    return [run for run in runs if (run["mode"], run["ranks"]) == (mode, ranks)]


def compare_training(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns whether all runs of `strong` had the same samples, and the relative differences of their losses."""
    strong = [run for run in runs if run["mode"] == "strong"]
    pairs = [(run, strong[0]) for run in strong[1:]]
    first = [(run["first_losses"], other["first_losses"]) for run, other in pairs]
    return {
        "runs": len(strong),
        "same_samples": all(all(map(str.__eq__, run["samples"], other["samples"])) for run, other in pairs),
        "first_steps": max((_apart(ours[step], theirs[step]) for ours, theirs in first for step in ours), default=0.0),
        "epochs": max(
            (
                _apart(ours, theirs)
                for run, other in pairs
                for key in ("train_loss", "valid_loss")
                for ours, theirs in zip(run[key], other[key], strict=False)
            ),
            default=0.0,
        ),
    }


def _apart(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / abs(theirs)


def show(result: dict[str, Any]) -> None:
    """Prints the table, what was left out, and whether the training was the same."""
    cells = []
    for row in result["rows"]:
        faster = measure.shown(row["speed_up"], 2) if "speed_up" in row else ["-"] * 3
        share = f"{row['efficiency']:.0%}" if "speed_up" in row else "-"
        seconds = measure.shown(row["epoch_seconds"], 2)
        communication = f"{row['communication']:.1%}"
        cells.append([row["mode"], str(row["ranks"]), str(row["n"]), *seconds, *faster, share, communication])
    print()
    measure.print_table(HEAD, cells)
    for run in result["problems"]:
        print(f"left out: {run['mode']}, {run['ranks']} rank(s), round {run['round'] + 1}: {run['problem']}")
    same = result["training"]
    print(
        f"strong: losses differ by at most {same['first_steps']:.1e} in the first {FIRST_STEPS} steps, "
        f"{same['epochs']:.1e} in epochs (relative)"
    )
    measure.print_verdict(result["bars"])


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Draws time and speed-up against ranks, and writes the numbers beside the figure."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = result["conditions"]
    figure = Figure(figsize=(9.2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    time_axis, speed_axis = (figure.add_subplot(1, 2, place) for place in (1, 2))
    ticks = sorted({row["ranks"] for row in result["rows"]})
    labels = {"strong": f"global batch {facts['batch']:,}, the same training", "per rank": f"{PER_RANK} samples a rank"}
    for mode in dict.fromkeys(row["mode"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["mode"] == mode]
        ranks = [row["ranks"] for row in rows]
        seconds = [row["epoch_seconds"]["median"] for row in rows]
        time_axis.plot(ranks, seconds, "-o", color=COLOURS[mode], label=labels[mode])
        for run in result["runs"]:
            if run["mode"] == mode:
                every = run["epoch_seconds"]
                time_axis.plot([run["ranks"]] * len(every), every, ".", color=COLOURS[mode], alpha=0.3, ms=4)
        time_axis.plot(ranks, [seconds[0] * ranks[0] / each for each in ranks], "--", color=COLOURS[mode], alpha=0.6)
        known = [row for row in rows if "speed_up" in row]
        medians = [row["speed_up"]["median"] for row in known]
        below = [row["speed_up"]["median"] - row["speed_up"]["min"] for row in known]
        above = [row["speed_up"]["max"] - row["speed_up"]["median"] for row in known]
        speed_axis.errorbar(
            [row["ranks"] for row in known], medians, [below, above], fmt="-o", capsize=3, color=COLOURS[mode]
        )
        if mode == "strong":
            for row, value in zip(known[1:], medians[1:], strict=True):
                speed_axis.annotate(
                    f"{row['efficiency']:.0%}", (row["ranks"], value), (6, -10), textcoords="offset points", fontsize=8
                )
    speed_axis.plot(ticks, [each / ticks[0] for each in ticks], "--", color="#666666", label="ideal")
    time_axis.plot([], [], "--", color="#666666", label="ideal")
    time_axis.set_ylabel("seconds of an epoch of training")
    speed_axis.set_ylabel(f"speed-up over {ticks[0]} rank(s), and efficiency")
    for axis in (time_axis, speed_axis):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xticks(ticks, [str(each) for each in ticks])
        axis.yaxis.set_major_locator(LogLocator(2, (1, 1.5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_xlabel("ranks")
        axis.margins(x=0.12)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    machine = facts["hardware"]
    figure.suptitle(
        f"MNIST on CPU ranks of one machine, one thread a rank: {machine['processor']}, {machine['cores']} cores, "
        f"load before {facts['load_before'][0]}, n={max(row['n'] for row in result['rows'])}",
        fontsize=9,
    )
    paths = [folder / "mnist_ranks.png", folder / "mnist_ranks.json"]
    figure.savefig(paths[0], dpi=150)
    measure.write_json(paths[1], result)
    return paths


# The program.


def conclude(facts: dict[str, Any], runs: list[dict[str, Any]], problems: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the result of the runs that have ended."""
    training = compare_training(runs)
    same = {
        "the same samples in every step": training["same_samples"],
        f"the first {FIRST_STEPS} losses within {TOLERANCE:g}": training["first_steps"] <= TOLERANCE,
    }
    return {
        "program": "mnist_ranks",
        "conditions": facts,
        "rows": summarise(runs),
        "training": training,
        "bars": same if training["runs"] > 1 else {},
        "runs": runs,
        "problems": problems,
    }


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    """Runs everything, writes what has ended after each run, and returns the result."""
    until = time.monotonic() + args.seconds
    facts = measure.conditions(
        data="synthetic" if args.tiny else "MNIST", batch=args.batch, micro=args.micro, per_rank=PER_RANK,
        ranks=args.ranks, trials=args.repeats, overrides=args.override, clock="seconds of epochs in metrics.jsonl",
    )  # fmt: skip
    runs: list[dict[str, Any]] = []
    problems: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mnist-ranks-") as scratch:
        for found in run_all(plan(args), args, Path(scratch), until):
            (problems if "problem" in found else runs).append(found)
            what = found.get("problem") or ", ".join(f"{each:.2f}" for each in found["epoch_seconds"]) + " s an epoch"
            print(f"{found['mode']:<8} {found['ranks']:>2} rank(s), round {found['round'] + 1}: {what}", flush=True)
            measure.write_json(args.out, conclude(facts, runs, problems))
    return conclude(facts, runs, problems)


def choose_ranks(asked: Sequence[int], cores: int, oversubscribe: bool) -> list[int]:
    """Returns the numbers of ranks that have a core each, and says which have not."""
    found = sorted(set(asked))
    if found[0] < 1:
        sys.exit(f"--ranks {found[0]}: expected 1 or more.")
    if oversubscribe:
        return found
    if more := [each for each in found if each > cores]:
        print(f"left out: {', '.join(map(str, more))} ranks on {cores} core(s). --oversubscribe measures them too.")
    if not (kept := [each for each in found if each <= cores]):
        sys.exit(f"--ranks {' '.join(map(str, asked))}: expected a number of at most {cores}, or --oversubscribe.")
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The time of an epoch of MNIST against the number of CPU ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4, 8, 16], help="numbers of ranks")
    parser.add_argument("--oversubscribe", action="store_true", help="also more ranks than cores")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="what is kept constant")
    parser.add_argument("--batch", type=int, default=1024, help="global batch of strong scaling")
    parser.add_argument("--micro", type=int, default=PER_RANK, help="samples of its forward passes")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, in each of which all numbers of ranks run")
    parser.add_argument("--seconds", type=float, default=150, help="time for everything")
    parser.add_argument("--seed", type=int, default=0, help="of the order of runs")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("TUTTI_DATA", "data")), help="holds mnist/")
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="more for all runs")
    parser.add_argument("--tiny", action="store_true", help="try the program: a few generated images, two rounds")
    parser.add_argument("--read", type=Path, metavar="FILE", help="run nothing: read this result")
    parser.add_argument("--figures", type=Path, help="folder for mnist_ranks.png and mnist_ranks.json")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file, after every run")
    args = parser.parse_args()
    if args.read:
        result = json.loads(args.read.read_text())
    else:
        if args.tiny:
            args.batch, args.micro, args.repeats = 128, 8, 2
        else:
            try:
                find_file(args.data / "mnist", FILES["train"][0])
            except DataError as error:
                sys.exit(f"error: {error}")
        args.ranks = choose_ranks(args.ranks, len(os.sched_getaffinity(0)), args.oversubscribe)
        if args.batch % (args.micro * args.ranks[-1]):
            parser.error(f"--batch {args.batch}: expected a multiple of {args.micro} samples x {args.ranks[-1]} ranks.")
        os.environ.update(measure.environment(TUTTI_DATA=str(args.data.resolve())))  # of the ranks
        measure.end_children_with_me()
        result = measure_all(args)
    if not result["runs"]:
        sys.exit(f"error: no run has ended: {result['problems'][0]['problem']}")
    show(result)
    if args.figures:
        print("figures: " + ", ".join(str(path) for path in draw(result, args.figures)))
    measure.write_json(args.out, result)


if __name__ == "__main__":
    main()
