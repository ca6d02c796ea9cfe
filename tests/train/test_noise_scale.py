"""The gradient noise scale of real runs: the same on ranks as over micro-batches, and without effect on training."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Tutti
from rank_jobs import read_losses, run_ranks, train

VALUES: dict[str, Any] = {
    "recipe": "noise",
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": [32], "dropout": 0.0},
    "optim": {"name": "sgd", "lr": 0.1, "clip_norm": 0.1},
    "batch": {"global": 64, "micro": 32},
    "epochs": 2,
    "checkpoint": {"every_steps": 39, "every_epochs": None, "keep": 3},
    "log": {"every_steps": 50, "tensorboard": False, "noise_scale": True},
}
QUIET = VALUES | {"log": VALUES["log"] | {"noise_scale": False}}
# The checkpoint is inside a log window, after a measured step of it and before another, of which is the dry run.
KILLED_AT, SAVED_AT = 41, 39


def read_noise(folder: Path) -> dict[int, tuple[float, float]]:
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    noise = [event for event in events if event["event"] == "noise"]
    steps = [event["step"] for event in noise]
    assert steps == sorted(set(steps))
    return {event["step"]: (event["gradient_square"], event["gradient_variance"]) for event in noise}


@pytest.mark.ranks
def test_ranks_and_micro_batches_give_the_same_numbers_and_measuring_changes_no_bit(tmp_path: Path) -> None:
    found = {}
    for ranks in (1, 2):
        measured = run_ranks(ranks, train, VALUES | {"out": str(tmp_path / f"measured-{ranks}")})[0]
        plain = run_ranks(ranks, train, QUIET | {"out": str(tmp_path / f"plain-{ranks}")})[0]
        assert measured["weights"] == plain["weights"]
        assert read_losses(measured["folder"]) == read_losses(plain["folder"])
        assert read_noise(plain["folder"]) == {}
        found[ranks] = read_noise(measured["folder"])
        assert "noise scale: too few steps are measured" in (measured["folder"] / "logs" / "rank-0.log").read_text()
    assert list(found[1]) == [10, 20, 30, 40]
    for step, pair in found[1].items():
        assert found[2][step] == pytest.approx(pair, rel=1e-3, abs=1e-6)
        assert pair[0] + pair[1] / 64 > 1.5 * 0.1**2, "the square of the whole batch is that before clipping to 0.1"


@pytest.mark.ranks
def test_a_resumed_run_has_every_measured_step_once(tmp_path: Path) -> None:
    whole = run_ranks(1, train, VALUES | {"out": str(tmp_path / "whole")})[0]
    run_ranks(1, train, VALUES | {"out": str(tmp_path / "killed")}, None, KILLED_AT, expect_failure=True)
    folder = next((tmp_path / "killed" / "noise").iterdir())
    assert list(read_noise(folder)) == [10, 20, 30]
    checkpoint = folder / "checkpoints" / f"step-{SAVED_AT:06d}"
    run_ranks(1, train, VALUES | {"out": str(tmp_path / "killed")}, str(checkpoint))
    assert read_noise(folder) == read_noise(whole["folder"])


@pytest.mark.system
def test_one_rank_with_one_pass_is_refused_before_a_folder_is_made(tmp_path: Path, tutti: Tutti) -> None:
    words = ("batch.micro=null", "log.noise_scale=true", f"out={tmp_path / 'runs'}")
    done = tutti("train", "digits/mlp", *words)
    assert done.code == 2
    assert "log.noise_scale=true on 1 rank whose steps have 1 forward pass" in done.err
    assert not (tmp_path / "runs").exists()
    least = tutti("train", "digits/mlp", *words, "--min-ranks", "1", "--max-ranks", "2")
    assert least.code == 2
    assert "log.noise_scale=true on 1 rank" in least.err
