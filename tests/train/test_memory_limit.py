"""Ranks that may use little memory: what does not fit ends with what to set, and with that it trains."""

import json
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Finished, Tutti, command

from tutti.config.load import resolve
from tutti.memory.advice import needed_bytes
from tutti.memory.prediction import predict

COMMON = [
    "data.source=synthetic",
    "data.valid_samples=1",
    "batch.base=null",
    "batch.eval=1",
    "schedule.scaling=none",
    "runtime.device=cpu",
    "log.tensorboard=false",
    "checkpoint.every_epochs=null",
    "max_steps=1",
]
SMALL = [*COMMON, "data.crop=64", "data.box=64", "data.train_samples=32", "batch.global=32", "model.width=8"]
LARGE = [*COMMON, "data.crop=128", "data.box=128", "data.train_samples=6", "batch.global=6", "model.width=8"]


def train(folder: Path, limit_bytes: int, ranks: int, *words: str) -> Finished:
    """Train the U-Net on crops in processes that may have so much data each."""
    line = shlex.join([sys.executable, "-m", "tutti", "train", "nbody", "-n", str(ranks), *words])
    return command("bash", "-c", f"ulimit -d {limit_bytes >> 10}; exec {line}", cwd=folder)


def read_record(folder: Path) -> dict[str, Any]:
    [path] = folder.rglob("record.json")
    return json.loads(path.read_text())


def choose_limit(words: list[str]) -> int:
    """Between what one rank needs at least, and what each of two that share samples needs at most."""
    least, _ = needed_bytes(predict(resolve("nbody", words).config, 1, "cpu"))
    _, most = needed_bytes(predict(resolve("nbody", [*words, "parallel.space=2"]).config, 2, "cpu"))
    assert most < least
    return most + (least - most) // 4


def assert_fails_with_advice(done: Finished, folder: Path) -> None:
    assert done.code == 1, done.all
    assert done.err.count("error: ") == 1, done.all
    assert "Traceback" not in done.all
    error = done.err[done.err.index("error: ") :]
    assert "error: rank 0 on host " in error
    assert " ran out of memory " in error
    assert ", to which it is limited. Set batch.micro=" in error
    lines = [line.strip() for line in error.splitlines()[1:] if line.startswith("  with ")]
    assert lines[0].startswith("with batch.micro=")
    assert [line.split()[1].partition("=")[0] for line in lines[1:3]] == ["precision", "parallel.recompute"]
    assert lines[-1].startswith("with -n 2 parallel.space=2: ")
    assert lines[-1].endswith(", fits")
    record = read_record(folder)
    assert (record["state"], record["cause"], record["failed_rank"]) == ("failed", "out_of_memory", 0)
    assert record["memory"]["predicted_peak_bytes"] > record["memory"]["measured_peak_bytes"] > 0


def assert_trains(done: Finished, folder: Path, limit_bytes: int) -> None:
    assert done.code == 0, done.all
    record = read_record(folder)
    assert (record["state"], record["step"]) == ("finished", 1)
    assert 0 < record["memory"]["measured_peak_bytes"] < limit_bytes


@pytest.mark.slow
@pytest.mark.ranks
def test_one_rank_that_fails_is_told_what_to_set_and_two_ranks_train_with_it(tmp_path: Path) -> None:
    limit = choose_limit(SMALL)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    done = train(tmp_path / "one", limit, 1, *SMALL)
    assert_fails_with_advice(done, tmp_path / "one")
    assert "warning: a rank needs " in done.err  # before it started
    assert_trains(train(tmp_path / "two", limit, 2, *SMALL, "parallel.space=2"), tmp_path / "two", limit)


REFUSED = """
import os
from torch import nn

class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 10)

    def forward(self, images):
        if os.environ.get("RANK") == "1" and self.training:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")
        return super().forward(images.flatten(1))
"""


@pytest.mark.ranks
def test_the_launcher_tells_it_once_for_whichever_rank_fails(tutti: Tutti, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(REFUSED)
    done = tutti("train", "digits", "-n", "2", "model.name=own:Net", "log.tensorboard=false", PYTHONPATH=str(tmp_path))
    assert done.code == 1, done.all
    assert done.err.count("error: ") == 1
    assert "Traceback" not in done.all
    expected = (
        f"rank 1 on host {platform.node()} ran out of memory in step 1: an allocation of 4 KiB failed. A rank needs "
    )
    assert expected in done.err
    assert "That should suffice: set batch.micro=8, or see what else uses the memory." in done.err
    record = read_record(tmp_path)
    assert (record["state"], record["cause"]) == ("failed", "out_of_memory")
    assert record["failure"].startswith(expected)
    assert record["memory"]["predicted_peak_bytes"] > 0


@pytest.mark.slow
@pytest.mark.ranks
def test_crops_of_128_cells_train_on_2_and_4_ranks_where_one_fails(tmp_path: Path) -> None:
    limit = choose_limit(LARGE)
    for name in ("one", "two", "four"):
        (tmp_path / name).mkdir()
    assert_fails_with_advice(train(tmp_path / "one", limit, 1, *LARGE), tmp_path / "one")
    for name, ranks, space in (("two", 2, "2"), ("four", 4, "[2,2]")):
        done = train(tmp_path / name, limit, ranks, *LARGE, f"parallel.space={space}")
        assert_trains(done, tmp_path / name, limit)
