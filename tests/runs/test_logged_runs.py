"""Runs with loggers hold what metrics.jsonl holds, also after a kill and a resume; loggers that fail end no run."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import run_ranks, train
from read_loggers import read_csv, read_mlflow, read_tensorboard, read_wandb
from waiting import wait_until

from tutti.runs.logger_process import name_numbers
from tutti.runs.metrics import Event, read_all_events

pytestmark = pytest.mark.ranks
on_one_worker = pytest.mark.xdist_group("loggers")  # it makes the run that several tests look at

VALUES: dict[str, Any] = {
    "recipe": "logged",
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": [16]},
    "optim": {"name": "adamw", "lr": 2e-3},
    "batch": {"global": 64},
    "epochs": 2,
    "checkpoint": {"every_steps": 7, "every_epochs": None},
    "log": {"every_steps": 3, "to": ["tensorboard", "csv", "wandb", "mlflow"]},
}
KILLED_AT = 26  # the newest checkpoint is of step 21, and the events of steps 22 and 24 are repeated


def expected(folder: Path) -> list[dict[str, float]]:
    """The rows that loggers should have, from metrics.jsonl."""
    return [
        {"step": event["step"], "epoch": event["epoch"], **name_numbers(event)}
        for event in read_all_events(folder / "metrics.jsonl")
    ]


def points_of(rows: list[dict[str, float]]) -> dict[str, list[tuple[int, float]]]:
    """The points of every metric in rows."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for key in row.keys() - {"step", "epoch"}:
            found.setdefault(key, []).append((int(row["step"]), row[key]))
    return found


@dataclass(frozen=True)
class Resumed:
    """A run with all loggers that was killed, and resumed to its end."""

    folder: Path
    runs: dict[str, str]  # the runs in Weights & Biases and MLflow that were begun before the kill

    @property
    def events(self) -> list[Event]:
        return read_all_events(self.folder / "metrics.jsonl")


def run_numbers(folder: Path) -> dict[str, str]:
    """The runs of a run folder in the loggers that number them."""
    return {path.stem: json.loads(path.read_text())["id"] for path in sorted((folder / "logs").glob("*.json"))}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    """One killed and resumed run serves all loggers: starting ranks and loggers is what these tests cost."""
    out = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("WANDB_CACHE_DIR", str(out / "cache"))  # not in the home folder
        run_ranks(2, train, VALUES | {"out": str(out)}, None, KILLED_AT, expect_failure=True)
        [folder] = (out / "logged").iterdir()
        assert max(event["step"] for event in read_all_events(folder / "metrics.jsonl")) > 21
        # The loggers outlive the ranks, and pass on what was committed.
        begun = wait_until(
            lambda: found if len(found := run_numbers(folder)) == 2 else None,
            lambda: f"loggers have begun {run_numbers(folder)}",
        )
        checkpoint = folder / "checkpoints" / "step-000021"
        [again] = {each["folder"] for each in run_ranks(2, train, VALUES | {"out": str(out)}, str(checkpoint))}
    assert again == folder
    return Resumed(folder, begun)


@on_one_worker
def test_csv_and_tensorboard_of_a_killed_and_resumed_run_have_the_metrics_of_its_record(resumed: Resumed) -> None:
    steps = [event["step"] for event in resumed.events]
    assert steps == sorted(steps) and steps[-1] > KILLED_AT
    texts = [{key: str(value) for key, value in event.items() if value is not None} for event in resumed.events]
    assert read_csv(resumed.folder) == texts
    curve = [(event["step"], pytest.approx(event["loss"])) for event in resumed.events if event["event"] == "step"]
    assert read_tensorboard(resumed.folder)["step/loss"] == curve


@on_one_worker
def test_a_killed_and_resumed_run_is_one_run_of_wandb_with_the_metrics_of_its_record(resumed: Resumed) -> None:
    rows, run = read_wandb(resumed.folder)
    assert rows == expected(resumed.folder)
    assert run["run_id"] == run_numbers(resumed.folder)["wandb"] == resumed.runs["wandb"]
    assert run["config"]["update"]["optim"]["lr"] == VALUES["optim"]["lr"]


@on_one_worker
def test_a_killed_and_resumed_run_is_one_run_of_mlflow_with_the_metrics_of_its_record(resumed: Resumed) -> None:
    run, points = read_mlflow(resumed.folder)
    assert points == {key: sorted(found) for key, found in points_of(expected(resumed.folder)).items()}
    assert run.info.run_id == run_numbers(resumed.folder)["mlflow"] == resumed.runs["mlflow"]
    assert run.info.status == "FINISHED"
    assert run.data.params["optim.lr"] == "0.002"


def test_loggers_that_fail_are_named_once_in_a_run_that_is_trained_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://store")
    values = VALUES | {"out": str(tmp_path), "log": {"every_steps": 3, "to": ["wandb", "mlflow"]}}
    [trained] = run_ranks(1, train, values)
    record = json.loads((trained["folder"] / "record.json").read_text())
    assert (record["state"], record["step"]) == ("finished", 44)
    said = (trained["folder"] / "logs" / "rank-0.log").read_text()
    for name, reason in (("wandb", "ValidationError: .* Settings"), ("mlflow", "UnsupportedModelRegistry.*nowhere")):
        found = re.findall(rf"warning: log\.to: {name} has failed: (.*)\. The run continues without it\.", said)
        assert len(found) == 1 and re.match(reason, found[0]), said
