"""One rank's life: join the others, build the job, train, leave a record."""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tutti.config.run import RunConfig
from tutti.errors import TuttiError
from tutti.records.folder import RunFolder, check_writable
from tutti.runtime.device import bind_rank, choose_device, set_determinism, set_threads
from tutti.runtime.group import abandon, join
from tutti.runtime.placement import Placement
from tutti.runtime.watch import Watch
from tutti.train.build import Objects, build_job
from tutti.train.check import check_parts
from tutti.train.life import Machine, live
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
    binding = bind_rank(config.runtime, placement)
    threads = set_threads(config.runtime, placement)
    set_determinism(config.runtime)
    error: TuttiError | None = None
    device = torch.device("cpu")
    try:
        device = choose_device(config.runtime, placement)
        if objects is None:
            check_parts(config, placement.world_size)
        if folder is None:
            check_writable(config.out)
    except TuttiError as found:
        error = found
    group = join(placement, config.runtime, examination(placement, config, folder, preflight))
    watch: Watch | None = None
    try:
        group.agree(error)
        check_same_code(group)
        watch = Watch(placement, group.store, group.hosts, config.runtime)
        device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        machine = Machine(device.type, device_name, threads, binding)
        build = functools.partial(build_job, config, objects or Objects(), group, watch, device)
        folder, job = live(config, group, watch, machine, folder, resume, build, train)
        watch.close()
        group.leave()
        return Outcome(folder, job.results, job.samples_per_second, job.learner.model)
    except BaseException:
        if watch:
            watch.close()
        abandon()
        raise
