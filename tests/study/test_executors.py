"""How the ranks of a point are started, by the environment variables of an allocation."""

import os
import sys
from pathlib import Path

import pytest

from tutti.errors import LaunchError
from tutti.study.executors import (
    Local,
    MpiSteps,
    SlurmSteps,
    check_at_once,
    check_capacity,
    choose_executor,
    command_line,
    step_environment,
)

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "SLURM_TASKS_PER_NODE": "2(x4)", "SLURM_NTASKS_PER_NODE": "2"}
FOLDER = Path("runs/points/n4-r1")


def typed(executor, ranks: int) -> str:
    return command_line(executor.command(FOLDER, ranks))


def test_ranks_are_started_here_without_an_allocation() -> None:
    executor = choose_executor({})
    assert executor == Local()
    assert typed(executor, 4) == "tutti train runs/points/n4-r1 -n 4"
    assert executor.command(FOLDER, 4)[:3] == [sys.executable, "-m", "tutti"]


def test_one_node_is_this_machine_unless_this_is_the_login_host() -> None:
    one = SLURM | {"SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "8"}
    assert choose_executor(one | {"SLURMD_NODENAME": "n1"}) == Local()
    assert choose_executor(one) == SlurmSteps((8,))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (1, "--nodes=1 --ntasks=1 --ntasks-per-node=1"),
        (4, "--nodes=2 --ntasks=4 --ntasks-per-node=2"),
        (5, "--nodes=3 --ntasks=5 --kill"),
        (8, "--nodes=4 --ntasks=8 --ntasks-per-node=2"),
    ],
)
def test_points_are_steps_of_a_slurm_job_on_as_few_nodes_as_they_need(ranks: int, expected: str) -> None:
    line = typed(choose_executor(SLURM), ranks)
    assert line.startswith(f"srun {expected}")
    assert line.endswith(" tutti train runs/points/n4-r1")


def test_ranks_of_a_node_may_be_said() -> None:
    executor = choose_executor(SLURM | {"SLURM_CPUS_PER_TASK": "4"}, 1)
    assert executor == SlurmSteps((1, 1, 1, 1), None)
    assert choose_executor(SLURM | {"SLURM_CPUS_PER_TASK": "4"}) == SlurmSteps((2, 2, 2, 2), 4)
    assert typed(executor, 4).startswith("srun --nodes=4 --ntasks=4 --ntasks-per-node=1")


def test_elsewhere_mpirun_knows_the_hosts(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a\na\nb\nb\n")
    executor = choose_executor({"PBS_NODEFILE": str(tmp_path / "nodes")})
    assert executor == MpiSteps(2, 2)
    assert typed(executor, 4) == "mpirun -np 4 tutti train runs/points/n4-r1"
    (tmp_path / "nodes").write_text("a\na\n")
    assert choose_executor({"PBS_NODEFILE": str(tmp_path / "nodes")}) == Local()


def test_more_ranks_than_there_is_room_for_are_refused() -> None:
    check_capacity(Local(), 1000)
    check_capacity(choose_executor(SLURM), 8)
    with pytest.raises(LaunchError, match="16 ranks as steps on 4 nodes of this Slurm job: expected 8 at most"):
        check_capacity(choose_executor(SLURM), 16)


def test_points_at_once_are_for_one_machine() -> None:
    check_at_once(Local(), 8)
    check_at_once(choose_executor(SLURM), 1)
    with pytest.raises(LaunchError, match="--at-once 2: points that run as steps on 4 nodes of this Slurm job run one"):
        check_at_once(choose_executor(SLURM), 2)
    with pytest.raises(LaunchError, match="--at-once 0: expected 1 or more"):
        check_at_once(Local(), 0)


def test_points_at_once_share_the_cores_of_a_machine() -> None:
    cores = len(os.sched_getaffinity(0))
    assert step_environment({}, 2 * cores)["OMP_NUM_THREADS"] == "1"
    assert step_environment({"OMP_NUM_THREADS": "3"}, 8)["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in step_environment({})


def test_ranks_of_a_node_are_for_several_nodes() -> None:
    with pytest.raises(LaunchError, match="--ranks-per-node 2: there is one node here"):
        choose_executor({}, 2)


def test_a_study_is_no_rank() -> None:
    ranks = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(LaunchError, match=r"has started 2 ranks of this command: .* Call it once, without a launcher"):
        choose_executor(ranks | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})


def test_a_step_is_not_told_how_many_ranks_the_job_has_on_a_node() -> None:
    assert "SLURM_NTASKS_PER_NODE" not in step_environment(SLURM)
    assert step_environment(SLURM)["SLURM_JOB_ID"] == "7"
