"""MPICH's Hydra, Intel MPI, and Cray's PALS."""

from tutti.runtime.placement import Environment, Placement, ancestor, job_port, meeting_address, number

NAME = "MPICH"
_LOCAL_RANK = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID")
_LOCAL_SIZE = ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE")


def is_present(env: Environment) -> bool:
    """srun --mpi=pmi2 sets PMI_RANK as well, but no local rank: Slurm's own variables then say more."""
    return "PMI_RANK" in env and any(name in env for name in _LOCAL_RANK)


def read(env: Environment) -> Placement:
    world_size = number(env, "PMI_SIZE")
    local_size = number(env, *_LOCAL_SIZE)
    one_host = local_size == world_size
    job = env.get("PALS_APID") or (f"hydra {ancestor('hydra_pmi_proxy')}" if one_host else _job(env))
    return Placement(
        launcher=NAME,
        rank=number(env, "PMI_RANK"),
        world_size=world_size,
        local_rank=number(env, *_LOCAL_RANK),
        local_size=local_size,
        node_rank=number(env, "PALS_NODEID", default=0),
        address=meeting_address(env, NAME, one_host),
        port=job_port(env, job),
    )


def _job(env: Environment) -> str:
    return env.get("PBS_JOBID") or env.get("SLURM_JOB_ID") or ""
