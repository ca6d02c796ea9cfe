"""The ranks of a run together: they join, wait for each other and agree, always with a deadline."""

import os
import platform
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tutti.config.schema import RuntimeConfig
from tutti.errors import DeadlineError, LaunchError, TuttiError
from tutti.runtime.placement import Placement

_STAY_SECONDS = 5.0
_LAST_TENSORS_SECONDS = 0.02


class Group:
    """A joined process group; `leave` ends it."""

    def __init__(self, placement: Placement, store: dist.Store, timeout_seconds: float) -> None:
        self.placement = placement
        self.rank = placement.rank
        self.world_size = placement.world_size
        self.store = store
        self.timeout_seconds = timeout_seconds
        self._barriers = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def barrier(self, what: str, timeout_seconds: float | None = None) -> None:
        """Wait for all ranks, and name those that do not come."""
        self._barriers += 1
        seconds = timeout_seconds or self.timeout_seconds
        _wait_for_all(self.store, self.rank, self.world_size, f"barrier/{self._barriers}", what, seconds)

    def agree(self, error: TuttiError | None) -> None:
        """Go on if no rank has an error; otherwise every rank raises the same one, and names who had it."""
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
        """Every rank's object, in the order of ranks."""
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, item)
        return found

    def from_first(self, item: Any) -> Any:
        """Rank 0's object on every rank."""
        box = [item]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, on the CPU in double precision; every rank must enter."""
        total = values.detach().to("cpu", torch.float64)
        if self.world_size > 1:
            dist.all_reduce(total)
        return total

    def leave(self) -> None:
        """End the group once all ranks are done with it: rank 0 may hold the store the others talk to."""
        self.barrier("the end of the run")
        let_go_of_tensors()
        dist.destroy_process_group()


def let_go_of_tensors() -> None:
    """Give Gloo's threads a moment after the last operation.

    They take Python's lock to let go of its tensors. When the group is freed they are waited for with that lock held,
    and when Python ends a thread that wants it aborts the process: they must be done by then.
    """
    time.sleep(_LAST_TENSORS_SECONDS)


def join(placement: Placement, config: RuntimeConfig) -> Group:
    """Meet the other ranks, name those that are missing at the deadline, and start the process group.

    A rank whose own GPU is missing joins like the others, over Gloo, and can then say so to all.
    """
    backend = "cpu:gloo,cuda:nccl" if config.device != "cpu" and torch.cuda.is_available() else "gloo"
    seconds = config.start_timeout_seconds
    if placement.world_size == placement.local_size and any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: whatever its name resolves to
    store = _meet(placement, seconds)
    _wait_for_all(store, placement.rank, placement.world_size, "here", "the start of the run", seconds)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=placement.rank,
        world_size=placement.world_size,
        timeout=timedelta(seconds=config.timeout_seconds),
    )
    return Group(placement, dist.PrefixStore("tutti", store), config.timeout_seconds)


def _meet(placement: Placement, seconds: float) -> dist.Store:
    if placement.world_size == 1:
        return dist.HashStore()
    if placement.address is None or placement.port is None:
        raise LaunchError(f"{placement.launcher} does not say where rank 0 is. Set MASTER_ADDR and MASTER_PORT.")
    agent_holds_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            placement.address,
            placement.port,
            is_master=placement.rank == 0 and not agent_holds_store,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
    except dist.DistError as error:
        where = f"{placement.address}:{placement.port}"
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise LaunchError(f"rank 0 cannot listen on {where}: the port is in use. Set MASTER_PORT.") from error
        raise DeadlineError(
            f"rank {placement.rank} on host {platform.node()} could not reach rank 0 at {where} within {seconds:g} s. "
            "Check that rank 0 runs there and that the network between the hosts is open."
        ) from error
    return dist.PrefixStore(f"start/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _wait_for_all(store: dist.Store, rank: int, world_size: int, key: str, what: str, seconds: float) -> None:
    """Wait until every rank is here, or say who is not."""
    store.set(f"{key}/{rank}", "")
    if store.add(f"{key}/count", 1) == world_size:
        store.set(f"{key}/open", "")
    try:
        store.wait([f"{key}/open"], timedelta(seconds=seconds))
    except dist.DistError as error:
        raise DeadlineError(
            f"rank {rank} on host {platform.node()} waited {seconds:g} s at {what}: "
            f"{_absence(store, rank, world_size, key)} Look at the logs of the missing ranks."
        ) from error


def _absence(store: dist.Store, rank: int, world_size: int, key: str) -> str:
    """Who is missing; rank 0, whose process may hold the store, stays until those who are here have asked."""
    try:
        here = [other for other in range(world_size) if store.check([f"{key}/{other}"])]
        store.set(f"{key}/{rank}/told", "")
        if rank == 0:
            store.wait([f"{key}/{other}/told" for other in here], timedelta(seconds=_STAY_SECONDS))
    except dist.DistError:
        return "rank 0, which knows who is missing, is gone or does not answer."
    missing = [other for other in range(world_size) if other not in here]
    return f"missing {_ranks(missing)}, arrived {_ranks(here)} of {world_size}."


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:16])) + (", ..." if len(numbers) > 16 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"
