"""Groups of ranks that work together, known by the same number on every rank."""

from collections.abc import Iterable
from typing import Any

from tutti.hvd.messages import GLOBAL_SET


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
        from tutti.hvd import basics

        ranks = self._registered()
        if basics.rank() not in ranks:
            raise ValueError(f"rank {basics.rank()} is not in {self}: expected one of its ranks.")
        return ranks.index(basics.rank())

    def included(self) -> bool:
        """Whether this rank is in it."""
        from tutti.hvd import basics

        return basics.rank() in self._registered()

    def _registered(self) -> list[int]:
        from tutti.hvd import basics

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


def check_static(sets: Iterable[ProcessSet], size: int) -> None:
    """Refuse sets that are there twice, or name ranks that are not."""
    seen = {tuple(range(size))}
    for each in sets:
        ranks = tuple(each.ranks or ())
        if not ranks or ranks[0] < 0 or ranks[-1] >= size:
            raise ValueError(f"{each}: expected ranks from 0 to {size - 1}.")
        if ranks in seen:
            raise ValueError(f"A process set with ranks {list(ranks)} exists already.")
        seen.add(ranks)


def _world_rank(comm: Any) -> int:
    from mpi4py import MPI  # pyright: ignore[reportMissingImports]

    return MPI.COMM_WORLD.Get_rank()
