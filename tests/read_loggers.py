"""What loggers hold, by the readers of the packages themselves."""

import csv
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from tutti.runs.tensorboard import TensorBoardLog  # before tensorboard: it is then read without TensorFlow


def read_wandb(folder: Path) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """The rows of a run of Weights & Biases, and what describes it; there is one file of records."""
    [records] = folder.glob("wandb/offline-run-*/*.wandb")
    reader = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(records)]
    lines = subprocess.run(reader, capture_output=True, text=True, check=True).stdout.splitlines()
    rows, runs = [], []
    for record in map(json.loads, lines):
        if record["type"] == "history":
            items = record["history"]["item"].items()
            rows.append({key: float(value) for key, value in items if not key.startswith("_")})
        elif record["type"] == "run":
            runs.append(record["run"])
    [run] = runs
    return rows, run


def read_mlflow(folder: Path) -> tuple[Any, dict[str, list[tuple[int, float]]]]:
    """The run in a store, and the points of every metric, by its client."""
    from mlflow import MlflowClient

    state = json.loads((folder / "logs" / "mlflow.json").read_text())
    with warnings.catch_warnings():  # of SQLAlchemy, about MLflow
        warnings.simplefilter("ignore")
        client = MlflowClient(tracking_uri=state["store"])
    run = client.get_run(state["id"])
    runs = client.search_runs([run.info.experiment_id])
    assert [each.info.run_id for each in runs] == [state["id"]]
    points = {
        key: [(point.step, point.value) for point in client.get_metric_history(state["id"], key)]
        for key in run.data.metrics
    }
    return run, {key: sorted(found) for key, found in points.items()}


def read_csv(folder: Path) -> list[dict[str, Any]]:
    with open(folder / "metrics.csv", newline="") as file:
        return [{key: value for key, value in row.items() if value != ""} for row in csv.DictReader(file)]


def read_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert TensorBoardLog
    found = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
