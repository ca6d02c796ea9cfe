"""Ranks that mpirun and mpiexec start on the nodes of a real Slurm's allocation."""

import shutil
from pathlib import Path

import pytest
from slurm import TUTTI, WORK, Cluster, record_of, told

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("slurm")]

LAUNCHERS = {"Open MPI": "mpirun.openmpi -np", "MPICH": "mpiexec.mpich -n"}
TWO_BY_TWO = ("-N2", "--ntasks-per-node=2")


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> str:
    program = LAUNCHERS[request.param].split()[0]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed here")
    return request.param


def test_ranks_on_two_nodes_find_their_places(cluster: Cluster, launcher: str, tmp_path: Path) -> None:
    cluster.finish(f"{LAUNCHERS[launcher]} 3 {WORK} who > who", tmp_path, *TWO_BY_TWO)
    ranks = told((tmp_path / "who").read_text())
    assert [(r["host"], r["local_rank"], r["local_size"]) for r in ranks] == [("n1", 0, 2), ("n1", 1, 2), ("n2", 0, 1)]
    assert {(r["launcher"], r["world_size"], r["address"]) for r in ranks} == {(launcher, 3, "n1")}


@pytest.mark.parametrize("launcher", ["Open MPI", pytest.param("MPICH", marks=pytest.mark.slow)], indirect=True)
def test_ranks_on_two_nodes_train_the_digits(cluster: Cluster, launcher: str, tmp_path: Path) -> None:
    line = f"{LAUNCHERS[launcher]} 3 {TUTTI} train digits batch.global=96 batch.micro=32 epochs=3"
    text = cluster.finish(line, tmp_path, *TWO_BY_TWO)
    record = record_of(tmp_path)
    assert (record["state"], record["ranks"], record["segments"][0]["launcher"]) == ("finished", 3, launcher)
    assert record["results"]["valid_accuracy"] > 0.9
    assert text.count("run folder:") == 1, "rank 0 speaks for all"


def test_two_launches_at_once_in_one_allocation_are_two_worlds(cluster: Cluster, launcher: str, tmp_path: Path) -> None:
    line = f"{LAUNCHERS[launcher]} 4 {WORK} who"
    script = f"{line} > first & one=$!; {line} > second & two=$!; wait $one && wait $two && touch both; wait"
    printed = ""
    for _ in range(3):  # on a busy machine one of two mpiruns may fail by itself, before it has started a rank
        printed = cluster.finish(script, tmp_path, *TWO_BY_TWO, "--overcommit")
        if (tmp_path / "both").exists():
            break
    assert (tmp_path / "both").exists(), printed
    worlds = [told((tmp_path / name).read_text()) for name in ("first", "second")]
    assert [len(ranks) for ranks in worlds] == [4, 4]
    keys = [{rank["key"] for rank in ranks} for ranks in worlds]
    assert [len(found) for found in keys] == [1, 1] and keys[0] != keys[1]


def test_rank_0_on_another_host_than_the_first_says_so(cluster: Cluster, tmp_path: Path) -> None:
    if shutil.which("mpirun.openmpi") is None:
        pytest.skip("mpirun.openmpi is not installed here")
    start = f"mpirun.openmpi --host n2,n3 -np 2 {WORK} together 3"
    text = cluster.finish(start, tmp_path, "-N3", "-n3")
    [refusal] = [line["message"] for line in told(text) if line["rank"] == 0 and "error" in line]
    assert refusal == (
        "rank 0 runs on host n2, but the first host of this Open MPI job is n1, where the other ranks look for it. "
        "Set MASTER_ADDR=n2 for all ranks."
    )


def test_hydras_ranks_begin_on_the_first_node_whatever_the_order_of_its_hosts(cluster: Cluster, tmp_path: Path) -> None:
    if shutil.which("mpiexec.mpich") is None:
        pytest.skip("mpiexec.mpich is not installed here")
    text = cluster.finish(f"mpiexec.mpich -hosts n3,n2 -n 2 {WORK} who", tmp_path, "-N3", "-n3")
    assert [(rank["host"], rank["address"]) for rank in told(text)] == [("n2", "n2"), ("n3", "n2")]
