"""What ranks make sure of and write down before they build anything."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tutti.config.run import RunConfig
from tutti.doctor.run import disagreements, fingerprint, preflight
from tutti.errors import LaunchError
from tutti.launch.local import launch_line
from tutti.ranks.group import Group, Machine
from tutti.ranks.placement import Placement
from tutti.runs.folder import RunFolder, create_folder
from tutti.runs.record import Record
from tutti.train.resume import agreed


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


def make_folder(group: Group, out: str, name: str) -> RunFolder:
    """A new run folder, made by rank 0; every rank enters."""
    return group.from_first(
        agreed(group, lambda: create_folder(out, name, group.world_size) if group.is_first else None)
    )


def begin_record(record: Record, config: RunConfig, group: Group, machine: Machine, **more: Any) -> None:
    """Open a segment of the record with what runs, how it was started and what it runs on."""
    record.content |= {"recipe": config.recipe, "ranks": group.world_size, "seed": config.seed}
    record.start(
        framework=config.framework,
        launcher=group.placement.launcher,
        launch_line=launch_line(),
        ranks=group.world_size,
        device=machine.device_name,
        threads_per_rank=machine.threads,
        **more,
    )
