"""Groups of ranks that work together, known by the same number on every rank."""

import threading
from collections.abc import Iterable
from typing import Any

from tutti.horovod.engine.messages import GLOBAL_SET, Kind, Request
from tutti.horovod.errors import HorovodInternalError

_changing = threading.Lock()  # one change at a time


class ProcessSet:
    """Some of the ranks; it has a number once it is registered."""

    def __init__(self, ranks_or_comm: Any) -> None:
        self.process_set_id: int | None = None
        self.mpi_comm = None
        if isinstance(ranks_or_comm, range | list | tuple | set):
            self.ranks: list[int] | None = sorted(set(ranks_or_comm))
        else:  # an mpi4py communicator: its members by their ranks in the whole job
            self.ranks = sorted(ranks_or_comm.allgather(_world_rank(ranks_or_comm)))

    def size(self) -> int:
        """How many ranks it has."""
        return len(self._registered())

    def rank(self) -> int:
        """The place of this rank in it, from 0."""
        from tutti.horovod import basics

        ranks = self._registered()
        if basics.rank() not in ranks:
            raise ValueError(f"rank {basics.rank()} is not in {self}: expected one of its ranks.")
        return ranks.index(basics.rank())

    def included(self) -> bool:
        """Whether this rank is in it."""
        from tutti.horovod import basics

        return basics.rank() in self._registered()

    def _registered(self) -> list[int]:
        from tutti.horovod import basics

        basics.job()
        if self.process_set_id is None or self.ranks is None:
            raise ValueError(f"{self} is not registered. Give it to hvd.init(process_sets=...) or hvd.add_process_set.")
        return self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


def make_global_set() -> ProcessSet:
    """The set of all ranks, which are known when the job is."""
    everyone = ProcessSet([])
    everyone.process_set_id, everyone.ranks = GLOBAL_SET, None
    return everyone


def add_process_set(process_set: Any) -> ProcessSet:
    """Register a set, or the set of some ranks, while the job runs; all ranks call it and wait for each other."""
    from tutti.horovod import basics

    job = _dynamic_job()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    with _changing:
        ranks = tuple(added.ranks or ())
        problem = wrong_members(ranks, [members.ranks for members in job.engine.sets.values()], basics.size())
        try:
            added.process_set_id = _change("add_set", ranks)
        except HorovodInternalError as error:
            if problem:  # all ranks have waited for each other, and all know
                raise ValueError(problem) from error
            raise
        job.sets.append(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Take a set away while the job runs; all ranks call it and wait for each other. Whether it was there."""
    from tutti.horovod import basics

    if process_set not in basics.job().sets:
        return False
    job = _dynamic_job()
    with _changing:
        _change("remove_set", tuple(process_set.ranks or ()))
        job.sets.remove(process_set)
        process_set.process_set_id = None
    return True


def _dynamic_job() -> Any:
    from tutti.horovod import basics

    if not basics.job().dynamic:
        raise ValueError(
            "Process sets cannot change in this job. Start it with hvd.init(process_sets='dynamic') or "
            "HOROVOD_DYNAMIC_PROCESS_SETS=1 on all ranks."
        )
    return basics.job()


def _change(kind: Kind, ranks: tuple[int, ...]) -> int:
    """Have all ranks agree to a change; the number of the set."""
    from tutti.horovod import basics

    return basics.engine().agree(Request(kind, "change", members=ranks)).set_number


def check_static(sets: Iterable[ProcessSet], size: int) -> None:
    """Refuse sets that are there twice, or name ranks that are not."""
    seen = {tuple(range(size))}
    for each in sets:
        ranks = tuple(each.ranks or ())
        problem = wrong_members(ranks, seen, size)
        if problem:
            raise ValueError(problem)
        seen.add(ranks)


def wrong_members(ranks: tuple[int, ...], there: Iterable[tuple[int, ...]], size: int) -> str:
    """Why ranks cannot be a process set beside those that are there, or nothing."""
    if not ranks or ranks[0] < 0 or ranks[-1] >= size:
        return f"A process set with ranks {list(ranks)}: expected ranks from 0 to {size - 1}, at least one."
    if ranks in there:
        return f"A process set with ranks {list(ranks)} exists already."
    return ""


def _world_rank(comm: Any) -> int:
    from mpi4py import MPI  # pyright: ignore[reportMissingImports]

    return MPI.COMM_WORLD.Get_rank()
