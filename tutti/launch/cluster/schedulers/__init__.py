"""One question, "how is a job run here?", and one file per answer."""

from types import ModuleType

from tutti.launch.cluster.schedulers import cobalt, pbs, slurm

SCHEDULERS: dict[str, ModuleType] = {module.NAME: module for module in (slurm, pbs, cobalt)}


def scheduler_of(name: str) -> ModuleType:
    """The module of a scheduler's name."""
    return SCHEDULERS[name]
