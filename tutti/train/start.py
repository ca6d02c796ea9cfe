"""What ranks make sure of before they build anything."""

import functools
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from tutti.config.run import RunConfig
from tutti.doctor.run import disagreements, fingerprint, preflight
from tutti.errors import LaunchError
from tutti.records.folder import RunFolder
from tutti.runtime.group import Group
from tutti.runtime.placement import Placement


def examination(
    placement: Placement, config: RunConfig, folder: RunFolder | None, wanted: bool
) -> Callable[[dist.Store], None]:
    """The preflight as ranks that have met do it, if it is wanted."""
    if not wanted:
        return lambda store: None
    return functools.partial(preflight, placement, config, folder.path if folder else Path(config.out))


def check_same_code(group: Group) -> None:
    """Refuse hosts with other versions of packages or of this code; every rank enters."""
    if len(set(group.hosts)) == 1:
        return
    found = disagreements(group.gather(fingerprint()), group.hosts)
    if found:
        error = LaunchError("\n".join(["hosts do not have the same code:", *(f"  {line}" for line in found)]))
        error.agreed = True
        raise error
