"""Follows the advice of `tutti advise` for the knee and the fastest choice, and sets the runs beside it.

- `tutti scale` measures throughput on 1 and 2 ranks, `tutti sweep` the epochs to a target at several global batches.
- `tutti advise` says ranks, batch, learning rate, epochs and hours, and writes a recipe, before anything else runs.
- `tutti train` runs the recipe of each choice until the target is reached.

A choice is followed as it is written: nothing is chosen afterwards. The target is reached or not; epochs and hours of
training are inside their 90% intervals or not.

    python benchmarks/advice_tried.py mnist --batches 64,256,1024 --target valid_accuracy=0.985 --epochs 8
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import measure

TUTTI = [sys.executable, "-m", "tutti"]
HEAD = ("choice", "ranks", "batch", "lr", "target", "epochs: advised", "measured", "time: advised", "measured", "cost")


def main() -> None:
    """Runs everything; the exit code is 0 if both choices reach the target within their intervals of hours."""
    options = _parse()
    facts = measure.conditions(ranks=max(options.ranks), trials=options.seeds, recipe=options.recipe)
    measure.print_conditions(facts)
    with measure.kept_folder(options.keep, "tutti-advice-") as folder:
        study, sweep = _measure(options, folder)
        target = options.target if "=" in options.target else _reached_by_all(sweep, options.target)
        advised = folder / "advised.yaml"
        words = ["advise", str(study), "--sweep", str(sweep), "--target", target]
        print(run_tutti(folder, *words, "--write", str(advised)), flush=True)
        advice = json.loads(run_tutti(folder, *words, "--json"))
        choices = {each["choice"]: each for each in advice["choices"]}
        rows = [_follow(target, folder, advised, "knee", choices["knee"])]
        if _is_same(choices["knee"], choices["fastest"]):  # one run is both
            rows.append(rows[0] | {"choice": "fastest"})
        else:
            rows.append(_follow(target, folder, advised, "fastest", choices["fastest"]))
    measure.print_table(HEAD, [show_row(row) for row in rows])
    bars = {}
    for row in rows:
        bars[f"{row['choice']}: the target is reached"] = row["is_reached"]
        bars[f"{row['choice']}: hours inside their 90% interval"] = inside(row, "hours")
    measure.print_verdict(bars)
    measure.write_json(options.out, {"conditions": facts, "advice": advice, "runs": rows, "bars": bars})
    sys.exit(0 if all(bars.values()) else 1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", help="as of tutti train")
    parser.add_argument("--ranks", type=_numbers, default=[1, 2], help="of the study of throughput")
    parser.add_argument("--batches", type=_numbers, required=True, help="global batches of the sweep")
    parser.add_argument("--target", required=True, metavar="METRIC[=NUMBER]", help="without a number: what all reach")
    parser.add_argument("--epochs", type=int, required=True, help="the most that a run of the sweep trains for")
    parser.add_argument("--seeds", type=int, default=2, help="runs of the sweep at each batch")
    parser.add_argument("--repeat", type=int, default=2, help="runs of the study on each number of ranks")
    parser.add_argument("--steps", type=int, default=60, help="timed steps of the study")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep all runs in this folder")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results to this JSON file")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _measure(options: argparse.Namespace, folder: Path) -> tuple[Path, Path]:
    """The folders of the study of throughput and of the sweep."""
    ranks = ",".join(map(str, options.ranks))
    scale = ["scale", options.recipe, *options.overrides, "--ranks", ranks, "--mode", "weak"]
    scale += ["--repeat", str(options.repeat)]
    print(run_tutti(folder, *scale, "--steps", str(options.steps), "--out", "throughput"), flush=True)
    batches = ",".join(map(str, options.batches))
    sweep = [
        "sweep",
        options.recipe,
        *options.overrides,
        f"epochs={options.epochs}",
        "--set",
        f"batch.global={batches}",
    ]
    sweep += ["--seeds", str(options.seeds), "--out", "epochs"]
    sweep += ["--target", options.target] if "=" in options.target else []
    print(run_tutti(folder, *sweep), flush=True)
    [study], [swept] = (folder.glob(f"{name}/**/study.json") for name in ("throughput", "epochs"))
    return study.parent, swept.parent


def _reached_by_all(sweep: Path, metric: str) -> str:
    """The target that every run of the sweep reaches, if it has a value."""
    best = []
    for path in sweep.glob("**/metrics.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        values = [event[metric] for event in events if event["event"] == "epoch"]
        best.append(min(values) if "loss" in metric else max(values))
    return f"{metric}={max(best) if 'loss' in metric else min(best):.5g}"


def _follow(target: str, folder: Path, recipe: Path, name: str, choice: Mapping[str, Any]) -> dict[str, Any]:
    """Trains as advised until the target is reached."""
    given = str(recipe) if name == "knee" else f"{recipe}/{name}"
    out = folder / f"followed-{name}"
    run_tutti(folder, "train", given, "-n", str(choice["ranks"]), f"out={out}")
    record, measured = read_run(out, choice["nodes"])
    return {**choice, "measured": measured, "is_reached": is_reached(record, target)}


def read_run(out: Path, nodes: int) -> tuple[dict[str, Any], dict[str, float]]:
    """The record of the only run below a folder, and its hours, epochs and node-hours."""
    [path] = out.glob("**/record.json")
    record = json.loads(path.read_text())
    hours = record["seconds"]["training"] / 3600
    epochs = record["step"] / record["plan"]["steps_per_epoch"]
    return record, {"hours": hours, "epochs": epochs, "node_hours": hours * nodes}


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one[key] == other[key] for key in ("ranks", "global_batch", "lr", "planned_epochs"))


def is_reached(record: Mapping[str, Any], target: str) -> bool:
    """Returns whether a run has ended with its target, as in METRIC=NUMBER."""
    metric, _, value = target.partition("=")
    found = record["results"][metric]
    return found <= float(value) if "loss" in metric else found >= float(value)


def inside(row: Mapping[str, Any], name: str) -> bool:
    """Returns whether a measured quantity lies inside the 90% interval of the advice."""
    low, high = row[f"{name}90"]
    return low <= row["measured"][name] <= high


def show_row(row: Mapping[str, Any]) -> list[str]:
    """A followed choice as a line of the table."""
    seconds = [3600 * each for each in (row["hours"], *row["hours90"], row["measured"]["hours"])]
    return [
        row["choice"],
        str(row["ranks"]),
        f"{row['global_batch']:,}",
        f"{row['lr']:.2g}",
        "reached" if row["is_reached"] else "missed",
        f"{row['epochs']:.1f} ({row['epochs90'][0]:.1f} to {row['epochs90'][1]:.1f})",
        f"{row['measured']['epochs']:.1f}",
        f"{seconds[0]:.1f} s ({seconds[1]:.1f} to {seconds[2]:.1f})",
        f"{seconds[3]:.1f} s",
        f"{row['measured']['node_hours']:.2g} node-hours, advised {row['node_hours']:.2g}",
    ]


def run_tutti(folder: Path, *words: str) -> str:
    """Runs a command to its end and returns what it prints; ends this program if it fails."""
    done = subprocess.run([*TUTTI, *words], cwd=folder, env=measure.environment(), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"tutti {' '.join(words)} ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
