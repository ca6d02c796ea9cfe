"""The process group of a run: ranks join it, wait for each other and agree, always with a deadline."""

import platform
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tutti.config.schema import RuntimeConfig
from tutti.errors import TuttiError
from tutti.ranks.cores import Binding
from tutti.ranks.device import bind_rank, choose_device, set_determinism, set_threads
from tutti.ranks.interfaces import choose_interface
from tutti.ranks.placement import Placement
from tutti.ranks.store import connect_store, wait_for_all

RankCheck = Callable[[], None]  # of one rank, before it meets the others
PreflightCheck = Callable[[dist.Store | None], None]  # of all ranks; given their store, if they have met

_LAST_TENSORS_SECONDS = 0.02


class Group:
    """A joined process group; `leave` ends it."""

    def __init__(self, placement: Placement, store: dist.Store, timeout_seconds: float) -> None:
        self.placement = placement
        self.rank = placement.rank
        self.world_size = placement.world_size
        self.store = store
        self.timeout_seconds = timeout_seconds
        self.hosts: list[str] = []  # of all ranks, in their order
        self._barriers = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def barrier(self, what: str, timeout_seconds: float | None = None) -> None:
        """Wait for all ranks; the error at the deadline names those that are missing."""
        self._barriers += 1
        seconds = timeout_seconds or self.timeout_seconds
        wait_for_all(self.store, self.rank, self.world_size, f"barrier/{self._barriers}", what, seconds)

    def agree(self, error: TuttiError | None) -> None:
        """Return if no rank has an error; otherwise all ranks raise the same one, which names the ranks that had it."""
        found = self.gather(None if error is None else (type(error), str(error), platform.node()))
        failed: list[tuple[int, type[TuttiError], str, str]] = [(r, *item) for r, item in enumerate(found) if item]
        if not failed:
            return
        kind, texts = failed[0][1], list(dict.fromkeys(text for _, _, text, _ in failed))
        if len(failed) == self.world_size and len(texts) == 1:
            agreed = kind(texts[0])
        else:
            agreed = kind("\n".join(f"rank {rank} on host {host}: {text}" for rank, _, text, host in failed))
        agreed.agreed = True
        raise agreed

    def gather(self, item: Any) -> list[Any]:
        """Return the objects of all ranks, in the order of ranks."""
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, item)
        return found

    def from_first(self, item: Any) -> Any:
        """Return the object of rank 0 on every rank."""
        box = [item]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks, on the CPU in double precision; every rank must call this."""
        total = values.detach().to("cpu", torch.float64)
        if self.world_size > 1:
            dist.all_reduce(total)
        return total

    def leave(self) -> None:
        """Destroy the group after a barrier: rank 0 may hold the store that the others still use."""
        self.barrier("the end of the run")
        release_tensors()
        dist.destroy_process_group()


def drop_group() -> None:
    """Destroy the process group without waiting for other ranks."""
    if dist.is_initialized():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.destroy_process_group()


def release_tensors() -> None:
    """Give the threads of Gloo a moment to release the tensors of the last operation.

    They need the GIL for that. When the group is destroyed, they are joined with the GIL held, and when Python exits, a
    thread that requests the GIL aborts the process: they must have finished before.
    """
    if dist.is_initialized():
        time.sleep(_LAST_TENSORS_SECONDS)


def join(
    placement: Placement, config: RuntimeConfig, examine: Callable[[dist.Store], None] = lambda store: None
) -> Group:
    """Rendezvous with the other ranks, and initialise the process group; missing ranks are named at the deadline.

    `examine` is called after the rendezvous, before ranks connect to each other. A rank whose GPU is missing joins over
    Gloo like the others, so that it can report it to all.
    """
    backend = "cpu:gloo,cuda:nccl" if config.device != "cpu" and torch.cuda.is_available() else "gloo"
    seconds = config.start_timeout_seconds
    store = connect_store(placement, seconds)
    wait_for_all(store, placement.rank, placement.world_size, "here", "the start of the run", seconds)
    examine(store)
    choose_interface(placement, store, seconds)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=placement.rank,
        world_size=placement.world_size,
        timeout=timedelta(seconds=config.timeout_seconds),
    )
    group = Group(placement, dist.PrefixStore("tutti", store), config.timeout_seconds)
    group.hosts = group.gather(platform.node())
    return group


@dataclass(frozen=True)
class Machine:
    """The device, threads and cores of a rank."""

    device: str  # cpu or cuda
    device_name: str
    threads: int
    binding: Binding | None = None


@dataclass(frozen=True)
class Joined:
    """A rank that has joined its process group."""

    group: Group
    device: torch.device
    machine: Machine


@contextmanager
def joined(
    config: RuntimeConfig,
    placement: Placement,
    check: RankCheck = lambda: None,
    examine: Callable[[dist.Store], None] = lambda store: None,
) -> Iterator[Joined]:
    """Bind this rank to cores, set its threads and device, and join the process group, which is destroyed at the end.

    An error of one rank, also in its `check`, is raised after the rendezvous on all ranks, so that they fail together.
    """
    binding = bind_rank(config, placement)
    threads = set_threads(config, placement)
    set_determinism(config)
    error: TuttiError | None = None
    device = torch.device("cpu")
    try:
        device = choose_device(config, placement)
        check()
    except TuttiError as found:
        error = found
    group = join(placement, config, examine)
    try:
        group.agree(error)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        yield Joined(group, device, Machine(device.type, name, threads, binding))
        group.leave()
    except BaseException:
        drop_group()
        raise
