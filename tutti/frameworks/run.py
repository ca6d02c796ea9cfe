"""One rank's life in Keras or TensorFlow: set up the backend, join the others, build the job, train, leave a record."""

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tutti.config.run import RunConfig
from tutti.doctor.run import preflight as check_ranks
from tutti.errors import TuttiError
from tutti.frameworks.check import check_parts
from tutti.frameworks.machine import prepare
from tutti.frameworks.ranks import join
from tutti.ranks.device import bind_rank
from tutti.ranks.group import Machine
from tutti.ranks.hang_detection import Watch
from tutti.ranks.placement import Placement
from tutti.runs.folder import RunFolder, check_writable
from tutti.train.life import live
from tutti.train.start import check_same_code


@dataclass(frozen=True)
class Outcome:
    """What a finished run gives back."""

    folder: RunFolder
    results: dict[str, float]
    samples_per_second: float | None
    model: Any  # of Keras


def run_rank(
    config: RunConfig,
    placement: Placement,
    folder: RunFolder | None = None,
    resume: Path | None = None,
    preflight: bool = False,
) -> Outcome:
    """Train as one rank of a run, in the framework of the recipe."""
    binding = bind_rank(config.runtime, placement)
    error: TuttiError | None = None
    machine = Machine("cpu", "cpu", 1)
    try:
        machine = replace(prepare(config, placement), binding=binding)
        check_parts(config, placement.world_size)
        if folder is None:
            check_writable(config.out)
    except TuttiError as found:
        error = found
    if preflight:
        check_ranks(placement, config, folder.path if folder else Path(config.out))
    group = join(placement, config.runtime)
    group.agree(error)
    check_same_code(group)
    from tutti.frameworks.build import build_job  # now that Keras is set up

    watch = Watch(placement, group.store, group.hosts, config.runtime)
    try:
        build = functools.partial(build_job, config, group, watch)
        folder, job = live(config, group, watch, machine, folder, resume, build, _loop(config), _facts)
    finally:
        watch.close()
    group.leave()
    return Outcome(folder, job.results, job.samples_per_second, job.network.core)


def _facts(job: Any) -> dict[str, Any]:
    """What the record says besides."""
    return {"images_per_second": job.speed()} if job.rates else {}


def _loop(config: RunConfig) -> Any:
    if config.framework == "tensorflow":
        from tutti.frameworks.tape import train
    else:
        from tutti.frameworks.fit import train
    return train
