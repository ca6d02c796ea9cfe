"""The process group of a run: ranks join it, wait for each other and agree, always with a deadline."""

import dataclasses
import json
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tutti.config.schema import RuntimeConfig
from tutti.errors import TuttiError
from tutti.ranks.cores import Binding
from tutti.ranks.device import bind_rank, choose_device, set_determinism, set_threads
from tutti.ranks.hub_client import HubClient
from tutti.ranks.interfaces import choose_interface
from tutti.ranks.placement import Placement
from tutti.ranks.store import meet
from tutti.runs.files import to_dataclass

RankCheck = Callable[[], None]  # of one rank, before it meets the others
PreflightCheck = Callable[[dist.Store | None], None]  # of all ranks; given their store, if they have met

_LAST_TENSORS_SECONDS = 0.02


class Group:
    """A joined process group; `leave` ends it. What ranks exchange here is plain data, and goes through the hub."""

    def __init__(self, placement: Placement, hub: HubClient, store: dist.Store, timeout_seconds: float) -> None:
        self.placement = placement
        self.rank = placement.rank
        self.world_size = placement.world_size
        self.hub = hub
        self.store = store
        self.timeout_seconds = timeout_seconds
        self.hosts: list[str] = []  # of all ranks, in their order

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def barrier(self, what: str, timeout_seconds: float | None = None) -> None:
        """Wait for all ranks; the error at the deadline names those that are missing."""
        self.hub.meet(what, timeout_seconds or self.timeout_seconds)

    def agree(self, error: TuttiError | None) -> None:
        """Return if no rank has an error; otherwise all ranks raise the same one, which names the ranks that had it."""
        own = None if error is None else [type(error).__name__, str(error), platform.node()]
        count, *found = self.hub.meet("an agreement of all ranks", self.timeout_seconds, own, "some")
        if not count:
            return
        kind, texts = _error_class(found[0][1][0]), list(dict.fromkeys(text for _, (_, text, _) in found))
        if count == self.world_size and len(texts) == 1:
            agreed = kind(texts[0])
        else:
            more = [f"and {count - len(found)} more ranks"] if count > len(found) else []
            agreed = kind("\n".join([*(f"rank {rank} on host {h}: {text}" for rank, (_, text, h) in found), *more]))
        agreed.agreed = True
        raise agreed

    def gather(self, item: Any, kind: Any = None) -> list[Any]:
        """Return the items of all ranks, in the order of ranks: plain values, or instances of a dataclass `kind`."""
        found = self.hub.meet("an exchange of all ranks", self.timeout_seconds, _plain(item), "all")
        return found if kind is None else [to_dataclass(each, kind) for each in found]

    def from_first(self, item: Any, kind: Any = None) -> Any:
        """Return the item of rank 0 on every rank: plain values, or an instance of a dataclass `kind`."""
        own = _plain(item) if self.is_first else None
        [found] = self.hub.meet("a message of rank 0", self.timeout_seconds, own, "first")
        return found if kind is None else to_dataclass(found, kind)

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
        self.hub.close()


def _plain(item: Any) -> Any:
    """Return an item as other ranks receive it."""
    return json.loads(json.dumps(item, default=_simplify))


def _simplify(item: Any) -> Any:
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return dataclasses.asdict(item)
    if isinstance(item, set | frozenset):
        return sorted(item)
    if isinstance(item, Path):
        return str(item)
    raise TypeError(f"ranks exchange plain data: expected no {type(item).__name__}")


def _error_class(name: str) -> type[TuttiError]:
    """Return the class of an error of another rank, by its name."""
    known = [TuttiError]
    for each in known:
        known += each.__subclasses__()
    return next((each for each in known if each.__name__ == name), TuttiError)


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
    meeting = meet(placement, seconds)
    group = Group(placement, meeting.hub, meeting.store, config.timeout_seconds)
    try:
        group.hosts = meeting.hub.meet("the start of the run", seconds, platform.node(), "all")
        examine(meeting.store)
        choose_interface(placement, meeting.hub, seconds)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", meeting.store),
            rank=placement.rank,
            world_size=placement.world_size,
            timeout=timedelta(seconds=config.timeout_seconds),
        )
    except BaseException:
        meeting.hub.close()
        raise
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
        group.hub.close()
        raise
