"""The numbers of one run: when it reached its goal, whether it collapsed, which windows are outliers."""

import math
from typing import Any

import pytest

from tutti.errors import Cause
from tutti.study.definition import Goal, Point, PointState
from tutti.study.outcome import (
    NOT_FINITE,
    Epoch,
    PointOutcome,
    Window,
    find_collapse,
    find_outliers,
    read_figures,
    summarise,
)

POINT = Point("n1-r1", 1, (), {"ranks": 1}, 1, 42)
START = {"train_loss": 2.3, "valid_accuracy": 0.08}


def outcome(accuracies: tuple[float, ...] = (0.5, 0.9, 0.8), train_loss: float = 0.3, **more: Any) -> PointOutcome:
    epochs = tuple(
        Epoch(n, 10 * n, 1.5 * n, {"train_loss": train_loss, "valid_accuracy": each, "valid_loss": 1 - each})
        for n, each in enumerate(accuracies, 1)
    )
    values: dict[str, Any] = {"state": PointState("finished"), "epochs": epochs, "start": START}
    return PointOutcome(**{"point": POINT, "folder": "x", "losses": ((5, 1.0, 2.0),)} | values | more)


def test_the_first_epoch_at_the_target_is_when_it_is_reached() -> None:
    found = read_figures(outcome(), Goal("target", metric="valid_accuracy", target=0.75)).reached
    assert found is not None
    assert (found.epoch, found.step, found.seconds, found.after_step) == (2, 20, 3.0, 10)


def test_a_loss_reaches_its_target_from_above() -> None:
    found = read_figures(outcome(), Goal("target", metric="valid_loss", target=0.15)).reached
    assert found is not None
    assert found.epoch == 2
    assert read_figures(outcome(), Goal("target", metric="valid_loss", target=0.05)).reached is None


def test_the_whole_recipe_is_reached_at_its_last_epoch_and_steps_have_no_goal() -> None:
    found = read_figures(outcome(), Goal("full")).reached
    assert found is not None
    assert found.epoch == 3
    assert read_figures(outcome(), Goal("steps", steps=5)).reached is None


def test_final_and_best_metrics_are_told() -> None:
    found = read_figures(outcome(), Goal("full"))
    assert found.final["valid_accuracy"] == 0.8
    assert found.best["valid_accuracy"] == 0.9
    assert found.best["valid_loss"] == pytest.approx(0.1)


def test_an_accuracy_near_chance_is_a_collapse() -> None:
    assert find_collapse(outcome((0.1135,))) == "an accuracy of 11.3% is near chance, 10.0%"  # exp(-2.3) > 8 %
    assert find_collapse(outcome((0.2,))) is None


def test_chance_is_that_of_the_classes_and_not_of_a_start_that_knows_them() -> None:
    """Weights to begin with, two classes, and classes of unequal size, of which the first weights guess the largest."""
    begun = {"train_loss": 0.4, "valid_accuracy": 0.8}
    assert find_collapse(outcome((0.9,), start=begun)) is None
    assert find_collapse(outcome((0.82,), start=begun, num_classes=10)) is None
    assert find_collapse(outcome((0.11,), start=begun, num_classes=10)) == "an accuracy of 11.0% is near chance, 10.0%"
    two = {"train_loss": math.log(2), "valid_accuracy": 0.5}
    assert find_collapse(outcome((0.72,), start=two)) is None
    assert find_collapse(outcome((0.52,), start=two)) == "an accuracy of 52.0% is near chance, 50.0%"
    assert find_collapse(outcome((0.97,), start=two | {"valid_accuracy": 0.9}, num_classes=2)) is None


def test_a_loss_above_its_start_is_a_collapse() -> None:
    assert find_collapse(outcome(train_loss=4.0)) == "the training loss ends at 4, above its start of 2.3"


@pytest.mark.parametrize(
    "more",
    [
        {"losses": ((5, 1.0, 2.0), (10, 2.0, math.nan))},
        {"losses": (), "epochs": (), "state": PointState("failed", "any text"), "cause": Cause.DIVERGED},
    ],
)
def test_a_loss_that_is_not_finite_is_a_collapse(more: dict[str, Any]) -> None:
    assert find_collapse(outcome(**more)) == NOT_FINITE


def test_a_failure_of_another_kind_is_no_collapse() -> None:
    failed = PointState("failed", "a text about the loss is nan")
    assert find_collapse(outcome(state=failed, cause=Cause.OUT_OF_MEMORY)) is None


def test_outliers_are_marked_by_their_step_and_not_dropped() -> None:
    speeds = [100.0, 101.0, 99.0, 100.5, 60.0, 99.5]
    windows = tuple(Window(5 * n, 1.0, speed, {}) for n, speed in enumerate(speeds, 1))
    found = read_figures(outcome(windows=windows), Goal("steps", steps=5))
    assert found.outlier_windows == (25,)
    assert found.speed is not None
    assert (found.speed.n, found.speed.low) == (6, 60.0)


def test_values_that_are_close_have_no_outlier() -> None:
    assert find_outliers([100.0, 100.0, 100.0, 100.4]) == [False] * 4
    assert find_outliers([1.0, 100.0]) == [False] * 2


def test_a_run_that_has_not_finished_has_no_speed() -> None:
    windows = (Window(5, 1.0, 100.0, {}),)
    found = read_figures(outcome(windows=windows, state=PointState("running")), Goal("full"))
    assert found.speed is None
    assert found.reached is None


def test_a_summary_has_the_standard_deviation_of_a_sample() -> None:
    found = summarise([1.0, 2.0, 6.0])
    assert found is not None
    assert (found.n, found.mean, found.median, found.low, found.high) == (3, 3.0, 2.0, 1.0, 6.0)
    assert found.deviation == pytest.approx(math.sqrt(7))
    assert summarise([]) is None
