"""Exact resume: after a kill in the middle of an epoch, on the same ranks bit by bit, on others sample by sample."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Tutti, environment
from prepared import PYTHON
from rank_jobs import read_ledger, read_losses, run_ranks, train

VALUES: dict[str, Any] = {
    "recipe": "resume",
    "data": {"name": "digits", "shift": 1},
    "model": {"name": "small_cnn", "width": 8, "dropout": 0.3},
    "optim": {"name": "adamw", "lr": 2e-3, "clip_norm": 1.0},
    "batch": {"global": 64, "micro": 16},
    "schedule": {"decay": "cosine"},
    "epochs": 3,
    "checkpoint": {"every_steps": 7, "every_epochs": None, "keep": 3},
    "log": {"every_steps": 4, "ledger": True, "tensorboard": False},
}
KILLED_AT, SAVED_AT = 39, 35  # both inside the second epoch, and inside a log window: the steps 33 to 36, and 37 to 40


def killed_run(ranks: int, out: Path) -> Path:
    """A run that died by SIGKILL in mid-epoch; its newest checkpoint."""
    run_ranks(ranks, train, VALUES | {"out": str(out)}, None, KILLED_AT, expect_failure=True)
    folder = next((out / "resume").iterdir())
    checkpoint = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()
    assert checkpoint.name == f"step-{SAVED_AT:06d}"
    assert max(read_ledger(folder)) >= KILLED_AT
    return checkpoint


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_on_the_same_ranks_the_end_is_bit_identical(tmp_path: Path, ranks: int) -> None:
    whole = run_ranks(ranks, train, VALUES | {"out": str(tmp_path / "whole")})[0]
    checkpoint = killed_run(ranks, tmp_path / "killed")
    resumed = run_ranks(ranks, train, VALUES | {"out": str(tmp_path / "killed")}, str(checkpoint))[0]
    assert resumed["weights"] == whole["weights"]
    assert resumed["results"] == whole["results"]
    assert read_losses(resumed["folder"]) == read_losses(whole["folder"])
    assert read_ledger(resumed["folder"]) == read_ledger(whole["folder"])


@pytest.mark.ranks
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1)])
def test_on_other_ranks_exactly_the_missing_samples_follow(tmp_path: Path, before: int, after: int) -> None:
    whole = run_ranks(1, train, VALUES | {"out": str(tmp_path / "whole")})[0]
    checkpoint = killed_run(before, tmp_path / "killed")
    resumed = run_ranks(after, train, VALUES | {"out": str(tmp_path / "killed")}, str(checkpoint))[0]
    assert read_ledger(resumed["folder"]) == read_ledger(whole["folder"])
    ours, theirs = read_losses(resumed["folder"]), read_losses(whole["folder"])
    assert [loss[:2] for loss in ours] == [loss[:2] for loss in theirs]
    assert [loss[2] for loss in ours] == pytest.approx([loss[2] for loss in theirs], abs=1e-3)


@pytest.mark.ranks
def test_half_precision_resumes_with_its_gradient_scale(tmp_path: Path) -> None:
    values = VALUES | {"precision": "fp16", "epochs": 2}
    whole = run_ranks(2, train, values | {"out": str(tmp_path / "whole")})[0]
    run_ranks(2, train, values | {"out": str(tmp_path / "cut")}, None, KILLED_AT, expect_failure=True)
    checkpoint = next((tmp_path / "cut" / "resume").glob(f"*/checkpoints/step-{SAVED_AT:06d}"))
    assert json.loads((checkpoint / "manifest.json").read_text())["progress"]["scaler"]["scale"] > 1
    resumed = run_ranks(2, train, values | {"out": str(tmp_path / "cut")}, str(checkpoint))[0]
    assert resumed["weights"] == whole["weights"]


@pytest.mark.ranks
def test_the_command_resumes_the_newest_run_after_kill_9_of_everything(tmp_path: Path, tutti: Tutti) -> None:
    words = ["train", "digits", "-n", "2", "epochs=3", "log.every_steps=5", "checkpoint.every_steps=7"]
    whole = tutti(*words, "out=whole")
    assert whole.code == 0, whole.all
    process = subprocess.Popen(
        [PYTHON, "-m", "tutti", *words, "out=cut"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _wait_for_step(tmp_path / "cut", 40)
    os.kill(process.pid, signal.SIGKILL)  # its ranks end with it
    process.wait()
    folder = next((tmp_path / "cut" / "digits").iterdir())
    _wait_until_gone(json.loads((folder / "record.json").read_text())["segments"][0]["process"])
    assert "interrupted" in tutti("runs", "--out", "cut").out
    resumed = tutti("train", "digits", "-n", "2", "out=cut", "--resume")
    assert resumed.code == 0, resumed.all
    assert "resumed from" in resumed.out
    assert read_losses(folder) == read_losses(next((tmp_path / "whole" / "digits").iterdir()))
    record = json.loads((folder / "record.json").read_text())
    assert record["state"] == "finished"
    assert len(record["segments"]) == 2


@pytest.mark.ranks
def test_a_finished_run_goes_on_with_more_epochs(tutti: Tutti, tmp_path: Path) -> None:
    assert tutti("train", "digits/mlp", "epochs=1").code == 0
    more = tutti("train", "digits/mlp", "--resume", "latest", "epochs=2")
    assert more.code == 0, more.all
    assert "epoch 2/2" in more.out
    folders = list((tmp_path / "runs" / "digits" / "mlp").iterdir())
    assert len(folders) == 1
    assert "epochs: 2" in (folders[0] / "config.yaml").read_text()


def _wait_for_step(out: Path, step: int) -> None:
    """Wait until a run has told a step; a run that never does ends in the test's deadline."""
    while True:
        for path in out.glob("*/*/metrics.jsonl"):
            if any(f'"step": {number}' in path.read_text() for number in range(step, step + 10)):
                return
        time.sleep(0.01)


def _wait_until_gone(process: int) -> None:
    while Path(f"/proc/{process}").exists():
        time.sleep(0.01)
