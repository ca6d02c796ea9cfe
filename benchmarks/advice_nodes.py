"""Follows the advice of `tutti advise` on emulated nodes, where the knee and the fastest choice differ.

Claim: runs of both choices reach the target, and 90% intervals of their hours contain at least 8 of 10 of them.

- The nodes belong to a real Slurm on this machine (tests/slurm.py); `tc` limits their links. The network learns the
  digits; most of its compute time is a wait, as for an accelerator (slow_links_model.py).
- The learning rate is constant over batches, so that the critical batch is small and more nodes cost more node-hours.
- `tutti scale` measures 1 and 2 nodes. `tutti sweep` measures the epochs to a target by global batch, on one rank and
  without the wait, which changes nothing of what is learned.
- `tutti advise --write` writes the recipes, with at most 4 nodes, before anything else runs.
- `tutti train` follows each choice as it is written, with several seeds that the sweep has not used.

It needs root and Slurm (apt-get install slurm-wlm munge iproute2), and takes about 15 minutes.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import measure
from advice_tried import HEAD, inside, is_reached, read_run, run_tutti, show_row
from slow_links import MODEL, REPOSITORY, TUTTI, run_in_allocation

sys.path.insert(0, str(REPOSITORY / "tests"))

if TYPE_CHECKING:
    from slurm import Cluster

METRIC = "valid_accuracy"
RATE = "1gbit"
NODES = 4
CHOICES = ("knee", "fastest")
LEAST_INSIDE = 0.8
FIRST_SEED = 101  # the sweep counts from the recipe's own
RECIPE: dict[str, Any] = {
    "data": {"name": "digits", "shift": 0},
    "model": {
        "name": "slow_links_model:SlowNetwork",
        "inputs": 64,
        "width": 128,
        "classes": 10,
        "seconds_per_sample": 0.008,
    },
    "optim": {"name": "adam", "lr": 0.001},
    "batch": {"global": 32},
    "epochs": 60,
}


def main() -> None:
    """Runs everything; the exit code is 0 if the claim holds."""
    import slurm

    options = _parse()
    if why := slurm.unavailable():
        sys.exit(f"no nodes are available here: {why}")
    facts = measure.conditions(ranks=NODES, trials=options.seeds, rate=RATE)
    measure.print_conditions(facts)
    target = f"{METRIC}={options.target:g}"
    rows: list[dict[str, Any]] = []
    with measure.kept_folder(options.keep, "tutti-advice-") as folder, slurm.running(RATE) as cluster:
        shutil.copy(MODEL, folder)
        (folder / "waiting.yaml").write_text(json.dumps(RECIPE))
        advice = _advise(cluster, folder, target)
        for choice in advice["choices"]:
            if choice["choice"] in CHOICES:
                rows += [
                    _follow(cluster, folder, choice, FIRST_SEED + number, target) for number in range(options.seeds)
                ]
    measure.print_table(HEAD, [show_row(row) for row in rows])
    bars = _bars(rows)
    measure.print_verdict(bars)
    measure.write_json(options.out, {"conditions": facts, "advice": advice, "runs": rows, "bars": bars})
    sys.exit(0 if all(bars.values()) else 1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", type=float, default=0.97, help="validation accuracy to reach")
    parser.add_argument("--seeds", type=int, default=4, help="runs of each choice")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep all runs in this folder")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results to this JSON file")
    return parser.parse_args()


def _advise(cluster: "Cluster", folder: Path, target: str) -> dict[str, Any]:
    """Measures 1 and 2 nodes and the epochs by batch, and has recipes of the choices written."""
    scale = "scale waiting.yaml --ranks 1,2 --mode weak --warmup 4 --steps 20 --repeat 3 --out throughput"
    run_in_allocation(cluster, [[*TUTTI, scale]], folder)
    sweep = ["sweep", "waiting.yaml", "model.seconds_per_sample=0"]
    sweep += ["--set", "batch.global=16,32,64,128,256,512", "--seeds", "3", "--target", target, "--out", "epochs"]
    print(run_tutti(folder, *sweep), flush=True)
    [study], [swept] = (folder.glob(f"{name}/**/study.json") for name in ("throughput", "epochs"))
    words = ["advise", str(study.parent), "--sweep", str(swept.parent), "--target", target]
    words += ["--fabric", "tcp", "--most-nodes", str(NODES)]
    print(run_tutti(folder, *words, "--write", "advised.yaml"), flush=True)
    return json.loads(run_tutti(folder, *words, "--json"))


def _follow(cluster: "Cluster", folder: Path, choice: Mapping[str, Any], seed: int, target: str) -> dict[str, Any]:
    """Trains a choice as it is written until the target is reached."""
    out = folder / f"followed-{choice['choice']}-{seed}"
    nodes = choice["nodes"]
    srun = ["srun", f"--nodes={nodes}", f"--ntasks={choice['ranks']}", "--ntasks-per-node=1"]
    train = ["train", f"advised.yaml/{choice['choice']}", f"seed={seed}", f"out={out}"]
    run_in_allocation(cluster, [[*srun, *TUTTI, *train, f"> {out}.txt"]], folder)
    record, measured = read_run(out, nodes)
    return {**choice, "seed": seed, "measured": measured, "is_reached": is_reached(record, target)}


def _bars(rows: list[dict[str, Any]]) -> dict[str, bool]:
    places = {(row["ranks"], row["global_batch"]) for row in rows}
    reached = sum(row["is_reached"] for row in rows)
    held = sum(inside(row, "hours") for row in rows)
    return {
        "knee and fastest differ": len(places) == len(CHOICES),
        f"{reached} of {len(rows)} reach the target": reached == len(rows),
        f"{held} of {len(rows)} inside the 90% interval of hours": held >= LEAST_INSIDE * len(rows),
    }


if __name__ == "__main__":
    main()
