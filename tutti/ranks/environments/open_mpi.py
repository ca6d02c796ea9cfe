"""Open MPI's mpirun."""

from tutti.ranks.placement import Environment, Placement, job_rendezvous, number, rendezvous_address

NAME = "Open MPI"


def is_present(env: Environment) -> bool:
    return "OMPI_COMM_WORLD_RANK" in env


def read(env: Environment) -> Placement:
    """In a Slurm job the hosts are the job's: the step is that of the daemons, and mpirun's own host is not in it."""
    world_size = number(env, "OMPI_COMM_WORLD_SIZE")
    local_size = number(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    port, key = job_rendezvous(
        env, env.get("PMIX_NAMESPACE", "") + env.get("OMPI_MCA_orte_precondition_transports", "")
    )
    return Placement(
        launcher=NAME,
        rank=number(env, "OMPI_COMM_WORLD_RANK"),
        world_size=world_size,
        local_rank=number(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size=local_size,
        address=rendezvous_address(env, NAME, local_size == world_size, "SLURM_JOB_NODELIST"),
        port=port,
        key=key,
    )
