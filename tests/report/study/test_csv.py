"""The CSV file of a study: every column agrees with the run folder."""

import csv
import json
import statistics
from pathlib import Path

import pytest
from study_folders import Made, sweep_study

from tutti.report.study.tables import points_csv
from tutti.report.study.write import read_study
from tutti.study.definition import Goal, Point

PARTS = {
    "reading": ("data",),
    "computing": ("forward", "backward", "update"),
    "communication": ("communication",),
    "waiting": ("waiting",),
    "rest": ("rest",),
}
EPOCHS = (
    {"train_loss": 1.0, "valid_accuracy": 0.5},
    {"train_loss": 0.4, "valid_accuracy": 0.95},
    {"train_loss": 0.6, "valid_accuracy": 0.92},
)


def learned(point: Point) -> Made:
    """Three epochs, the second of which is the best and the first at the goal."""
    return Made(1000.0 * point.repeat, communication=0.1, noise=0.05, windows=12, epochs=EPOCHS)


def test_every_column_of_a_point_is_that_of_its_run_folder(tmp_path: Path) -> None:
    goal = Goal("full", metric="valid_accuracy", target=0.9)
    study = sweep_study(tmp_path / "s", learned, {"batch.global": [64, 128]}, 2, goal)
    line = next(
        line for line in csv.DictReader(points_csv(read_study(study.path)).splitlines()) if line["id"] == "p2-s2"
    )
    run = study.run("p2-s2")
    events = [json.loads(text) for text in run.metrics.read_text().splitlines()]
    windows = [event for event in events if event["event"] == "step"]
    speeds, whole = [event["samples_per_second"] for event in windows], sum(event["seconds"] for event in windows)
    texts = {"state": "finished", "reason": "", "batch.global": "128", "collapse": "", "folder": str(run.path)}
    numbers = {"ranks": 2, "repeat": 2, "seed": 43, "global_batch": 64, "per_rank_batch": 32, "windows": len(windows)}
    numbers |= {"samples_per_second": statistics.median(speeds)}
    numbers |= {"samples_per_second_low": min(speeds), "samples_per_second_high": max(speeds)}
    for part, phases in PARTS.items():
        numbers[f"{part}_share"] = sum(event[f"{phase}_seconds"] for event in windows for phase in phases) / whole
    numbers |= {"final_train_loss": 0.6, "best_train_loss": 0.4}
    numbers |= {"final_valid_accuracy": 0.92, "best_valid_accuracy": 0.95}
    goal_seconds = sum(event["seconds"] for event in windows if event["step"] <= 40)
    numbers |= {"goal_epoch": 2, "goal_step": 40, "goal_seconds": goal_seconds}
    assert {name: line[name] for name in texts} == texts
    assert {name: float(line[name]) for name in numbers} == pytest.approx(numbers)
    assert set(line) == {"id", "outlier", "outlier_windows", *texts, *numbers}
