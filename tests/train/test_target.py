"""Runs that end with the validation in which a metric comes to `stop_at`, or no longer improves (`stop_early`)."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import read_losses, reserved_port, run_ranks, train

from tutti.config.check import check_parts, check_stop
from tutti.config.load import resolve_values
from tutti.config.plan import make_plan
from tutti.config.run import RunConfig
from tutti.config.schedule import make_schedule
from tutti.errors import ConfigError
from tutti.train.progress import Patience, TrainingProgress

VALUES: dict[str, Any] = {
    "recipe": "target",
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": [32]},
    "optim": {"name": "adamw", "lr": 2e-3},
    "batch": {"global": 64},
    "schedule": {"decay": "cosine"},
    "epochs": 30,
    "checkpoint": {"every_epochs": 30},
    "log": {"every_steps": 11, "tensorboard": False},
}
STEPS = 22  # in an epoch
TARGET = {"stop_at": {"valid_accuracy": 0.5}}
LATER = {"stop_at": {"valid_accuracy": 0.9}}  # than the first epoch


def config_of(**values: Any) -> RunConfig:
    return resolve_values(VALUES | values)


def progress(step: int, accuracy: float, **values: Any) -> TrainingProgress:
    """A run after some steps, with the results of its last validation."""
    found = TrainingProgress()
    found.config = config_of(**values)
    found.plan = make_plan(found.config, 1, STEPS * 64)
    found.step, found.results = step, {"valid_accuracy": accuracy}
    return found


def stopped_and_resumed(values: dict[str, Any], next_port: int) -> dict[str, Any]:
    """A run to its target, and what resuming it from there leaves."""
    found = train(values)
    folder: Path = found["folder"]
    left = {"losses": read_losses(folder), "record": json.loads((folder / "record.json").read_text())}
    checkpoint = folder / "checkpoints" / f"step-{left['record']['step']:06d}"
    os.environ["MASTER_PORT"] = str(next_port)
    return found | left | {"resumed": train(values, str(checkpoint))}


@pytest.mark.ranks
def test_all_ranks_stop_there_and_save_and_do_not_train_on_when_resumed(tmp_path: Path) -> None:
    with reserved_port() as next_port:
        first, second = run_ranks(2, stopped_and_resumed, VALUES | LATER | {"out": str(tmp_path)}, next_port)
    folder, record = first["folder"], first["record"]
    accuracies = [epoch["valid_accuracy"] for epoch in record["history"]]
    assert accuracies[-1] >= 0.9 > max(accuracies[:-1])
    assert (record["state"], record["ended_by"], record["step"]) == ("finished", "stop_at", STEPS * len(accuracies))
    assert len(accuracies) < VALUES["epochs"]
    assert first["results"] == second["results"] == record["results"]
    assert first["weights"] == second["weights"]
    assert (
        f"stopped after epoch {len(accuracies)} of 30: valid accuracy" in (folder / "logs" / "rank-0.log").read_text()
    )
    _assert_schedule_of_the_whole_recipe(folder)

    assert (folder / "checkpoints" / "latest").read_text().strip() == f"step-{record['step']:06d}"
    assert first["resumed"] == {key: first[key] for key in ("folder", "results", "weights")}
    assert read_losses(folder) == first["losses"]
    again = json.loads((folder / "record.json").read_text())
    assert (again["state"], again["ended_by"], len(again["segments"])) == ("finished", "stop_at", 2)


def _assert_schedule_of_the_whole_recipe(folder: Path) -> None:
    config = config_of()
    schedule = make_schedule(config, make_plan(config, 2, STEPS * 64))
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = {event["step"]: event["lr"] for event in events if event["event"] == "step"}
    assert rates == {step: schedule.lr_at(step - 1) for step in rates}


@pytest.mark.parametrize(
    ("target", "results", "is_over"),
    [
        ({"valid_accuracy": 0.9}, {"valid_accuracy": 0.9}, True),
        ({"valid_accuracy": 0.9}, {"valid_accuracy": 0.899}, False),
        ({"valid_loss": 0.3}, {"valid_loss": 0.3, "valid_accuracy": 0.1}, True),
        ({"valid_loss": 0.3}, {"valid_loss": 0.31, "valid_accuracy": 1.0}, False),
        ({"valid_loss": 0.3}, {"valid_loss": float("nan")}, False),
        ({"valid_accuracy": 0.9}, {}, False),
        (None, {"valid_accuracy": 1.0}, False),
    ],
)
def test_losses_come_to_a_target_from_above_and_accuracies_from_below(target, results, is_over) -> None:
    found = progress(STEPS, 0.0, stop_at=target)
    found.results = results
    assert found.is_over is is_over


def test_only_a_validation_ends_a_run() -> None:
    assert progress(STEPS, 0.6, **TARGET).is_over
    assert not progress(STEPS + 1, 0.6, **TARGET).is_over


def test_a_run_that_stops_saves_as_at_its_end() -> None:
    assert progress(STEPS, 0.6, **TARGET).saves_now
    assert not progress(STEPS, 0.4, **TARGET).saves_now
    assert not progress(STEPS, 0.6, **TARGET, checkpoint={"every_epochs": None}).saves_now


def test_a_run_says_what_has_ended_it() -> None:
    assert progress(STEPS, 0.6, **TARGET).ended_by == "stop_at"
    assert list(progress(2 * STEPS, 0.6, **TARGET).describe_stop()) == [
        "stopped after epoch 2 of 30: valid accuracy 60.00% has reached stop_at.valid_accuracy=0.5"
    ]
    whole = progress(30 * STEPS, 0.4, **TARGET)
    assert (whole.is_over, whole.ended_by, list(whole.describe_stop())) == (True, "epochs", [])
    assert progress(7, 0.4, **TARGET, max_steps=7).ended_by == "max_steps"


def test_the_best_of_an_error_is_the_least() -> None:
    found = progress(STEPS, 0.0, metrics=["parts:my_error"], checkpoint={"best": "my_error"})
    for error, is_best in ((0.4, True), (0.5, False), (0.3, True)):
        found.results = {"valid_my_error": error}
        found._note_best()
        assert found._is_best is is_best


@pytest.mark.parametrize(
    ("stop_at", "message"),
    [
        ({"valid_accuracy": 0.9, "valid_loss": 0.1}, "stop_at: expected one metric with its value, as in {valid_acc"),
        ({}, "expected one metric with its value"),
        (0.95, "expected one metric with its value, as in {valid_accuracy: 0.95}, not 0.95"),
        ({"valid_accuracy": "high"}, "stop_at.valid_accuracy='high' .*: expected a number"),
        ({"valid_accuracy": float("nan")}, "stop_at.valid_accuracy=nan"),
        ({"valid_acuracy": 0.9}, "stop_at.valid_acuracy=0.9: target measures valid_loss, valid_accuracy, and no "),
        ({"train_loss": 0.1}, "and no 'train_loss'. Did you mean 'valid_loss'?"),
    ],
)
def test_a_target_that_cannot_be_is_refused(stop_at: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_parts(config_of(stop_at=stop_at), 1)


def test_a_run_without_validation_has_no_target() -> None:
    with pytest.raises(ConfigError, match=r"stop_at.valid_accuracy=0.5, but there is no validation data"):
        check_stop(config_of(**TARGET), ["accuracy"], validates=False)


IMPATIENT = {"stop_early": {"metric": "valid_accuracy", "patience": 2, "min_change": 1.0}}  # the first epoch is best


@pytest.mark.ranks
def test_a_run_that_no_longer_improves_ends_on_all_ranks_and_at_the_same_epoch_when_resumed(tmp_path: Path) -> None:
    values = VALUES | IMPATIENT | {"checkpoint": {"every_steps": 11, "keep": 9}, "out": str(tmp_path)}
    first, second = run_ranks(2, train, values)
    folder: Path = first["folder"]
    record, losses = json.loads((folder / "record.json").read_text()), read_losses(folder)
    assert (record["state"], record["ended_by"], record["step"]) == ("finished", "stop_early", 3 * STEPS)
    assert first["results"] == second["results"]
    said = (folder / "logs" / "rank-0.log").read_text()
    assert "stopped after epoch 3 of 30: valid accuracy " in said
    assert " is the best since epoch 1 (stop_early.patience)" in said
    [resumed] = run_ranks(1, train, values, str(folder / "checkpoints" / "step-000055"))  # one epoch of two has passed
    record = json.loads((folder / "record.json").read_text())
    assert (record["ended_by"], record["step"]) == ("stop_early", 3 * STEPS)
    assert resumed["weights"] == pytest.approx(first["weights"], abs=1e-5)
    assert [loss[:2] for loss in read_losses(folder)] == [loss[:2] for loss in losses]


@pytest.mark.parametrize(
    ("metric", "values", "min_change", "waited"),
    [
        ("valid_loss", [0.5, 0.4, 0.3], 0.0, [0, 0, 0]),
        ("valid_loss", [0.5, 0.5, 0.6, 0.4, 0.45], 0.0, [0, 1, 2, 0, 1]),
        ("valid_accuracy", [0.5, 0.6, 0.55, 0.6, 0.61], 0.0, [0, 0, 1, 2, 0]),
        ("valid_accuracy", [0.5, 0.55, 0.59, 0.61], 0.1, [0, 1, 2, 0]),
        ("valid_loss", [math.nan, 0.5, math.nan, 0.4], 0.0, [1, 0, 1, 0]),
    ],
)
def test_epochs_without_an_improvement_are_counted(
    metric: str, values: list[float], min_change: float, waited: list[int]
) -> None:
    patience, found = Patience(metric), []
    for value in values:
        patience = patience.after(value, min_change)
        found.append(patience.waited)
    assert found == waited


def test_only_patience_that_is_used_up_ends_a_run() -> None:
    found = progress(STEPS, 0.4, stop_early={"metric": "valid_accuracy", "patience": 2})
    for step, is_over in ((1, False), (2, False), (3, True)):
        found.step = step * STEPS
        found._note_patience()
        assert found.is_over is is_over
    assert found.ended_by == "stop_early"
    found.step += 1
    assert not found.is_over


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (
            {"metric": "valid_acc", "patience": 2},
            "stop_early.metric=valid_acc: target measures valid_loss, valid_accuracy",
        ),
        ({"metric": "valid_loss"}, "stop_early.patience is missing"),
        ({"patience": 0}, "stop_early.patience=0"),
        ({"patience": 2, "min_change": -1.0}, "stop_early.min_change=-1.0"),
        (
            {"patience": 2, "patients": 3},
            "unknown key 'stop_early.patients'.*: expected one of metric, patience, min_ch",
        ),
        (5, "stop_early=5 .*: expected a group of keys"),
    ],
)
def test_a_patience_that_cannot_be_is_refused(wish: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_parts(config_of(stop_early=wish), 1)
