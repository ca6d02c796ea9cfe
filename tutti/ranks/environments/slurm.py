"""Slurm's srun."""

import re

from tutti.errors import LaunchError
from tutti.ranks.placement import Environment, Placement, first_host, given_address, job_rendezvous, number

NAME = "Slurm"


def is_present(env: Environment) -> bool:
    """Only inside a step: a batch script itself is not a rank."""
    return "SLURM_STEP_ID" in env and "SLURM_PROCID" in env


def read(env: Environment) -> Placement:
    world_size = number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    node_rank = number(env, "SLURM_NODEID", default=0)
    local_size = _sizes(env, world_size, node_rank)[node_rank]
    port, key = job_rendezvous(env, " ".join(env.get(name, "") for name in _JOB))
    return Placement(
        launcher=NAME,
        rank=number(env, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=number(env, "SLURM_LOCALID"),
        local_size=local_size,
        node_rank=node_rank,
        address=given_address(env, NAME, local_size == world_size) or _first_host(env),
        port=port,
        key=key,
    )


def _sizes(env: Environment, world_size: int, node_rank: int) -> list[int]:
    """Ranks per host; those of the step, which may be another part of the job than its first."""
    name = next((name for name in _SIZES if name in env), None)
    if name is None:
        raise LaunchError(f"{' or '.join(_SIZES)} is not set, although the other variables of its launcher are.")
    sizes = tasks_per_node(env[name], name)
    if sum(sizes) != world_size or node_rank >= len(sizes):
        raise LaunchError(
            f"Slurm says {name}={env[name]} and host number {node_rank} in a step of {world_size} ranks: expected "
            "sizes of all hosts that add up to it. Check for variables left over from another launcher."
        )
    return sizes


def tasks_per_node(text: str, name: str = "SLURM_STEP_TASKS_PER_NODE") -> list[int]:
    """Slurm's short form of sizes: '4(x2),1' is [4, 4, 1]."""
    sizes = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if not match:
            raise LaunchError(f"{name}={text!r}: expected sizes such as '4(x2),1'.")
        sizes += [int(match[1])] * int(match[2] or 1)
    return sizes


def _first_host(env: Environment) -> str:
    """The first host of the step; the job's list may name others."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if hosts := env.get(name):
            return first_host(hosts)
    raise LaunchError("SLURM_STEP_NODELIST is not set, although the other variables of its launcher are.")


_SIZES = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
