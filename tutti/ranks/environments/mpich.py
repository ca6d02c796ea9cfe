"""MPICH's Hydra, Intel MPI, and Cray's PALS."""

import os

from tutti.ranks.placement import Environment, Placement, ancestor, job_rendezvous, number, rendezvous_address

NAME = "MPICH"
_LOCAL_RANK = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID")
_LOCAL_SIZE = ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE")


def is_present(env: Environment) -> bool:
    """srun --mpi=pmi2 sets PMI_RANK as well, but no local rank: then Slurm's own variables are used."""
    return "PMI_RANK" in env and any(name in env for name in _LOCAL_RANK)


def read(env: Environment) -> Placement:
    """In a Slurm job the hosts are the step's, in which mpiexec starts a daemon on each of its hosts."""
    world_size = number(env, "PMI_SIZE")
    local_size = number(env, *_LOCAL_SIZE)
    port, key = job_rendezvous(env, _job(env))
    return Placement(
        launcher=NAME,
        rank=number(env, "PMI_RANK"),
        world_size=world_size,
        local_rank=number(env, *_LOCAL_RANK),
        local_size=local_size,
        node_rank=number(env, "PALS_NODEID", default=0),
        address=rendezvous_address(env, NAME, local_size == world_size, "SLURM_STEP_NODELIST"),
        port=port,
        key=key,
    )


def _job(env: Environment) -> str:
    """A key that the ranks of one mpiexec share: the id of PALS, or the control port of Hydra."""
    if job := env.get("PALS_APID"):
        return job
    proxy = ancestor("hydra_pmi_proxy")
    if proxy and "--control-port" in proxy:
        return proxy[proxy.index("--control-port") + 1]
    job = [env.get(name, "") for name in ("PBS_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
    return " ".join(job) if any(job) else f"process {proxy[0] if proxy else os.getppid()}"
