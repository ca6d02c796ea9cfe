"""horovodrun, by the variables that Horovod's launcher sets."""

from tutti.ranks.placement import Environment, Placement, number

NAME = "horovodrun"


def is_present(env: Environment) -> bool:
    return "HOROVOD_RANK" in env


def read(env: Environment) -> Placement:
    world_size = number(env, "HOROVOD_SIZE")
    port = number(env, "MASTER_PORT", "HOROVOD_GLOO_RENDEZVOUS_PORT", default=0)
    return Placement(
        launcher=NAME,
        rank=number(env, "HOROVOD_RANK"),
        world_size=world_size,
        local_rank=number(env, "HOROVOD_LOCAL_RANK"),
        local_size=number(env, "HOROVOD_LOCAL_SIZE", default=world_size),
        node_rank=number(env, "HOROVOD_CROSS_RANK", default=0),
        address=env.get("MASTER_ADDR") or env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"),
        port=port or None,
    )
