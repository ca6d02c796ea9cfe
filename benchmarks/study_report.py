"""How long the report of a large study takes: `tutti report` of 200 runs, as a process of its own.

Claim: under 10 seconds, and without importing torch, so that a login node can do it.

- Two studies of 200 runs each, made up as tests/study_folders.py does it: a sweep (10 batches, 2 rules, 2 warm-ups,
  5 seeds; 20 epochs each), and a study of ranks (8 numbers of ranks, 25 repeats). Every run has a record and 240 log
  windows with all phases.
- Clock: from the start of `python -m tutti report STUDY` to its end, page, pictures and CSV written. The slowest of
  all trials is held against the bar.
- What is imported is told by Python itself (`-X importtime`), in one more run off the clock.

    python benchmarks/study_report.py
"""

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import measure

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))

if TYPE_CHECKING:
    from study_folders import Made

    from tutti.study.definition import Point, StudyFolder

BAR_SECONDS = 10.0
WINDOWS, EPOCHS = 240, 20
HEAVY = ("torch", "tensorflow", "keras", "pandas", "scipy")
HEAD = ("study", "runs", "windows", "seconds", "min", "max", "page MB", "pictures MB", "heavy imports")


def make_sweep(path: Path, windows: int) -> "StudyFolder":
    """200 runs that learn, some with noise, some that collapse."""
    from study_folders import Made, sweep_study

    def learned(point: "Point") -> "Made":
        batch, rule = point.values["batch.global"], point.values["schedule.scaling"]
        cost = 0.02 * math.log2(batch / 32) * (1.5 if rule == "none" else 1.0) + 0.002 * point.repeat
        rise = [1 - math.exp(-epoch / 5) for epoch in range(1, EPOCHS + 1)]
        epochs = [
            {"train_loss": 2.2 - 2 * r, "valid_loss": 2.2 - 1.9 * r, "valid_accuracy": 0.98 * r - cost} for r in rise
        ]
        return Made(1000.0, 0.2, 0.03, windows, losses=lambda step: 0.1 + 2.1 * math.exp(-step / batch), epochs=epochs)

    batches = [2**power for power in range(5, 15)]
    axes = {"batch.global": batches, "schedule.scaling": ["none", "linear"], "schedule.warmup_epochs": [0, 2]}
    return sweep_study(path, learned, axes, seeds=5)


def make_scale(path: Path, windows: int) -> "StudyFolder":
    """200 runs on 1 to 128 ranks with a cost of communication."""
    from study_folders import Made, scale_study

    def timed(point: "Point") -> "Made":
        exposed = 0.01 * 2 * (point.ranks - 1) / point.ranks
        return Made(32 * point.ranks / (0.05 + exposed), exposed / (0.05 + exposed), 0.02, windows)

    return scale_study(path, timed, [2**power for power in range(8)], repeats=25)


def imported(study: Path) -> list[str]:
    """The heavy modules that the command imports, as Python tells it."""
    words = [sys.executable, "-X", "importtime", "-m", "tutti", "report", str(study)]
    done = subprocess.run(words, env=measure.environment(), capture_output=True, text=True, timeout=120, check=True)
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "tutti.report.study.write" in names, "Python has not told what was imported"
    return [name for name in HEAVY if name in names]


def size(*paths: Path) -> float:
    """Megabytes of files."""
    return sum(path.stat().st_size for path in paths) / 1e6


def time_reports(trials: int, windows: int, deadline_seconds: float) -> dict[str, dict[str, Any]]:
    """What the reports of both studies take, how large they are, and what they import."""
    made: dict[str, Callable[[Path, int], StudyFolder]] = {"sweep": make_sweep, "scale": make_scale}
    found: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in made}
    with tempfile.TemporaryDirectory(prefix="study-report-") as folder:
        studies = {name: make(Path(folder) / name, windows) for name, make in made.items()}
        for _, name in measure.alternating(tuple(made), trials):
            words = [sys.executable, "-m", "tutti", "report", str(studies[name].path)]
            found[name]["seconds"].append(measure.run_command(words, Path(folder), deadline_seconds))
        for name, study in studies.items():
            sizes = {"page_mb": size(study.report), "pictures_mb": size(*study.figures.iterdir())}
            runs = len(list(study.points.iterdir()))
            found[name] |= {"runs": runs, "heavy": imported(study.path)} | sizes
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--windows", type=int, default=WINDOWS, help="log windows of a run")
    parser.add_argument("--out", type=Path, help="where to leave all figures, as JSON")
    parser.add_argument("--deadline", type=float, default=120)
    args = parser.parse_args()
    measure.end_children_with_me()
    facts = measure.conditions(ranks=1, trials=args.trials, windows=args.windows)
    measure.print_conditions(facts)
    found = time_reports(args.trials, args.windows, args.deadline)
    measure.print_table(HEAD, [_row(name, each, args.windows) for name, each in found.items()])
    bars = {
        f"under {BAR_SECONDS:g} s": max(max(each["seconds"]) for each in found.values()) < BAR_SECONDS,
        "no torch": not any(each["heavy"] for each in found.values()),
    }
    measure.print_verdict(bars)
    measure.write_json(args.out, {"program": "study_report", "conditions": facts, "studies": found, "bars": bars})
    sys.exit(0 if all(bars.values()) else 1)


def _row(name: str, found: dict[str, Any], windows: int) -> list[str]:
    seconds = found["seconds"]
    times = [f"{each:.2f}" for each in (statistics.median(seconds), min(seconds), max(seconds))]
    sizes = [f"{found[key]:.1f}" for key in ("page_mb", "pictures_mb")]
    return [name, str(found["runs"]), str(windows), *times, *sizes, ", ".join(found["heavy"]) or "none"]


if __name__ == "__main__":
    main()
