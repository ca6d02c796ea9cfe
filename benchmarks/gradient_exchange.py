"""The mean of gradients by a ring all-reduce and through a parameter server: bytes on the busiest link, and seconds.

Claim: with n ranks and gradients of B bytes, the busiest link of the ring carries 2 (n-1)/n B in each direction, and
that of a server n B: within 3%, as the kernel counts the bytes of the links. So the server takes longer from two ranks
on, and its time grows with their number.

- Each rank, and the server, is a host of its own (a network namespace of tests/namespaces.py) with a full-duplex link
  to one switch, limited by `tc` in both directions.
- The ring is `all_reduce` of torch.distributed over Gloo. The server is a process beside the n ranks: it receives the
  gradients of all at once, adds them, and sends the mean back, also by Gloo. Both give the same mean, which is checked.
- The contenders alternate over the trials. The clock is that of the slowest rank, between two barriers. The bytes are
  those of /sys/class/net/eth0/statistics, the larger of both directions on the busiest host.

It needs root and iproute2, and takes about a minute. `--draw FILE` draws the figure of the docs from its result.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import measure
import torch
import torch.distributed as dist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))

HEAD = ("exchange", "ranks", "seconds", "min", "max", "MB on the busiest link", "by the formula", "ratio")
FORMULAS: dict[str, Callable[[int], float]] = {"ring": lambda n: 2 * (n - 1) / n, "server": lambda n: n}
COLOURS = {"ring": "#0072b2", "server": "#d55e00"}
LIMIT_SECONDS = 300
TOLERANCE = 0.03


def exchange(name: str, gradients: torch.Tensor, ranks: int, group: Any) -> torch.Tensor | None:
    """Returns the mean of the gradients of all ranks; the server, whose number is `ranks`, has none."""
    rank = dist.get_rank()
    if name == "ring":
        if rank == ranks:
            return None
        mean = gradients.clone()
        dist.all_reduce(mean, group=group)
        return mean / ranks
    if rank < ranks:
        mean = torch.empty_like(gradients)
        dist.send(gradients, ranks)
        dist.recv(mean, ranks)
        return mean
    received = [torch.empty_like(gradients) for _ in range(ranks)]
    for waiting in [dist.irecv(part, source) for source, part in enumerate(received)]:
        waiting.wait()
    mean = torch.stack(received).mean(0)
    for waiting in [dist.isend(mean, target) for target in range(ranks)]:
        waiting.wait()
    return None


def run_process(args: argparse.Namespace) -> None:
    """What a rank or the server does: all trials of both contenders; rank 0 prints the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), args.ranks[0]
    group = dist.new_group(list(range(ranks)))
    gradients = torch.rand(args.bytes // 4, generator=torch.Generator().manual_seed(rank))
    expected = sum(torch.rand(args.bytes // 4, generator=torch.Generator().manual_seed(each)) for each in range(ranks))
    found: list[dict[str, Any]] = []
    for trial, name in [(-1, name) for name in FORMULAS] + list(measure.alternating(list(FORMULAS), args.trials)):
        dist.barrier()
        before, began = read_link(), time.perf_counter()
        mean = exchange(name, gradients, ranks, group)
        seconds = time.perf_counter() - began
        moved = max(after - start for after, start in zip(read_link(), before, strict=True))
        if mean is not None and not torch.allclose(mean, expected / ranks):
            raise SystemExit(f"rank {rank}: the mean by the {name} is wrong.")
        most = torch.tensor([seconds, moved], dtype=torch.float64)
        dist.barrier()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if trial >= 0:  # the first exchange opens connections
            found.append({"exchange": name, "ranks": ranks, "seconds": most[0].item(), "bytes": most[1].item()})
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def read_link() -> tuple[int, int]:
    """Returns the bytes that this host has sent and received."""
    folder = Path("/sys/class/net/eth0/statistics")
    return int((folder / "tx_bytes").read_text()), int((folder / "rx_bytes").read_text())


def measure_ranks(ranks: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Starts the ranks and the server on hosts of their own, and returns the trials."""
    from namespaces import hosts

    with hosts(ranks + 1, rate=args.rate) as made:
        processes: list[subprocess.Popen[str]] = []
        for number, host in enumerate(made):
            words = [sys.executable, __file__, "--process", f"--bytes={args.bytes}", f"--trials={args.trials}"]
            env = measure.environment(
                RANK=str(number), WORLD_SIZE=str(ranks + 1), MASTER_ADDR=made.address("h1"), MASTER_PORT="29500"
            )
            # A namespace has /sys of its own only if it is mounted there.
            command = ["sh", "-c", 'mount -t sysfs sysfs /sys && exec "$@"', "sh", *words, "--ranks", str(ranks)]
            processes.append(made.start(host, command, env | {"GLOO_SOCKET_IFNAME": "eth0"}))
        try:
            outputs = [process.communicate(timeout=LIMIT_SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
    for process, (_, problem) in zip(processes, outputs, strict=True):
        if process.returncode:
            sys.exit(f"{problem}\nerror: a process of {ranks} ranks ended with exit code {process.returncode}.")
    return json.loads(outputs[0][0])


def summarise(trials: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """Returns a row for each exchange and number of ranks."""
    rows = []
    for name, ranks in sorted({(trial["exchange"], trial["ranks"]) for trial in trials}):
        own = [trial for trial in trials if (trial["exchange"], trial["ranks"]) == (name, ranks)]
        moved = statistics.median(trial["bytes"] for trial in own)
        formula = FORMULAS[name](ranks) * size
        seconds = measure.spread([trial["seconds"] for trial in own])
        rows.append({"exchange": name, "ranks": ranks, "seconds": seconds, "bytes": moved, "formula": formula})
    return rows


def draw(result: dict[str, Any], path: Path) -> None:
    """Plots bytes on the busiest link and seconds against the number of ranks, with the formulas as lines."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    size, rate = result["conditions"]["bytes"], result["conditions"]["rate"]
    bytes_per_second = float(rate.removesuffix("mbit")) * 1e6 / 8
    most = max(row["ranks"] for row in result["rows"])
    for name, formula in FORMULAS.items():
        rows = [row for row in result["rows"] if row["exchange"] == name]
        counts = [row["ranks"] for row in rows]
        title = "ring all-reduce" if name == "ring" else "parameter server"
        law = [formula(n) * size for n in range(2, most + 1)]
        rounds = 2 if name == "server" else 1  # the server sends when it has received everything
        left.plot(range(2, most + 1), [each / 1e6 for each in law], color=COLOURS[name], alpha=0.5)
        left.plot(counts, [row["bytes"] / 1e6 for row in rows], "o", color=COLOURS[name], label=title)
        right.plot(
            range(2, most + 1), [rounds * each / bytes_per_second for each in law], color=COLOURS[name], alpha=0.5
        )
        right.plot(counts, [row["seconds"]["median"] for row in rows], "o", color=COLOURS[name], label=title)
    left.set_ylabel("MB on the busiest link, one direction")
    right.set_ylabel("seconds")
    for axis in (left, right):
        axis.set_xlabel("ranks")
        axis.set_ylim(0)
        axis.grid(alpha=0.3)
    left.legend()
    figure.suptitle(
        f"{size / 1e6:.0f} MB of gradients over links of {rate[:-4]} Mbit/s: measured (points), by formula (lines)"
    )
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Ring all-reduce and parameter server over limited links.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="numbers of ranks")
    parser.add_argument("--bytes", type=int, default=8_000_000, help="bytes of the gradients of a rank")
    parser.add_argument("--rate", default="400mbit", help="rate of all links, in mbit")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--process", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--draw", type=Path, help="draw the figure to this file")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    args = parser.parse_args()
    if args.process:
        run_process(args)
        return

    from namespaces import unavailable

    if why := unavailable():
        sys.exit(f"no hosts are available here: {why}")
    facts = measure.conditions(ranks=max(args.ranks), trials=args.trials, rate=args.rate, bytes=args.bytes)
    measure.print_conditions(facts)
    trials = [trial for ranks in args.ranks for trial in measure_ranks(ranks, args)]
    rows = summarise(trials, args.bytes)
    cells = [
        [row["exchange"], str(row["ranks"]), *measure.shown(row["seconds"], 2), f"{row['bytes'] / 1e6:.2f}",
         f"{row['formula'] / 1e6:.2f}", f"{row['bytes'] / row['formula']:.3f}"]
        for row in rows
    ]  # fmt: skip
    measure.print_table(HEAD, cells)
    slower = {
        ranks: measure.paired(*(_seconds(trials, name, ranks) for name in ("server", "ring"))) for ranks in args.ranks
    }
    for ranks, ratio in slower.items():
        print(f"{ranks} ranks: server / ring = {' '.join(measure.shown(ratio, 2))} of the time (median, min, max)")
    bars = {
        f"bytes by the formulas within {TOLERANCE:.0%}": all(
            abs(row["bytes"] / row["formula"] - 1) <= TOLERANCE for row in rows
        ),
        "the server takes longer": all(ratio["median"] > 1 for ratio in slower.values()),
    }
    measure.print_verdict(bars)
    result = {"program": "gradient_exchange", "conditions": facts, "rows": rows, "trials": trials, "bars": bars}
    if args.draw:
        draw(result, args.draw)
    measure.write_json(args.out, result)


def _seconds(trials: list[dict[str, Any]], name: str, ranks: int) -> list[float]:
    return [trial["seconds"] for trial in trials if (trial["exchange"], trial["ranks"]) == (name, ranks)]


if __name__ == "__main__":
    main()
