"""How many threads each rank may use, so that the ranks of a host share its cores."""

import os
from collections.abc import Mapping


def threads_per_rank(local_size: int, env: Mapping[str, str], wish: int | None = None) -> int:
    """The recipe's number, else the environment's, else this host's cores divided among its ranks."""
    if wish:
        return wish
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
        if env.get(name, "").isdigit() and int(env[name]) > 0:
            return int(env[name])
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if allowed < (os.cpu_count() or 1):  # the launcher has bound this rank to cores of its own
        return allowed
    return max(1, allowed // local_size)
