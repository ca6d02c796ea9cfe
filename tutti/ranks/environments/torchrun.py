"""torchrun's agent, and any script that sets the same variables."""

from tutti.ranks.placement import Environment, Placement, number

NAME = "torchrun"


def is_present(env: Environment) -> bool:
    return "RANK" in env


def read(env: Environment) -> Placement:
    world_size = number(env, "WORLD_SIZE")
    return Placement(
        launcher=NAME,
        rank=number(env, "RANK"),
        world_size=world_size,
        local_rank=number(env, "LOCAL_RANK"),
        local_size=number(env, "LOCAL_WORLD_SIZE", default=world_size),
        node_rank=number(env, "GROUP_RANK", default=0),
        address=env.get("MASTER_ADDR"),
        port=number(env, "MASTER_PORT"),
    )
