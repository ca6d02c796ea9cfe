"""Slurm's srun."""

import re
import subprocess

from tutti.errors import LaunchError
from tutti.runtime.placement import Environment, Placement, job_port, number

NAME = "Slurm"


def is_present(env: Environment) -> bool:
    """Only inside a step: a batch script itself is not a rank."""
    return "SLURM_STEP_ID" in env and "SLURM_PROCID" in env


def read(env: Environment) -> Placement:
    world_size = number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    node_rank = number(env, "SLURM_NODEID", default=0)
    sizes = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", str(world_size)))
    local_size = sizes[node_rank] if node_rank < len(sizes) else sizes[-1]
    here = "127.0.0.1" if local_size == world_size else None
    return Placement(
        launcher=NAME,
        rank=number(env, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=number(env, "SLURM_LOCALID"),
        local_size=local_size,
        node_rank=node_rank,
        address=env.get("MASTER_ADDR") or here or _first_host(env),
        port=job_port(env, f"{env.get('SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}"),
    )


def tasks_per_node(text: str) -> list[int]:
    """Slurm's short form of sizes: '4(x2),1' is [4, 4, 1]."""
    sizes = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if not match:
            raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE={text!r}: expected sizes such as '4(x2),1'.")
        sizes += [int(match[1])] * int(match[2] or 1)
    return sizes


def _first_host(env: Environment) -> str:
    """The first host of the step; the job's list may name others."""
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", "")
    if re.fullmatch(r"[\w.-]+", hosts):
        return hosts
    try:
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", hosts], capture_output=True, text=True, check=True, timeout=30
        )
        return listed.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise LaunchError(
            f"the first host of SLURM_STEP_NODELIST={hosts!r} cannot be found with scontrol: {error}. "
            "Set MASTER_ADDR to its name."
        ) from error
