"""MNIST for real, where its files are: the tutorial's run learns, and its large batch does not."""

import json
from pathlib import Path

import pytest
from conftest import Tutti

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def accuracy(tutti: Tutti, tmp_path: Path, mnist_folder: Path, recipe: str, *overrides: str) -> float:
    done = tutti("train", recipe, "-n", "2", f"data.path={mnist_folder}", *overrides)
    assert done.code == 0, done.all
    return json.loads(next(tmp_path.rglob("record.json")).read_text())["results"]["valid_accuracy"]


def test_the_tutorials_run_learns(tutti: Tutti, tmp_path: Path, mnist_folder: Path) -> None:
    """Two of its ten epochs; all ten, with their time, are in benchmarks/mnist_tutorial.py."""
    assert accuracy(tutti, tmp_path, mnist_folder, "mnist", "epochs=2") > 0.95


def test_a_batch_of_128_ranks_at_128_times_the_rate_does_not(tutti: Tutti, tmp_path: Path, mnist_folder: Path) -> None:
    """All of its twelve epochs."""
    found = accuracy(tutti, tmp_path, mnist_folder, "mnist/large_batch")
    assert found == pytest.approx(0.1135, abs=0.02)
