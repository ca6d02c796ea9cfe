"""Start and end of a job, and who this rank is in it; the same for every framework."""

import atexit
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tutti.config.schema import RuntimeConfig
from tutti.horovod.elastic.membership import close_group, is_driven, membership
from tutti.horovod.engine.channel import Channel, Connections, LocalChannel, StoreChannel
from tutti.horovod.engine.engine import Engine
from tutti.horovod.engine.execute import Members, form
from tutti.horovod.engine.messages import GLOBAL_SET
from tutti.horovod.errors import NOT_INITIALIZED, HorovodInternalError
from tutti.horovod.process_sets import ProcessSet, check_static, make_global_set
from tutti.horovod.settings import Settings, number, read_settings
from tutti.ranks.environments import discover
from tutti.ranks.group import Group, join, release_tensors
from tutti.ranks.placement import Placement


@dataclass
class Job:
    """A started job on one rank."""

    engine: Engine
    placement: Placement
    sets: list[ProcessSet]  # without the global one
    dynamic: bool  # sets may be added and removed


log = logging.getLogger("tutti.horovod")
global_process_set = make_global_set()
_job: Job | None = None
_group: Group | None = None  # kept from one init to the next: torch can start it once
_connections: Connections | None = None
_broken = False  # torch's group is
_generation = 0


def init(comm: Sequence[int] | Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the other ranks; a second call does nothing. Who they are is the launcher's word, not a communicator's."""
    global _job, _group, _connections, _generation
    if _job is not None:
        return
    if _broken:
        raise HorovodInternalError("The connections between ranks broke in the last job. Start all ranks again.")
    if isinstance(process_sets, str):
        if process_sets != "dynamic":
            raise ValueError(f'process_sets={process_sets!r}: expected a list of hvd.ProcessSet, or "dynamic".')
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # also for the next job of this process, as in Horovod
        process_sets = None
    settings, runtime = read_settings(os.environ), _runtime(os.environ)
    _set_up_log(settings)
    if is_driven():  # every job has other ranks, and a group of its own
        placement, _group = membership().join(runtime)
        atexit.register(_leave)
    else:
        placement = discover(os.environ)
    if isinstance(comm, list | tuple) and sorted(comm) != list(range(placement.world_size)):
        raise NotImplementedError(
            f"comm={list(comm)} of {placement.world_size} ranks: a job of some of the ranks is not there yet. "
            "Leave comm out, and give hvd.ProcessSet(ranks) to hvd.init(process_sets=[...])."
        )
    if _group is None:
        _group = join(placement, runtime)
        atexit.register(_leave)
    size, rank = placement.world_size, placement.rank
    channel: Channel = LocalChannel()
    if size > 1:
        _connections = _connections or Connections(_group.store, coordinates=rank == 0)
        channel = StoreChannel(_connections, _generation, rank)
    static = list(process_sets or [])
    problem: ValueError | None = None
    try:
        check_static(static, size)
    except ValueError as error:
        problem, static = error, []
    global_process_set.ranks = list(range(size))
    sets = {GLOBAL_SET: Members(tuple(range(size)), rank, None)}
    for place, each in enumerate(static, start=1):
        sets[place] = form(tuple(each.ranks or ()), rank)
        each.process_set_id = place
    if not is_driven():
        _group.barrier("hvd.init()", runtime.start_timeout_seconds)  # from now on, who says nothing is taken for dead
    _job = Job(Engine(rank, size, channel, sets, settings), placement, static, settings.dynamic_sets)
    _generation += 1
    log.info("rank %d of %d is ready on host %s", rank, size, platform.node())
    if is_driven():
        membership().watch(channel)
    if problem is not None:
        raise problem


def joined() -> Group:
    """The ranks that have met, with the store at which they have."""
    if _group is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _group


def shutdown() -> None:
    """End the job on all ranks; safe when there is none."""
    global _job, _group, _connections, _broken, _generation
    if _job is None:
        return
    ended, _job = _job, None
    whole = ended.engine.shut_down()
    release_tensors()
    _broken = ended.engine.failed
    if whole and not _broken:
        for place, members in ended.engine.sets.items():
            if place != GLOBAL_SET and members.place >= 0:
                dist.destroy_process_group(members.group)
    else:
        _connections = None  # a thread may still wait there
    for each in ended.sets:
        each.process_set_id = None
    global_process_set.ranks = None
    if is_driven():
        close_group(whole and not _broken)
        _group, _connections, _broken, _generation = None, None, False, 0


def _set_up_log(settings: Settings) -> None:
    """Have messages of the level that was asked for on standard error, unless the script has a handler for them."""
    if settings.log_level:
        log.setLevel(settings.log_level)
        if not log.hasHandlers():
            log.addHandler(logging.StreamHandler())


def _leave() -> None:
    """At the end of the process: the job, and torch's group with it, so that nothing of it lives on as Python ends."""
    whole = _job is None or not _job.engine.failed
    shutdown()
    if whole and not _broken and dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()


def job() -> Job:
    """The job, or Horovod's error where there is none."""
    if _job is None:
        raise ValueError(NOT_INITIALIZED)
    return _job


def engine() -> Engine:
    """The engine for an operation."""
    if _job is None:
        raise HorovodInternalError(NOT_INITIALIZED)
    return _job.engine


def is_initialized() -> bool:
    return _job is not None


def rank() -> int:
    return job().placement.rank


def size() -> int:
    return job().placement.world_size


def local_rank() -> int:
    return job().placement.local_rank


def local_size() -> int:
    return job().placement.local_size


def cross_rank() -> int:
    """The number of this rank's host."""
    return job().placement.node_rank


def cross_size() -> int:
    """How many hosts there are, as far as ranks are spread evenly."""
    placement = job().placement
    return -(-placement.world_size // placement.local_size)


def is_homogeneous() -> bool:
    placement = job().placement
    return placement.world_size % placement.local_size == 0


def mpi_threads_supported() -> bool:
    raise ValueError("Horovod has not been built with MPI: this is tutti, on torch.distributed.")


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin to write what happens to each tensor to a file; rank 0 does it."""
    engine = job().engine
    if not os.environ.get("HOROVOD_TIMELINE"):
        raise ValueError("start_timeline needs HOROVOD_TIMELINE. Set it to DYNAMIC before the job starts.")
    if engine.rank == 0:
        try:
            engine.timeline.start(file_path, mark_cycles)
        except OSError as error:
            raise ValueError(f"file_path={file_path!r}: expected a file that can be written ({error}).") from error


def stop_timeline() -> None:
    """End the file of the timeline, if there is one."""
    job().engine.timeline.stop()


def _get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    return {place: list(members.ranks) for place, members in dict(job().engine.sets).items()}


def gloo_built() -> bool:
    return dist.is_gloo_available()


def gloo_enabled() -> bool:
    return dist.is_gloo_available()


def nccl_built() -> int:
    """NCCL's version code, or 0 where torch has none."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]  # pyright: ignore[reportAttributeAccessIssue]
    return major * 10000 + minor * 100 + patch


def cuda_built() -> bool:
    return torch.version.cuda is not None


def rocm_built() -> bool:
    return torch.version.hip is not None


def mpi_built() -> bool:
    return False


def mpi_enabled() -> bool:
    return False


def ddl_built() -> bool:
    return False


def ccl_built() -> bool:
    return False


def sycl_built() -> bool:
    return False


def _runtime(env: Mapping[str, str]) -> RuntimeConfig:
    return RuntimeConfig(start_timeout_seconds=number(env, "START_TIMEOUT", 0.0) or 300.0)
