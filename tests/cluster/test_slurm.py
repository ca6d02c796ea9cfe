"""Ranks under a real srun on four nodes: who they are, how they meet, and what is said when they cannot."""

from pathlib import Path

import pytest
from slurm import WORK, Cluster, Told, told

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("slurm")]


def test_ranks_find_their_places_in_every_kind_of_step(cluster: Cluster, tmp_path: Path) -> None:
    steps = f"srun {WORK} who > unequal; srun --mpi=pmi2 {WORK} who > pmi2"
    cluster.finish(steps, tmp_path, "-N4", "-n8")
    steps = f"srun -N1 -n2 -w n3 {WORK} who > one_node; srun -N2 -n3 -w n3,n4 {WORK} who > two_nodes"
    cluster.finish(steps, tmp_path, "-N4", "--ntasks-per-node=2")
    for name in ("unequal", "pmi2"):  # Slurm fills the first nodes
        ranks = told((tmp_path / name).read_text())
        assert [(r["host"], r["local_rank"], r["local_size"], r["node_rank"]) for r in ranks] == [
            *(("n1", local, 4, 0) for local in range(4)),
            *(("n2", local, 2, 1) for local in range(2)),
            ("n3", 0, 1, 2),
            ("n4", 0, 1, 3),
        ]
        assert {(r["launcher"], r["world_size"], r["address"]) for r in ranks} == {("Slurm", 8, "n1")}
    ranks = told((tmp_path / "one_node").read_text())
    assert [(r["host"], r["local_rank"], r["local_size"], r["address"]) for r in ranks] == [
        ("n3", 0, 2, "127.0.0.1"),
        ("n3", 1, 2, "127.0.0.1"),
    ]
    ranks = told((tmp_path / "two_nodes").read_text())
    assert [(r["host"], r["local_size"], r["node_rank"], r["address"]) for r in ranks] == [
        ("n3", 2, 0, "n3"),
        ("n3", 2, 0, "n3"),
        ("n4", 1, 1, "n3"),
    ]


def test_an_allocation_of_several_parts_is_one_world(cluster: Cluster, tmp_path: Path) -> None:
    words = ["-N1", "-n1", ":", "-N1", "-n2", "srun", "--het-group=0,1", *WORK.split(), "who"]
    ranks = told(cluster.run("salloc", *words, cwd=tmp_path).out)
    assert [(r["host"], r["local_size"], r["world_size"], r["address"]) for r in ranks] == [
        ("n1", 1, 3, "n1"),
        ("n2", 2, 3, "n1"),
        ("n2", 2, 3, "n1"),
    ]


def test_jobs_on_the_same_nodes_meet_apart_from_each_other_and_from_strangers(cluster: Cluster, tmp_path: Path) -> None:
    script = f"""
    if [ $SLURM_ARRAY_TASK_ID = 1 ]; then
      SLURM_PROCID=0 SLURM_NODEID=0 {WORK} stranger ready & while [ ! -e ready ]; do sleep 0.1; done
    fi
    srun {WORK} together 60; code=$?; [ -z "$!" ] || kill $!; exit $code
    """
    array = cluster.submit(script, tmp_path, "--array=1-2", "-N2", "-n2", "-w", "n1,n2")
    jobs = [cluster.wait(f"{array}_{task}")["JobId"] for task in (1, 2)]
    ports = set()
    for job in jobs:
        ranks = told(cluster.output(job, tmp_path))
        assert [(r["host"], r.get("sum"), r.get("interface")) for r in ranks] == [("n1", 1, "eth0"), ("n2", 1, "eth0")]
        ports |= {r["port"] for r in ranks}
    assert len(ports) == 2


@pytest.fixture(scope="module")
def mistakes(one_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    """What two ranks on two nodes say to one mistake after the other: one start of torch for all of them."""
    text = one_cluster.finish(f"srun {WORK} mistakes", tmp_path_factory.mktemp("mistakes"), "-N2", "-n2")
    lines = told(text)
    return {wrong: [line for line in lines if line["wrong"] == wrong] for wrong in {line["wrong"] for line in lines}}


def test_hosts_whose_own_names_lead_to_themselves_meet_over_the_network(mistakes: dict[str, Told]) -> None:
    assert [(r["host"], r["sum"], r["interface"]) for r in mistakes["nothing"]] == [
        ("n1", 1, "eth0"),
        ("n2", 1, "eth0"),
    ]


def test_an_interface_that_is_not_there_is_named_by_all_ranks_with_those_that_are(mistakes: dict[str, Told]) -> None:
    for rank in mistakes["no such interface"]:
        assert (rank["error"], rank["agreed"]) == ("LaunchError", True)
        assert rank["message"] == (
            "rank 1 on host n2: GLOO_SOCKET_IFNAME=nosuch, but there is no such interface with an address. Set "
            "GLOO_SOCKET_IFNAME to the interface that connects the hosts, or unset it; there are lo (127.0.0.1, ::1), "
            "eth0 (10.80.0.2), docker0 (172.17.0.1)."
        )


def test_the_loopback_is_refused_between_hosts(mistakes: dict[str, Told]) -> None:
    for rank in mistakes["loopback"]:
        assert rank["message"].startswith("rank 0 on host n1: GLOO_SOCKET_IFNAME=lo, but other hosts cannot reach it.")
        assert rank["message"].endswith(" (And 1 more of 2 ranks.)")


def test_an_interface_that_other_hosts_cannot_reach_is_named_with_the_address(mistakes: dict[str, Told]) -> None:
    for rank in mistakes["same address everywhere"]:
        assert rank["message"].startswith("rank 0 on host n1: cannot reach rank 1 on host n2 at 172.17.0.1:")
        assert ", its docker0: connection refused. Set GLOO_SOCKET_IFNAME to the interface" in rank["message"]
        assert "eth0 (10.80.0.1)" in rank["message"]


def test_a_first_host_that_does_not_answer_is_named_with_its_port(mistakes: dict[str, Told]) -> None:
    first, second = mistakes["no such host"]
    assert "waited 4 s at the start of the run: missing rank 1, arrived rank 0 of 2." in first["message"]
    assert second["error"] == "DeadlineError"
    assert second["message"].startswith("rank 1 on host n2 could not reach rank 0 within 4 s at 10.80.0.99:")
    assert "Check that rank 0 runs on host 10.80.0.99, that the network between the hosts is open" in second["message"]


def test_a_given_port_that_is_taken_is_named_by_rank_0_and_missed_by_the_others(mistakes: dict[str, Told]) -> None:
    first, second = mistakes["port in use"]
    assert first["error"] == "LaunchError"
    assert first["message"] == (
        f"rank 0 cannot listen on n1:{first['port']}: the port is in use. Set MASTER_PORT to a free one, on all ranks."
    )
    assert (
        "rank 1 on host n2 could not reach rank 0 within 4 s at n1:1 (connection refused). Check that rank 0 runs on"
        in second["message"]
    )
