"""Open MPI's mpirun."""

from tutti.runtime.placement import Environment, Placement, job_port, meeting_address, number

NAME = "Open MPI"


def is_present(env: Environment) -> bool:
    return "OMPI_COMM_WORLD_RANK" in env


def read(env: Environment) -> Placement:
    world_size = number(env, "OMPI_COMM_WORLD_SIZE")
    local_size = number(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = env.get("PMIX_NAMESPACE", "") + env.get("OMPI_MCA_orte_precondition_transports", "")
    return Placement(
        launcher=NAME,
        rank=number(env, "OMPI_COMM_WORLD_RANK"),
        world_size=world_size,
        local_rank=number(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size=local_size,
        address=meeting_address(env, NAME, one_host=local_size == world_size),
        port=job_port(env, job),
    )
