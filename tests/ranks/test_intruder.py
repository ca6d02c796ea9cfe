"""An intruder without the secret disturbs running ranks in many ways: they end with the same result."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import intruder
import pytest
import torch
from intruder import Intrusion, intruding, record_sent, recorded_in
from rank_jobs import run_ranks, train
from waiting import wait_until

from tutti.horovod import basics
from tutti.horovod.torch import ops
from tutti.horovod.torch.collectives import Sum
from tutti.ranks.environments import open_mpi
from tutti.ranks.rendezvous import derive_ports, rendezvous_ports
from tutti.ranks.store import start_secret
from tutti.train import job

VALUES: dict[str, Any] = {
    "recipe": "disturbed",
    "data": {"name": "digits"},
    "model": {"name": "mlp"},
    "optim": {"name": "adamw", "lr": 2e-3},
    "batch": {"global": 64},
    "epochs": 1,
    "log": {"every_steps": 5, "tensorboard": False},
}
# What must be among the attempts, whatever else is.
LEAST = {
    "join as rank 0", "join with a negative rank", "join with 64 slots and order -1", "stop", "crash the leader",
    "answer first at the rendezvous", "guessed proofs", "reflected proof of another connection",
    "replay of recorded messages", "flood of connections", "hold connections open", "resets", "1 GB", "deep JSON",
    "a pickle as a message", "write every key", "delete every key", "push pickles into every queue",
}  # fmt: skip


def variables(rank: int, name: str) -> dict[str, str]:
    """What mpirun tells a rank: no port, so that ranks look for each other where their secret says."""
    numbers = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    return {f"OMPI_COMM_WORLD_{key}": str(value) for key, value in numbers.items()} | {"PMIX_NAMESPACE": name}


def likely_ports(name: str) -> list[int]:
    """The ports that user and job suggest, and, if the intruder were lucky, the first two that ranks will try."""
    placement = open_mpi.read(variables(0, name))
    assert placement.key is not None
    return [*derive_ports(placement.key), *rendezvous_ports(start_secret(placement))[:2]]


def begin_rank(folder: Path) -> None:
    """Become a rank of mpirun, and have what it sends recorded."""
    rank = int(os.environ["RANK"])
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(key, None)
    os.environ.update(variables(rank, str(folder)))
    record_sent(folder)


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
    begin_rank(folder)
    return train(values)


def reduce_disturbed(folder: Path) -> list[float]:
    begin_rank(folder)
    basics.init()
    sums = []
    for step in range(20):
        handles = [ops.allreduce_async(torch.full((3,), step + basics.rank()), name=f"x{i}", op=Sum) for i in range(4)]
        sums.append(sum(ops.synchronize(handle).sum().item() for handle in handles))
        if step == 8:
            stay_until_attacked(folder)
    basics.shutdown()
    return sums


def attack(intrusion: Intrusion, folder: Path) -> None:
    """Attack two ranks as soon as they stay."""
    try:
        wait_until(lambda: len(list(folder.glob("rank-*"))) == 2, lambda: "no ranks came")
        ranks = [int(path.name.removeprefix("rank-")) for path in folder.glob("rank-*")]
        intrusion.attack(ranks, recorded_in(folder))
    finally:
        (folder / "attacked").touch()


def run_disturbed(tmp_path: Path, work: Any, *arguments: Any) -> list[Any]:
    """What two ranks return while an intruder is there."""
    folder = tmp_path / "ranks"
    folder.mkdir()
    with intruding(tmp_path / "intruder", likely_ports(str(folder))) as intrusion:
        thread = threading.Thread(target=attack, args=(intrusion, folder), daemon=True)
        thread.start()
        found = run_ranks(2, work, *arguments, folder)
        thread.join()
    return found


@pytest.mark.ranks
def test_ranks_that_train_end_with_the_same_result(tmp_path: Path) -> None:
    undisturbed = run_ranks(2, train, VALUES | {"out": str(tmp_path / "alone")})
    disturbed = run_disturbed(tmp_path, train_disturbed, VALUES | {"out": str(tmp_path / "disturbed")})
    for one, other in zip(undisturbed, disturbed, strict=True):
        assert other["weights"] == pytest.approx(one["weights"], abs=1e-6)
        assert other["results"] == pytest.approx(one["results"], abs=1e-6)


@pytest.mark.ranks
def test_a_horovod_job_ends_with_the_same_result(tmp_path: Path) -> None:
    sums = run_disturbed(tmp_path, reduce_disturbed)
    assert sums == [[12.0 * (2 * step + 1) for step in range(20)]] * 2


def test_the_intruder_tries_at_least_25_things_against_all_four_kinds_of_job() -> None:
    assert len(intruder.NAMES) >= intruder.LEAST_ATTEMPTS == 25
    assert intruder.NAMES >= LEAST
    tests = Path(__file__).parent.parent
    for path, kinds in (
        ("ranks/test_intruder.py", ("run_disturbed(tmp_path, train_disturbed", "run_disturbed(tmp_path, reduce_dist")),
        ("launch/elastic/test_elastic_train.py", ("with intruding(",)),
        ("horovod/run/test_horovodrun.py", ("intruding(tmp_path",)),
    ):
        text = (tests / path).read_text()
        assert all(kind in text for kind in kinds), path
