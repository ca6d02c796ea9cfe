"""Start and end of a job, and who this rank is in it; the same for every framework."""

import atexit
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tutti.config.schema import RuntimeConfig
from tutti.hvd.channel import Channel, Connections, LocalChannel, StoreChannel
from tutti.hvd.engine import Engine, Settings
from tutti.hvd.errors import NOT_INITIALIZED, HorovodInternalError
from tutti.hvd.execute import Members
from tutti.hvd.messages import GLOBAL_SET
from tutti.hvd.process_sets import ProcessSet, check_static, make_global_set
from tutti.runtime.discovery import discover
from tutti.runtime.group import Group, join
from tutti.runtime.placement import Placement


@dataclass
class Job:
    """A started job on one rank."""

    engine: Engine
    placement: Placement
    sets: list[ProcessSet]  # without the global one


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
        raise NotImplementedError(
            f"process_sets={process_sets!r}: sets that change while a job runs are not there yet. "
            "Give them to hvd.init as a list of hvd.ProcessSet."
        )
    settings, runtime = _settings(os.environ), _runtime(os.environ)
    placement = discover(os.environ)
    if isinstance(comm, list | tuple) and sorted(comm) != list(range(placement.world_size)):
        raise NotImplementedError(
            f"comm={list(comm)} of {placement.world_size} ranks: a job of some of the ranks is not there yet. "
            "Leave comm out, and give hvd.ProcessSet(ranks) to hvd.init(process_sets=[...])."
        )
    if _group is None:
        _group = join(placement, runtime)
        atexit.register(shutdown)
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
    for number, each in enumerate(static, start=1):
        ranks = tuple(each.ranks or ())
        group = dist.new_group(list(ranks))  # every rank must enter, members or not
        sets[number] = Members(ranks, ranks.index(rank) if rank in ranks else -1, group)  # pyright: ignore
        each.process_set_id = number
    _group.barrier("hvd.init()", runtime.start_timeout_seconds)  # from now on, who says nothing is taken for dead
    _job = Job(Engine(rank, size, channel, sets, settings), placement, static)
    _generation += 1
    if problem is not None:
        raise problem


def shutdown() -> None:
    """End the job on all ranks; safe when there is none."""
    global _job, _connections, _broken
    if _job is None:
        return
    ended, _job = _job, None
    whole = ended.engine.shut_down()
    _broken = ended.engine.failed
    if whole and not _broken:
        for number, members in ended.engine.sets.items():
            if number != GLOBAL_SET and members.place >= 0:
                dist.destroy_process_group(members.group)
    else:
        _connections = None  # a thread may still wait there
    for each in ended.sets:
        each.process_set_id = None
    global_process_set.ranks = None


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


def _settings(env: Mapping[str, str]) -> Settings:
    checks = env.get("HOROVOD_STALL_CHECK_DISABLE", "0") in ("0", "")
    return Settings(
        fusion_bytes=int(_number(env, "FUSION_THRESHOLD", 128 << 20)),
        cache_capacity=int(_number(env, "CACHE_CAPACITY", 1024)),
        cycle_seconds=_number(env, "CYCLE_TIME", 1.0) / 1000,
        stall_warning_seconds=_number(env, "STALL_CHECK_TIME_SECONDS", 60.0) if checks else None,
        stall_shutdown_seconds=_number(env, "STALL_SHUTDOWN_TIME_SECONDS", 0.0),
    )


def _runtime(env: Mapping[str, str]) -> RuntimeConfig:
    return RuntimeConfig(start_timeout_seconds=_number(env, "START_TIMEOUT", 0.0) or 300.0)


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    """A number from the environment; what is none, or below 0, is refused by the variable's name."""
    given = env.get(f"HOROVOD_{name}") or str(default)
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ValueError(f"HOROVOD_{name}={given!r}: expected a number, 0 or more. Set it right, or unset it.")
    return value
