"""The variables that tell a rank its place, for Horovod's scripts and for torch's."""

import re
from collections.abc import Mapping, Sequence

from tutti.launch.hosts import Slot

# What another launcher has told this process about itself is not true of the ranks started here.
_OF_ANOTHER_LAUNCHER = re.compile(
    r"OMPI_COMM_WORLD_.*|PMI_.*|PMIX_.*|MPI_LOCAL.*|PALS_.*|TORCHELASTIC_.*|TUTTI_RUN_FOLDER|TUTTI_FAILURE_NOTES"
)


def without_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment that says nothing about ranks."""
    return {name: value for name, value in environment.items() if not _OF_ANOTHER_LAUNCHER.fullmatch(name)}


def rank_environment(slot: Slot, address: str, port: int, interfaces: Sequence[str] = ()) -> dict[str, str]:
    """What one rank is told: who it is, and where rank 0 holds the store."""
    told = {
        "HOROVOD_RANK": slot.rank,
        "HOROVOD_SIZE": slot.size,
        "HOROVOD_LOCAL_RANK": slot.local_rank,
        "HOROVOD_LOCAL_SIZE": slot.local_size,
        "HOROVOD_CROSS_RANK": slot.cross_rank,
        "HOROVOD_CROSS_SIZE": slot.cross_size,
        "HOROVOD_HOSTNAME": slot.host,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "RANK": slot.rank,
        "WORLD_SIZE": slot.size,
        "LOCAL_RANK": slot.local_rank,
        "LOCAL_WORLD_SIZE": slot.local_size,
        "GROUP_RANK": slot.node_rank,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "PYTHONUNBUFFERED": 1,
    }
    return {name: str(value) for name, value in told.items()} | interface_environment(interfaces)


def interface_environment(interfaces: Sequence[str]) -> dict[str, str]:
    """The network interfaces for Gloo and NCCL, where the user has chosen them."""
    if not interfaces:
        return {}
    every = ",".join(interfaces)
    return {"HOROVOD_GLOO_IFACE": interfaces[0], "GLOO_SOCKET_IFNAME": every, "NCCL_SOCKET_IFNAME": every}
