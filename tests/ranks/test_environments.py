"""Who am I in this job: every launcher's variables, and environments that contradict themselves."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tutti.errors import LaunchError
from tutti.ranks.environments import discover
from tutti.ranks.environments.slurm import tasks_per_node
from tutti.ranks.placement import Placement

Env = dict[str, str]


def torchrun(rank: int, world: int, local: int, local_size: int, node: int = 0, agents: int = 1) -> Env:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(agents),
        "MASTER_ADDR": "first",
        "MASTER_PORT": "29501",
    }


def open_mpi(rank: int, world: int, local: int, local_size: int, job: str = "prterun-host-17@1") -> Env:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(world),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "PMIX_NAMESPACE": job,
    }


def hydra(rank: int, world: int, local: int, local_size: int) -> Env:
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(world),
        "MPI_LOCALRANKID": str(local),
        "MPI_LOCALNRANKS": str(local_size),
    }


def pals(rank: int, world: int, local: int, local_size: int, node: int = 0, job: str = "17-a") -> Env:
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(world),
        "PMI_LOCAL_RANK": str(local),
        "PMI_LOCAL_SIZE": str(local_size),
        "PALS_LOCAL_RANKID": str(local),
        "PALS_LOCAL_SIZE": str(local_size),
        "PALS_NODEID": str(node),
        "PALS_APID": job,
    }


def slurm(rank: int, world: int, local: int, sizes: str, node: int = 0, job: str = "7", step: str = "0") -> Env:
    return {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": step,
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_NTASKS": "99",
        "SLURM_STEP_NUM_TASKS": str(world),
        "SLURM_TASKS_PER_NODE": "99",
        "SLURM_STEP_TASKS_PER_NODE": sizes,
        "SLURM_NODELIST": "others",
        "SLURM_STEP_NODELIST": "node7",
    }


def place(found: Placement) -> tuple[str, int, int, int, int, int]:
    return found.launcher, found.rank, found.world_size, found.local_rank, found.local_size, found.node_rank


def refusal(env: Env) -> str:
    with pytest.raises(LaunchError) as caught:
        discover(env)
    return str(caught.value)


@pytest.mark.parametrize(
    ("env", "found", "address"),
    [
        ({}, ("none", 0, 1, 0, 1, 0), None),
        (torchrun(5, 8, 1, 4, node=1, agents=2), ("torchrun", 5, 8, 1, 4, 1), "first"),
        (open_mpi(3, 4, 3, 4), ("Open MPI", 3, 4, 3, 4, 0), "127.0.0.1"),
        (open_mpi(3, 4, 1, 2) | {"MASTER_ADDR": "first"}, ("Open MPI", 3, 4, 1, 2, 0), "first"),
        (hydra(1, 2, 1, 2), ("MPICH", 1, 2, 1, 2, 0), "127.0.0.1"),
        (hydra(2, 4, 0, 2) | {"MASTER_ADDR": "first"}, ("MPICH", 2, 4, 0, 2, 0), "first"),
        (pals(3, 4, 3, 4), ("MPICH", 3, 4, 3, 4, 0), "127.0.0.1"),
        (pals(6, 8, 2, 4, node=1) | {"MASTER_ADDR": "first"}, ("MPICH", 6, 8, 2, 4, 1), "first"),
        (slurm(0, 1, 0, "1"), ("Slurm", 0, 1, 0, 1, 0), "127.0.0.1"),
        (slurm(2, 4, 2, "4"), ("Slurm", 2, 4, 2, 4, 0), "127.0.0.1"),
        (slurm(7, 9, 3, "4(x2),1", node=1), ("Slurm", 7, 9, 3, 4, 1), "node7"),
        (slurm(8, 9, 0, "4(x2),1", node=2), ("Slurm", 8, 9, 0, 1, 2), "node7"),
        (slurm(5, 6, 2, "1,2,3", node=2), ("Slurm", 5, 6, 2, 3, 2), "node7"),
        (slurm(2, 4, 2, "4") | {"MASTER_ADDR": "first"}, ("Slurm", 2, 4, 2, 4, 0), "first"),
    ],
)
def test_each_launcher_says_who_this_rank_is(env: Env, found: tuple[object, ...], address: str | None) -> None:
    placement = discover(env)
    assert place(placement) == found
    assert placement.address == address


def test_torchrun_gives_the_port_and_a_port_in_the_environment_is_taken_by_all() -> None:
    assert discover(torchrun(0, 2, 0, 2)).port == 29501
    for env in (open_mpi(0, 2, 0, 2), hydra(0, 2, 0, 2), pals(0, 2, 0, 2), slurm(0, 2, 0, "2")):
        given = discover(env | {"MASTER_PORT": "4711"})
        assert (given.port, given.key) == (4711, None)


def test_a_script_that_sets_torchruns_variables_may_leave_out_the_sizes_of_the_host() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    assert place(discover(env)) == ("torchrun", 1, 2, 1, 2, 0)


def test_older_slurm_without_the_size_of_the_step_gives_that_of_the_job() -> None:
    env = slurm(1, 2, 1, "2") | {"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2"}
    del env["SLURM_STEP_NUM_TASKS"], env["SLURM_STEP_TASKS_PER_NODE"]
    assert place(discover(env)) == ("Slurm", 1, 2, 1, 2, 0)


def test_a_slurm_step_is_never_taken_for_one_on_a_single_host_without_word_of_its_hosts() -> None:
    env = slurm(1, 2, 0, "1(x2)", node=1)
    sizes = {key: value for key, value in env.items() if "TASKS_PER_NODE" not in key}
    assert refusal(sizes) == (
        "SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE is not set, "
        "although the other variables of its launcher are."
    )
    hosts = {key: value for key, value in env.items() if "NODELIST" not in key}
    assert refusal(hosts) == "SLURM_STEP_NODELIST is not set, although the other variables of its launcher are."


@pytest.mark.parametrize(("sizes", "node"), [("3", 0), ("1(x3)", 1), ("2", 1), ("1", 0)])
def test_sizes_that_do_not_fit_the_step_are_refused(sizes: str, node: int) -> None:
    assert refusal(slurm(1, 2, 0, sizes, node=node)) == (
        f"Slurm says SLURM_STEP_TASKS_PER_NODE={sizes} and host number {node} in a step of 2 ranks: expected "
        "sizes of all hosts that add up to it. Check for variables left over from another launcher."
    )


def test_a_slurm_batch_script_is_no_rank() -> None:
    assert discover({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}).launcher == "none"


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("4", [4]), ("4(x2),1", [4, 4, 1]), ("1,2(x3)", [1, 2, 2, 2]), ("16(x1)", [16]), ("10(x12)", [10] * 12)],
)
def test_slurms_short_form_of_sizes_is_read(text: str, sizes: list[int]) -> None:
    assert tasks_per_node(text) == sizes


@pytest.mark.parametrize("text", ["", "four", "4(x)", "4x2", "4,,1", "-1"])
def test_other_forms_of_sizes_are_refused(text: str) -> None:
    with pytest.raises(
        LaunchError, match=re.escape(f"SLURM_STEP_TASKS_PER_NODE={text!r}: expected sizes such as '4(x2")
    ):
        tasks_per_node(text)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node7", "node7"),
        ("gpu[3-4],cpu1", "gpu3"),
        ("gpu-a[007-128,200]", "gpu-a007"),
        ("n[5,9]", "n5"),
        ("rack[1-2]n[03-04].cluster", "rack1n03.cluster"),
        ("login1,gpu[1-2]", "login1"),
    ],
)
def test_the_first_host_of_slurms_short_form_is_found(hosts: str, first: str) -> None:
    env = slurm(2, 3, 0, "1(x3)", node=2)
    assert discover(env | {"SLURM_STEP_NODELIST": hosts, "SLURM_NODELIST": "other[1-9]"}).address == first
    del env["SLURM_STEP_NODELIST"]
    assert discover(env | {"SLURM_NODELIST": hosts}).address == first


@pytest.mark.parametrize("hosts", ["gpu[3-4", "gpu[]", ",gpu1", "gpu 1", "gpu[1-2]]"])
def test_lists_of_hosts_in_no_known_form_are_refused_with_a_way_out(hosts: str) -> None:
    env = slurm(2, 4, 0, "2(x2)", node=1) | {"SLURM_STEP_NODELIST": hosts}
    assert refusal(env) == (
        f"the list of hosts {hosts!r}: expected Slurm's form, such as 'n[1-4],m1'. Set MASTER_ADDR to the first host."
    )
    assert discover(env | {"MASTER_ADDR": "gpu3"}).address == "gpu3"


def test_under_mpirun_rank_0_is_on_the_first_host_of_the_job_and_not_of_the_daemons_step() -> None:
    daemon = slurm(0, 3, 0, "1(x3)") | {"SLURM_STEP_NODELIST": "n[2-4]", "SLURM_JOB_NODELIST": "n[1-4]"}
    assert discover(daemon | open_mpi(2, 8, 0, 2)).address == "n1"


def test_under_hydra_rank_0_is_on_the_first_host_of_the_daemons_step() -> None:
    daemon = slurm(0, 2, 0, "1(x2)") | {"SLURM_STEP_NODELIST": "n[3-4]", "SLURM_JOB_NODELIST": "n[1-4]"}
    assert discover(daemon | hydra(2, 4, 0, 2)).address == "n3"
    without_step = {key: value for key, value in daemon.items() if "STEP" not in key}
    assert discover(without_step | hydra(2, 4, 0, 2)).address == "n1"


@pytest.mark.parametrize(
    ("inner", "launcher"),
    [
        (torchrun(1, 2, 1, 2), "torchrun"),
        (open_mpi(1, 2, 1, 2), "Open MPI"),
        (hydra(1, 2, 1, 2), "MPICH"),
        (pals(1, 2, 1, 2), "MPICH"),
    ],
)
def test_a_launcher_inside_slurm_speaks_for_its_ranks(inner: Env, launcher: str) -> None:
    daemon = slurm(0, 1, 0, "1")
    assert place(discover(daemon | inner))[:3] == (launcher, 1, 2)


def test_srun_with_pmi_is_slurm() -> None:
    assert discover(slurm(1, 2, 1, "2") | {"PMI_RANK": "1", "PMI_SIZE": "2"}).launcher == "Slurm"


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        (torchrun(1, 2, 1, 2) | open_mpi(1, 2, 1, 2), "torchrun"),
        (torchrun(1, 2, 1, 2) | hydra(1, 2, 1, 2), "torchrun"),
        (open_mpi(1, 2, 1, 2) | hydra(1, 2, 1, 2), "Open MPI"),
    ],
)
def test_the_same_rank_may_be_told_twice(env: Env, launcher: str) -> None:
    assert place(discover(env))[:3] == (launcher, 1, 2)


@pytest.mark.parametrize("outer", [open_mpi(1, 2, 0, 1), hydra(1, 2, 0, 1), pals(1, 2, 0, 1, node=1)])
def test_torchruns_agents_may_be_started_by_mpiexec(outer: Env) -> None:
    inner = torchrun(6, 8, 2, 4, node=1, agents=2)
    assert place(discover(outer | inner)) == ("torchrun", 6, 8, 2, 4, 1)
    assert "two launchers at once" in refusal(outer | inner | {"GROUP_RANK": "0"})
    assert "two launchers at once" in refusal(outer | inner | {"GROUP_WORLD_SIZE": "3"})


@pytest.mark.parametrize(
    ("env", "first", "second"),
    [
        (torchrun(0, 2, 0, 2) | open_mpi(1, 2, 1, 2), "torchrun says rank 0 of 2", "Open MPI says rank 1 of 2"),
        (torchrun(0, 1, 0, 1) | hydra(0, 2, 0, 2), "torchrun says rank 0 of 1", "MPICH says rank 0 of 2"),
        (open_mpi(0, 1, 0, 1) | pals(0, 4, 0, 4), "Open MPI says rank 0 of 1", "MPICH says rank 0 of 4"),
    ],
)
def test_two_launchers_that_disagree_are_refused(env: Env, first: str, second: str) -> None:
    assert refusal(env) == (
        f"two launchers at once: {first}, {second}. "
        "Start the ranks with one of them, or unset the variables of the other."
    )


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (torchrun(2, 2, 0, 2), "torchrun says rank 2 of 2: expected 0 to 1."),
        (torchrun(-1, 2, 0, 2), "torchrun says rank -1 of 2: expected 0 to 1."),
        (torchrun(1, 2, 2, 2), "torchrun says local rank 2 of 2: expected 0 to 1."),
        (torchrun(1, 2, 1, 4), "torchrun says 4 ranks on this host, but 2 in all."),
        (open_mpi(4, 4, 0, 4), "Open MPI says rank 4 of 4: expected 0 to 3."),
        (pals(0, 2, 0, 4) | {"MASTER_ADDR": "here"}, "MPICH says 4 ranks on this host, but 2 in all."),
        (slurm(3, 2, 0, "2"), "Slurm says rank 3 of 2: expected 0 to 1."),
        (slurm(0, 2, 1, "1(x2)"), "Slurm says local rank 1 of 1: expected 0 to 0."),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(env: Env, message: str) -> None:
    found = refusal(env)
    assert found.startswith(message)
    assert "Check for variables left over from another launcher" in found


@pytest.mark.parametrize(
    ("env", "name"),
    [
        (torchrun(1, 2, 1, 2), "RANK"),
        (torchrun(1, 2, 1, 2), "WORLD_SIZE"),
        (torchrun(1, 2, 1, 2), "MASTER_PORT"),
        (open_mpi(1, 2, 1, 2), "OMPI_COMM_WORLD_LOCAL_SIZE"),
        (hydra(1, 2, 1, 2), "PMI_SIZE"),
        (pals(1, 2, 1, 2), "PALS_NODEID"),
        (slurm(1, 2, 1, "2"), "SLURM_LOCALID"),
    ],
)
@pytest.mark.parametrize("text", ["two", "1.0", ""])
def test_text_instead_of_a_number_is_refused(env: Env, name: str, text: str) -> None:
    assert refusal(env | {name: text}) == f"{name}={text!r}: expected a whole number from the launcher."


@pytest.mark.parametrize(
    ("env", "missing", "named"),
    [
        (torchrun(1, 2, 1, 2), ["WORLD_SIZE"], "WORLD_SIZE"),
        (torchrun(1, 2, 1, 2), ["LOCAL_RANK"], "LOCAL_RANK"),
        (torchrun(1, 2, 1, 2), ["MASTER_PORT"], "MASTER_PORT"),
        (open_mpi(1, 2, 1, 2), ["OMPI_COMM_WORLD_SIZE"], "OMPI_COMM_WORLD_SIZE"),
        (open_mpi(1, 2, 1, 2), ["OMPI_COMM_WORLD_LOCAL_RANK"], "OMPI_COMM_WORLD_LOCAL_RANK"),
        (hydra(1, 2, 1, 2), ["PMI_SIZE"], "PMI_SIZE"),
        (hydra(1, 2, 1, 2), ["MPI_LOCALNRANKS"], "MPI_LOCALNRANKS or PMI_LOCAL_SIZE or PALS_LOCAL_SIZE"),
        (slurm(1, 2, 1, "2"), ["SLURM_LOCALID"], "SLURM_LOCALID"),
        (slurm(1, 2, 1, "2"), ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"], "SLURM_STEP_NUM_TASKS or SLURM_NTASKS"),
    ],
)
def test_a_variable_that_its_launcher_should_have_set_is_named(env: Env, missing: list[str], named: str) -> None:
    rest = {key: value for key, value in env.items() if key not in missing}
    assert refusal(rest) == f"{named} is not set, although the other variables of its launcher are."


@pytest.mark.parametrize(("env", "launcher"), [(open_mpi(2, 4, 0, 2), "Open MPI"), (hydra(2, 4, 0, 2), "MPICH")])
def test_several_hosts_without_word_of_the_first_are_refused(env: Env, launcher: str, tmp_path: Path) -> None:
    assert refusal(env) == (
        f"{launcher} has started ranks on several hosts and none of MASTER_ADDR, PBS_NODEFILE and SLURM_JOB_NODELIST "
        "says where rank 0 is. Set MASTER_ADDR to the name of its host."
    )
    hosts = tmp_path / "hosts"
    hosts.write_text("first.cluster\nsecond.cluster\n")
    assert discover(env | {"PBS_NODEFILE": str(hosts)}).address == "first.cluster"


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "::1"])
@pytest.mark.parametrize("env", [open_mpi(2, 4, 0, 2), hydra(2, 4, 0, 2), slurm(2, 4, 0, "2(x2)", node=1)])
def test_ranks_on_several_hosts_never_look_for_the_first_on_their_own(env: Env, address: str) -> None:
    message = refusal(env | {"MASTER_ADDR": address})
    assert message.startswith(f"MASTER_ADDR={address}, but ")
    assert message.endswith(
        " has started ranks on several hosts, and on each that is another one. "
        "Unset it to have the first host of the job taken, or set it to the name of rank 0's host."
    )


def test_a_list_of_hosts_that_cannot_be_read_is_refused_in_words(tmp_path: Path) -> None:
    message = refusal(open_mpi(2, 4, 0, 2) | {"PBS_NODEFILE": str(tmp_path / "absent")})
    assert "absent" in message and "MASTER_ADDR" in message
    (tmp_path / "empty").write_text("")
    message = refusal(open_mpi(2, 4, 0, 2) | {"PBS_NODEFILE": str(tmp_path / "empty")})
    assert message.endswith("names no host in its first line. Set MASTER_ADDR to the first host.")


def test_every_rank_of_a_job_derives_the_same_port_and_another_job_another() -> None:
    jobs: list[list[Env]] = [
        [slurm(r, 4, r % 2, "2(x2)", node=r // 2, job=job, step=step) for r in range(4)]
        for job, step in (("7", "0"), ("7", "1"), ("8", "0"))
    ]
    jobs += [[env | {"SLURM_RESTART_COUNT": "1"} for env in jobs[0]]]
    jobs += [[open_mpi(r, 4, r, 4, job=job) for r in range(4)] for job in ("prterun-a-17@1", "prterun-a-18@1")]
    jobs += [[pals(r, 4, r, 4, job=job) for r in range(4)] for job in ("one", "two")]
    jobs += [
        [hydra(r, 4, r % 2, 2) | {"PBS_JOBID": job, "MASTER_ADDR": "first"} for r in range(4)] for job in ("a", "b")
    ]
    ports = [{discover(env).port for env in job} for job in jobs]
    assert all(len(found) == 1 for found in ports)
    keys = [{discover(env).key for env in job} for job in jobs]
    assert all(len(found) == 1 for found in keys) and len({key for found in keys for key in found}) == len(jobs)
    numbers = [port for found in ports for port in found if port]
    assert len(set(numbers)) == len(jobs)
    assert all(1024 < port < 32_768 for port in numbers)


@pytest.mark.system
def test_the_ranks_of_one_hydra_derive_one_port_and_those_of_another_another(tmp_path: Path) -> None:
    proxy = tmp_path / "hydra_pmi_proxy"
    code = "import os; from tutti.ranks.environments import discover; print(discover(os.environ).port)"
    rank = f"{sys.executable} -c '{code}'"
    proxy.write_text(f'#!/bin/sh\nPMI_RANK=0 {rank}\nPMI_RANK=1 sh -c "{rank}; true"\n')
    proxy.chmod(0o755)
    env = hydra(0, 2, 0, 2) | {"PATH": "/usr/bin:/bin"}
    ports = set()
    for _ in range(3):
        done = subprocess.run([proxy], env=env, capture_output=True, text=True, check=True)
        first, second = done.stdout.split()
        assert first == second
        ports.add(first)
    assert len(ports) > 1
