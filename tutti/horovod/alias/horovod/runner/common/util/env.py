"""Who this rank is, by what a launcher has left in the environment."""

import os

_NAMES = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("RANK", "WORLD_SIZE"),
)


def get_env_rank_and_size() -> tuple[int, int]:
    """This rank and the number of all; 0 of 1 where no launcher has said anything."""
    for rank, size in _NAMES:
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1
