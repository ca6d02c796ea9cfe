"""One rank's life: join the others, build the job, train, leave a record."""

import functools
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from tutti.config.run import RunConfig
from tutti.ranks.group import joined
from tutti.ranks.hang_detection import Watch
from tutti.ranks.placement import Placement
from tutti.runs.folder import RunFolder, check_writable
from tutti.train.build import Objects, build_job
from tutti.train.check import check_parts
from tutti.train.life import live
from tutti.train.loop import train
from tutti.train.start import check_same_code, examination


@dataclass(frozen=True)
class Outcome:
    """What a finished run gives back."""

    folder: RunFolder
    results: dict[str, float]
    samples_per_second: float | None
    model: nn.Module


def run_rank(
    config: RunConfig,
    placement: Placement,
    folder: RunFolder | None = None,
    resume: Path | None = None,
    objects: Objects | None = None,
    preflight: bool = False,
) -> Outcome:
    """Train as one rank of a run; rank 0 makes the run folder if the launcher has not."""

    def check() -> None:
        if objects is None:
            check_parts(config, placement.world_size)
        if folder is None:
            check_writable(config.out)

    with joined(config.runtime, placement, check, examination(placement, config, folder, preflight)) as rank:
        check_same_code(rank.group)
        watch = Watch(placement, rank.group.store, rank.group.hosts, config.runtime)
        try:
            build = functools.partial(build_job, config, objects or Objects(), rank.group, watch, rank.device)
            made, job = live(config, rank.group, watch, rank.machine, folder, resume, build, train)
        finally:
            watch.close()
    return Outcome(made, job.results, job.samples_per_second, job.learner.model)
