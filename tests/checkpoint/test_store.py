"""Checkpoints through torch.distributed.checkpoint: kept, pointed to, and never at the price of the run."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import read_losses, run_ranks, train

from tutti.errors import CheckpointError

pytestmark = pytest.mark.ranks

VALUES: dict[str, Any] = {
    "recipe": "kept",
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": [256, 128]},
    "optim": {"name": "adam", "lr": 1e-3},
    "batch": {"global": 64},
    "epochs": 4,
    "log": {"every_steps": 11, "tensorboard": False},
}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_the_newest_are_kept_and_latest_names_the_last(tmp_path: Path) -> None:
    checkpoint = {"every_steps": 10, "every_epochs": None, "keep": 3}
    folder = run_ranks(2, train, VALUES | {"out": str(tmp_path), "checkpoint": checkpoint})[0]["folder"]
    assert names(folder) == ["latest", "step-000070", "step-000080", "step-000088"]
    assert (folder / "checkpoints" / "latest").read_text() == "step-000088\n"


def test_the_best_epoch_is_kept_besides_the_newest(tmp_path: Path) -> None:
    values = VALUES | {
        "out": str(tmp_path),
        "batch": {"global": 64, "base": 1},
        "schedule": {"scaling": "linear", "warmup": "hold", "warmup_epochs": 3},  # then the rate is far too high
        "optim": {"name": "adam", "lr": 0.02},
        "checkpoint": {"every_epochs": 1, "keep": 1, "best": "accuracy"},
        "epochs": 6,
    }
    folder = run_ranks(1, train, values)[0]["folder"]
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    epochs = [event for event in events if event["event"] == "epoch"]
    best = max(epochs, key=lambda event: event["valid_accuracy"])
    assert best["step"] < epochs[-1]["step"], "the best epoch must not be the last for this test to mean anything"
    assert (folder / "checkpoints" / "best").read_text().strip() == f"step-{best['step']:06d}"
    assert names(folder) == ["best", "latest", f"step-{best['step']:06d}", f"step-{epochs[-1]['step']:06d}"]


def test_none_is_saved_when_the_recipe_says_so(tmp_path: Path) -> None:
    values = VALUES | {"out": str(tmp_path), "checkpoint": {"every_epochs": None}, "epochs": 1}
    assert names(run_ranks(1, train, values)[0]["folder"]) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that holds one checkpoint of this model (about 0.7 MB) but not two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1100k", "tmpfs", disk], check=False, capture_output=True
    )
    if os.geteuid() != 0 or mounted.returncode != 0:
        pytest.skip("making a small file system needs the right to mount one")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_loses_neither_the_run_nor_the_last_checkpoint(
    small_disk: Path, tmp_path: Path, ranks: int
) -> None:
    checkpoint = {"every_steps": 30, "every_epochs": None, "keep": 2}
    whole = run_ranks(ranks, train, VALUES | {"out": str(tmp_path / "whole"), "checkpoint": checkpoint})[0]
    ends = run_ranks(
        ranks, train, VALUES | {"out": str(small_disk), "checkpoint": checkpoint}, None, expect_failure=True
    )
    folder = next((small_disk / "kept").iterdir())
    assert all(isinstance(end, CheckpointError) and end.exit_code == 1 for end in ends), ends
    assert str(ends[0]) == (
        f"the run is trained to its end, step 88, but checkpoint {folder}/checkpoints/step-000088 was not saved: No "
        "space left on device. The newest checkpoint is of step 30. Free space, and resume with: tutti train "
        f"{folder}"
    )
    record = json.loads((folder / "record.json").read_text())
    assert (record["state"], record["cause"], record["step"]) == ("failed", "checkpoint", 88)
    assert read_losses(folder) == read_losses(whole["folder"]), "the run went on to its end"
    assert names(folder) == ["latest", "step-000030"]
    assert (folder / "checkpoints" / "latest").read_text() == "step-000030\n"
    log = (folder / "logs" / "rank-0.log").read_text()
    assert "step-000060 was not saved" in log
    assert "No space left on device" in log
    resumed = run_ranks(
        ranks, train, VALUES | {"checkpoint": {"every_epochs": None}}, str(folder / "checkpoints" / "step-000030")
    )[0]
    assert resumed["weights"] == whole["weights"]
    assert read_losses(folder) == read_losses(whole["folder"])
