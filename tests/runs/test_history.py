"""The epochs of a run summed up: the best of them, whatever was measured."""

from pathlib import Path

import pytest

from tutti.runs.metrics import LineLog
from tutti.runs.record import summarise_epochs


@pytest.mark.parametrize(
    ("losses", "accuracies", "expected"),
    [
        ([0.9, 0.4, 0.6], [0.7, 0.8, 0.8], {"valid_loss": (0.4, 2), "valid_accuracy": (0.8, 2)}),
        ([float("nan"), 2.5, float("nan")], [0.1, 0.2, 0.1], {"valid_loss": (2.5, 2), "valid_accuracy": (0.2, 2)}),
        ([float("nan")] * 3, [0.1, 0.1, 0.1], {"valid_accuracy": (0.1, 1)}),
        ([float("inf")] * 3, [0.0, 0.0, 0.1], {"valid_loss": (float("inf"), 1), "valid_accuracy": (0.1, 3)}),
    ],
)
def test_the_best_of_each_metric_has_its_epoch_also_in_runs_that_break(
    losses: list[float], accuracies: list[float], expected: dict[str, tuple[float, int]], tmp_path: Path
) -> None:
    log = LineLog(tmp_path / "metrics.jsonl")
    for epoch, (loss, accuracy) in enumerate(zip(losses, accuracies, strict=True), start=1):
        log.write({"event": "epoch", "epoch": epoch, "seconds": 2.0, "valid_loss": loss, "valid_accuracy": accuracy})
    log.close()
    found = summarise_epochs(tmp_path / "metrics.jsonl", ranks=2)
    assert {name: (best["value"], best["epoch"]) for name, best in found["best"].items()} == expected
    assert found["seconds_per_epoch"] == 2.0
