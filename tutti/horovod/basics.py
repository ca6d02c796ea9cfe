"""Start and end of a job, this rank's place in it, and process sets; the same for every framework."""

import atexit
import logging
import operator
import os
import platform
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tutti.config.schema import RuntimeConfig
from tutti.horovod.elastic.membership import close_group, is_driven, membership
from tutti.horovod.engine import Engine
from tutti.horovod.engine.coordinator import wrong_members
from tutti.horovod.engine.execute import Members, form
from tutti.horovod.engine.messages import GLOBAL_SET, Channel, HubChannel, Kind, LocalChannel, TensorRequest
from tutti.horovod.errors import NOT_INITIALIZED, HorovodInternalError
from tutti.horovod.settings import Settings, read_number, read_settings
from tutti.ranks.environments import discover
from tutti.ranks.group import Group, join, release_tensors
from tutti.ranks.placement import Placement

# fmt: off
__all__ = [  # in the namespace of every framework
    "ProcessSet", "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "global_process_set",
    "gloo_built", "gloo_enabled", "is_homogeneous", "is_initialized", "local_rank", "local_size", "mpi_built",
    "mpi_enabled", "mpi_threads_supported", "nccl_built", "rank", "rocm_built", "size", "start_timeline",
    "stop_timeline", "sycl_built",
]
# fmt: on


@dataclass
class HorovodJob:
    """A started job on one rank."""

    engine: Engine
    placement: Placement
    sets: list["ProcessSet"]  # without the global one
    dynamic: bool  # process sets may be added and removed


log = logging.getLogger("tutti.horovod")
_job: HorovodJob | None = None
_group: Group | None = None  # kept from one init to the next: torch can start it only once
_broken = False  # the connections of torch's process group are
_generation = 0
_changing = threading.Lock()  # process sets change one at a time


class ProcessSet:
    """A subset of the ranks; it has a number once it is registered."""

    def __init__(self, ranks_or_comm: Any) -> None:
        self.process_set_id: int | None = None
        self.mpi_comm = None
        if hasattr(ranks_or_comm, "Get_rank"):  # an mpi4py communicator
            from mpi4py import MPI  # pyright: ignore[reportMissingImports]

            ranks_or_comm = ranks_or_comm.allgather(MPI.COMM_WORLD.Get_rank())
        try:
            self.ranks: list[int] | None = sorted({operator.index(rank) for rank in ranks_or_comm})
        except TypeError as error:
            raise ValueError(
                f"ProcessSet({ranks_or_comm!r}): {error}. Expected ranks, such as [0, 2], or an mpi4py communicator."
            ) from error

    def size(self) -> int:
        """Return the number of its ranks."""
        return len(self._registered())

    def rank(self) -> int:
        """Return the index of this rank in the set."""
        ranks = self._registered()
        if rank() not in ranks:
            raise ValueError(f"rank {rank()} is not in {self}: expected one of its ranks.")
        return ranks.index(rank())

    def included(self) -> bool:
        """Return whether this rank is in the set."""
        return rank() in self._registered()

    def _registered(self) -> list[int]:
        job()
        if self.process_set_id is None or self.ranks is None:
            raise ValueError(f"{self} is not registered. Give it to hvd.init(process_sets=...) or hvd.add_process_set.")
        return self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


def _make_global_set() -> ProcessSet:
    """Return the set of all ranks, whose ranks are known once a job is."""
    everyone = ProcessSet([])
    everyone.process_set_id, everyone.ranks = GLOBAL_SET, None
    return everyone


global_process_set = _make_global_set()


def init(comm: Sequence[int] | Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the other ranks, which the launcher determines and not a communicator; a second call does nothing."""
    global _job, _group, _generation
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
    if is_driven():  # every job has other ranks, and a process group of its own
        placement, _group = membership().join(runtime)
        atexit.register(_leave)
    else:
        placement = discover(os.environ)
    _check_comm(comm, placement.world_size)
    if _group is None:
        _group = join(placement, runtime)
        atexit.register(_leave)
    size, rank = placement.world_size, placement.rank
    channel: Channel = LocalChannel()
    if size > 1:
        channel = HubChannel(_group.hub, _generation, rank)
    static = list(process_sets or [])
    problem: ValueError | None = None
    try:
        check_static(static, size)
    except ValueError as error:
        problem, static = error, []
    sets = _register(static, size, rank)
    if not is_driven():
        _group.barrier("hvd.init()", runtime.start_timeout_seconds)  # from now on, a silent rank counts as dead
    _job = HorovodJob(Engine(rank, size, channel, sets, settings), placement, static, settings.dynamic_sets)
    _generation += 1
    log.info("rank %d of %d is ready on host %s", rank, size, platform.node())
    if is_driven():
        membership().watch(channel)
    if problem is not None:
        shutdown()  # the next call must not take this job for a valid one
        raise problem


def _check_comm(comm: Any, size: int) -> None:
    if isinstance(comm, list | tuple) and sorted(comm) != list(range(size)):
        raise NotImplementedError(
            f"comm={list(comm)} of {size} ranks: a job of some of the ranks is not supported. "
            "Leave comm out, and give hvd.ProcessSet(ranks) to hvd.init(process_sets=[...])."
        )


def _register(static: Sequence[ProcessSet], size: int, rank: int) -> dict[int, Members]:
    """Give numbers to the process sets of a new job, and return their members by number; every rank must enter."""
    global_process_set.ranks = list(range(size))
    sets = {GLOBAL_SET: Members(tuple(range(size)), rank, None)}
    for number, process_set in enumerate(static, start=1):
        sets[number] = form(tuple(process_set.ranks or ()), rank)
        process_set.process_set_id = number
    return sets


def joined() -> Group:
    """Return torch's process group of the job, with its store."""
    if _group is None:
        raise ValueError(NOT_INITIALIZED)
    return _group


def shutdown() -> None:
    """End the job on all ranks; it is safe to call without a job."""
    global _job, _group, _broken, _generation
    if _job is None:
        return
    ended, _job = _job, None
    whole = ended.engine.shut_down()
    release_tensors()
    _broken = ended.engine.failed
    if whole and not _broken:
        for number, members in ended.engine.sets.items():
            if number != GLOBAL_SET and members.place >= 0:
                dist.destroy_process_group(members.group)
    for each in ended.sets:
        each.process_set_id = None
    global_process_set.ranks = None
    if is_driven():
        close_group(whole and not _broken)
        if _group is not None:
            _group.hub.close(0.0)
        _group, _broken, _generation = None, False, 0


def add_process_set(process_set: Any) -> ProcessSet:
    """Register a process set, or one of the given ranks, while the job runs; collective over all ranks."""
    current = _dynamic_job()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    with _changing:
        ranks = tuple(added.ranks or ())
        problem = wrong_members(ranks, [members.ranks for members in current.engine.sets.values()], size())
        try:
            added.process_set_id = _change("add_set", ranks)
        except HorovodInternalError as error:
            if problem:  # all ranks have waited for each other, and all raise it
                raise ValueError(problem) from error
            raise
        current.sets.append(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set while the job runs, and return whether it was registered; collective over all ranks."""
    if process_set not in job().sets:
        return False
    current = _dynamic_job()
    with _changing:
        _change("remove_set", tuple(process_set.ranks or ()))
        current.sets.remove(process_set)
        process_set.process_set_id = None
    return True


def _dynamic_job() -> HorovodJob:
    if not job().dynamic:
        raise ValueError(
            "Process sets cannot change in this job. Start it with hvd.init(process_sets='dynamic') or "
            "HOROVOD_DYNAMIC_PROCESS_SETS=1 on all ranks."
        )
    return job()


def _change(kind: Kind, ranks: tuple[int, ...]) -> int:
    """Make all ranks agree on a change, and return the number of the process set."""
    return engine().agree(TensorRequest(kind, "change", members=ranks)).set_number


def check_static(sets: Iterable[ProcessSet], size: int) -> None:
    """Raise ValueError for process sets that occur twice, or have ranks outside the job."""
    seen = {tuple(range(size))}
    for each in sets:
        ranks = tuple(each.ranks or ())
        problem = wrong_members(ranks, seen, size)
        if problem:
            raise ValueError(problem)
        seen.add(ranks)


def _set_up_log(settings: Settings) -> None:
    """Print log messages of the requested level to standard error, unless the script has a handler for them."""
    if settings.log_level:
        log.setLevel(settings.log_level)
        if not log.hasHandlers():
            log.addHandler(logging.StreamHandler())


def _leave() -> None:
    """End the job and torch's process group at the exit of the process, before Python's own finalization."""
    whole = _job is None or not _job.engine.failed
    shutdown()
    if whole and not _broken and dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()
    if _group is not None:
        _group.hub.close(0.0)


def job() -> HorovodJob:
    """Return the job, or raise Horovod's error where there is none."""
    if _job is None:
        raise ValueError(NOT_INITIALIZED)
    return _job


def engine() -> Engine:
    """Return the engine of the job."""
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
    """Return the index of this rank's host."""
    return job().placement.node_rank


def cross_size() -> int:
    """Return the number of hosts, if all have equally many ranks."""
    placement = job().placement
    return -(-placement.world_size // placement.local_size)


def is_homogeneous() -> bool:
    placement = job().placement
    return placement.world_size % placement.local_size == 0


def mpi_threads_supported() -> bool:
    raise ValueError("Horovod has not been built with MPI: this is tutti, on torch.distributed.")


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start to write the timeline of operations to a file; only rank 0 writes."""
    engine = job().engine
    if not os.environ.get("HOROVOD_TIMELINE"):
        raise ValueError("start_timeline needs HOROVOD_TIMELINE. Set it to DYNAMIC before the job starts.")
    if engine.rank == 0:
        try:
            engine.timeline.start(file_path, mark_cycles)
        except OSError as error:
            raise ValueError(f"file_path={file_path!r}: expected a file that can be written ({error}).") from error


def stop_timeline() -> None:
    """Close the file of the timeline, if there is one."""
    job().engine.timeline.stop()


def _get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    return {place: list(members.ranks) for place, members in dict(job().engine.sets).items()}


def gloo_built() -> bool:
    return dist.is_gloo_available()


gloo_enabled = gloo_built


def nccl_built() -> int:
    """Return the version code of NCCL, or 0 where torch does not have it."""
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


mpi_enabled = mpi_built


def ddl_built() -> bool:
    return False


ccl_built = sycl_built = ddl_built


def _runtime(env: Mapping[str, str]) -> RuntimeConfig:
    return RuntimeConfig(start_timeout_seconds=read_number(env, "START_TIMEOUT", 0.0) or 300.0)
