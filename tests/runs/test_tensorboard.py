"""TensorBoard reads back what was written for it."""

import math
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tutti.runs.tensorboard import TensorBoardLog

EVENTS: list[dict[str, Any]] = [
    {"event": "start", "epoch": 0, "step": 0, "time": 1000.25, "valid_loss": 2.5, "valid_accuracy": 0.125},
    {"event": "step", "epoch": 1, "step": 5, "time": 1001.5, "train_loss": 1.5, "lr": 3e-4, "samples_per_second": 1200},
    {"event": "step", "epoch": 1, "step": 10, "time": 1002.5, "train_loss": math.nan, "lr": 2e-4, "note": "text"},
    {"event": "epoch", "epoch": 1, "step": 10, "time": 1003.0, "valid_loss": 0.75, "valid_accuracy": 0.5, "none": None},
]


def read(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Every curve as (step, time, value)."""
    found = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.wall_time, event.value) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def write(folder: Path, events: list[dict[str, Any]]) -> None:
    log = TensorBoardLog(folder)
    for event in events:
        log.write(event)
    log.close()


def test_every_number_of_an_event_is_a_point_of_a_curve(tmp_path: Path) -> None:
    write(tmp_path / "tensorboard", EVENTS)
    curves = read(tmp_path / "tensorboard")
    assert curves.keys() == {
        "train/loss",
        "valid/loss",
        "valid/accuracy",
        "step/lr",
        "step/samples_per_second",
    }
    assert curves["valid/loss"] == [(0, 1000.25, 2.5), (10, 1003.0, 0.75)]
    assert curves["valid/accuracy"] == [(0, 1000.25, 0.125), (10, 1003.0, 0.5)]
    assert curves["step/samples_per_second"] == [(5, 1001.5, 1200.0)]
    assert [step for step, _, _ in curves["step/lr"]] == [5, 10]
    assert [value for _, _, value in curves["step/lr"]] == pytest.approx([3e-4, 2e-4])
    assert curves["train/loss"][0] == (5, 1001.5, 1.5)
    assert math.isnan(curves["train/loss"][1][2])


def test_a_resumed_run_continues_its_curves(tmp_path: Path) -> None:
    write(tmp_path, EVENTS[:1])
    write(tmp_path, EVENTS[3:])
    assert [step for step, _, _ in read(tmp_path)["valid/loss"]] == [0, 10]


def test_the_noise_scale_is_a_curve_and_its_batch_is_none(tmp_path: Path) -> None:
    values = {"gradient_square": 0.5, "gradient_variance": 50.0, "noise_scale": 100.0, "batch": 64}
    event = {"event": "noise", "step": 10, "epoch": 1, "time": 1.0, "biased": ["batch norm"]} | values
    write(tmp_path, [event])
    assert {tag: points[0][2] for tag, points in read(tmp_path).items()} == {
        "step/gradient_square": 0.5,
        "step/gradient_variance": 50.0,
        "step/noise_scale": 100.0,
    }
