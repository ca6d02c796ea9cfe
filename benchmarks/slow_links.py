"""A scaling study over slow links: the loss of efficiency, its cause, and the effect of a larger batch.

Claim: on 1, 2 and 4 nodes with links of 200 Mbit/s a model of 5 million parameters loses efficiency to communication,
and the report states this. The exposed communication is within 15% of one all-reduce of the gradients over the measured
links. Twice the batch of a rank raises efficiency, and the report states this too.

- The nodes belong to a real Slurm on this machine (tests/slurm.py), each with its own network, host name and processes.
  All links are limited by `tc`. The nodes share the cores of one machine and would slow each other down. Most of their
  compute time is therefore a wait of a fixed time for each sample, as for an accelerator (slow_links_model.py). That
  time is chosen, and it determines the level of efficiency; the communication of gradients and its time are real.
- In one allocation `tutti bench collectives` measures all-reduces on 2 and 4 nodes; then `tutti scale` runs the recipe
  slow_links.yaml with a batch of a rank, and with twice that batch.
- `tutti report --collectives --compare` writes the page. All gradients are in one bucket, so that communication does
  not overlap with compute; without `ddp.bucket_mb` a part would be sent while the first layers still compute.

It needs root and Slurm (apt-get install slurm-wlm munge iproute2), and takes about 12 minutes.
"""

import argparse
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import measure

from tutti.report.study.write import read_study
from tutti.study.analysis import Analysis
from tutti.study.efficiency import Estimate
from tutti.study.links import NEAR

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))

if TYPE_CHECKING:
    from slurm import Cluster

RECIPE = Path(__file__).with_suffix(".yaml")
MODEL = Path(__file__).with_name("slow_links_model.py")
TUTTI = [sys.executable, "-m", "tutti"]
SIZES = "256KB,1MB,4MB,16MB,32MB"
HEAD = ("per-rank batch", "nodes", "efficiency", "interval", "step", "exposed", "interval", "all-reduce", "ratio")
LIMIT_SECONDS = 2400


@dataclass(frozen=True)
class Found:
    """The paths of the three results, relative to their folder."""

    collectives: Path
    studies: tuple[Path, Path]


def main() -> None:
    """Runs everything; the exit code is 0 if the claim holds."""
    import slurm

    options = _parse()
    if why := slurm.unavailable():
        sys.exit(f"no nodes are available here: {why}")
    facts = measure.conditions(ranks=4, trials=options.repeat, rate=options.rate)
    measure.print_conditions(facts)
    with measure.kept_folder(options.keep, "tutti-slow-links-") as folder:
        for path in (RECIPE, MODEL):
            shutil.copy(path, folder)
        with slurm.running(options.rate) as cluster:
            run_in_allocation(cluster, _commands(options), folder)
        found = _find(folder)
        conclusions = write_reports(folder, found)
        once, twice = (read_study(folder / study, folder / found.collectives) for study in found.studies)
    print("\n".join(["", *conclusions, ""]))
    rows = [row for analysis in (once, twice) for row in _rows(analysis)]
    measure.print_table(HEAD, [_shown(row) for row in rows])
    bars = _bars(once, twice, conclusions)
    measure.print_verdict(bars)
    measure.write_json(options.out, {"conditions": facts, "points": rows, "conclusions": conclusions, "bars": bars})
    sys.exit(0 if all(bars.values()) else 1)


def run_in_allocation(cluster: "Cluster", commands: Sequence[Sequence[str]], folder: Path) -> None:
    """Runs commands inside one allocation of all nodes and shows their output."""
    import slurm

    script = folder / "commands.sh"
    script.write_text("set -e\nexec 2>&1\n" + "".join(f"{' '.join(words)}\n" for words in commands))
    words = ["salloc", "--quiet", "--nodes=4", "--ntasks-per-node=1", "bash", str(script)]
    environment = slurm.environment(**cluster.settings)
    with cluster.hosts.start(slurm.LOGIN, words, environment, folder) as process:
        timer = threading.Timer(LIMIT_SECONDS, process.kill)
        timer.start()
        try:
            for line in process.stdout or ():
                print(line, end="", flush=True)
        except BaseException:
            process.kill()
            raise
        finally:
            timer.cancel()
    if process.returncode:
        sys.exit(f"a command ended with exit code {process.returncode}: see above")


def write_reports(folder: Path, found: Found) -> list[str]:
    """Writes the page of each study and one that compares them; returns the conclusions of the latter."""
    once, twice = map(str, found.studies)
    printed = ""
    for words in ([once], [twice], [once, "--compare", twice, "--out", "report.html"]):
        line = [*TUTTI, "report", *words, "--collectives", str(found.collectives)]
        done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        printed = done.stdout
    return [line for line in printed.splitlines() if line.endswith(".")]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rate", default="200mbit", help="rate of every link, in the notation of tc")
    parser.add_argument(
        "--batch", type=int, default=64, help="per-rank batch of the first study, half that of the second"
    )
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a run")
    parser.add_argument("--repeat", type=int, default=3, help="runs on each number of nodes")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the studies and the report in this folder")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table and its conditions to this JSON file")
    return parser.parse_args()


def _commands(options: argparse.Namespace) -> list[list[str]]:
    bench = ["bench", "collectives", "--operations", "all_reduce", "--sizes", SIZES, "--trials", "3"]
    study = ["scale", RECIPE.name, "--ranks", "1,2,4", "--mode", "weak", "--warmup", "1"]
    study += ["--steps", str(options.steps), "--repeat", str(options.repeat)]
    return [
        ["srun", *TUTTI, *bench, "--seconds", "60", "out=links"],
        [*TUTTI, *study, f"batch.per_rank={options.batch}", "--out", "once"],
        [*TUTTI, *study, f"batch.per_rank={2 * options.batch}", "--out", "twice"],
    ]


def _find(folder: Path) -> Found:
    [links] = folder.glob("links/**/collectives.json")
    [once] = folder.glob("once/**/study.json")
    [twice] = folder.glob("twice/**/study.json")
    places = [path.parent.relative_to(folder) for path in (links, once, twice)]
    return Found(places[0], (places[1], places[2]))


def _rows(analysis: Analysis) -> list[dict[str, Any]]:
    """Returns the results of a study by number of nodes."""
    assert analysis.scaling is not None and analysis.links is not None
    rows = []
    for point in analysis.scaling.points:
        exchange = analysis.links.at(point.ranks)
        row = {"per_rank_batch": point.per_rank_batch, "nodes": point.ranks, "step_seconds": point.step_seconds}
        row |= {"efficiency": _ends(point.efficiency)}
        if exchange:
            row |= {"exposed_seconds": _ends(exchange.exposed), "all_reduce_seconds": exchange.seconds}
            row |= {"gradient_bytes": exchange.gradient_bytes, "ratio": exchange.ratio.value}
        rows.append(row)
    return rows


def _ends(found: Estimate) -> list[float]:
    return [found.value, found.low, found.high]


def _shown(row: dict[str, Any]) -> list[str]:
    value, low, high = (100 * each for each in row["efficiency"])
    cells = [f"{row['per_rank_batch']:,}", str(row["nodes"]), f"{value:.1f} %", f"{low:.1f} to {high:.1f} %"]
    cells.append(f"{row['step_seconds']:.2f} s")
    if "ratio" not in row:
        return [*cells, "", "", "", ""]
    value, low, high = row["exposed_seconds"]
    cells += [f"{value:.3f} s", f"{low:.3f} to {high:.3f} s", f"{row['all_reduce_seconds']:.3f} s"]
    return [*cells, f"{row['ratio']:.3f}"]


def _bars(once: Analysis, twice: Analysis, conclusions: Sequence[str]) -> dict[str, bool]:
    """Returns the parts of the claim and whether they hold."""
    assert once.scaling and twice.scaling and once.links and twice.links
    low, high = (each.points[-1].efficiency for each in (once.scaling, twice.scaling))
    is_named = any(each.endswith("of that is communication.") for each in conclusions)
    is_told = any("efficiency at 4 ranks rises" in each for each in conclusions)
    ratios = [each.ratio.value for links in (once.links, twice.links) for each in links.comparisons]
    explained = len(ratios) == 4 and all(abs(ratio - 1) <= NEAR for ratio in ratios)
    return {
        "efficiency decreases, and the report names communication": low.is_below(1.0) and is_named,
        f"exposed within {NEAR:.0%} of an all-reduce": explained,
        "efficiency increases with twice the batch, and the report states it": high.is_above(low) and is_told,
    }


if __name__ == "__main__":
    main()
