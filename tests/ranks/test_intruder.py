"""An intruder without the secret disturbs running ranks in many ways: they end with the same result."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from intruder import Intruder, listening_ports
from rank_jobs import run_ranks, train
from waiting import wait_until

from tutti.horovod import basics
from tutti.horovod.torch import ops
from tutti.horovod.torch.collectives import Sum
from tutti.train import job

pytestmark = pytest.mark.ranks
VALUES: dict[str, Any] = {
    "recipe": "disturbed",
    "data": {"name": "digits"},
    "model": {"name": "mlp"},
    "optim": {"name": "adamw", "lr": 2e-3},
    "batch": {"global": 64},
    "epochs": 1,
    "log": {"every_steps": 5, "tensorboard": False},
}
LEAST_ATTEMPTS = 25


def stay_until_attacked(folder: Path) -> None:
    """Tell who this rank is, and wait, with all of its threads at work, until the intruder has tried everything."""
    (folder / f"rank-{os.getpid()}").touch()
    while not (folder / "attacked").exists():
        time.sleep(0.01)


def train_disturbed(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    end_step = job.Job.end_step

    def end_step_and_stay(self: job.Job, loss: Any) -> None:
        end_step(self, loss)
        if self.step == 8:
            stay_until_attacked(folder)

    job.Job.end_step = end_step_and_stay
    return train(values)


def reduce_disturbed(folder: Path) -> list[float]:
    basics.init()
    sums = []
    for step in range(20):
        handles = [ops.allreduce_async(torch.full((3,), step + basics.rank()), name=f"x{i}", op=Sum) for i in range(4)]
        sums.append(sum(ops.synchronize(handle).sum().item() for handle in handles))
        if step == 8:
            stay_until_attacked(folder)
    basics.shutdown()
    return sums


class Attack:
    """An intruder in a thread, which begins when the ranks are there."""

    def __init__(self, ranks: int, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.ranks = folder, ranks
        self.intruder: Intruder | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            wait_until(lambda: len(list(self.folder.glob("rank-*"))) == self.ranks, lambda: "no ranks came")
            processes = [int(path.name.removeprefix("rank-")) for path in self.folder.glob("rank-*")]
            self.intruder = Intruder(listening_ports(processes), self.folder)
            self.intruder.attack()
        finally:
            (self.folder / "attacked").touch()

    def end(self) -> None:
        """Wait for the intruder, and check that it has tried enough and achieved nothing."""
        self.thread.join()
        assert self.intruder is not None
        self.intruder.close()
        assert len(self.intruder.ports) >= 2, "the hub and the store listen"
        assert len(set(self.intruder.tried)) >= LEAST_ATTEMPTS
        assert not self.intruder.executed.exists(), "a process of the job ran what the intruder sent"


def test_ranks_that_train_end_with_the_same_result(tmp_path: Path) -> None:
    undisturbed = run_ranks(2, train, VALUES | {"out": str(tmp_path / "alone")})
    attack = Attack(2, tmp_path / "attack")
    disturbed = run_ranks(2, train_disturbed, VALUES | {"out": str(tmp_path / "disturbed")}, attack.folder)
    attack.end()
    for one, other in zip(undisturbed, disturbed, strict=True):
        assert other["weights"] == pytest.approx(one["weights"], abs=1e-6)
        assert other["results"] == pytest.approx(one["results"], abs=1e-6)


def test_a_horovod_job_ends_with_the_same_result(tmp_path: Path) -> None:
    attack = Attack(2, tmp_path / "attack")
    sums = run_ranks(2, reduce_disturbed, attack.folder)
    attack.end()
    assert sums == [[12.0 * (2 * step + 1) for step in range(20)]] * 2
