"""Data parallelism: every rank holds the whole model, and gradients are averaged over ranks."""

import contextlib
import inspect
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tutti.config.schema import MOST_DIRECT_BYTES, DdpConfig
from tutti.errors import DeadlineError
from tutti.ranks.failures import ConnectionToRankLost
from tutti.ranks.group import Group

_PARAMETERS = inspect.signature(DistributedDataParallel.__init__).parameters
# torch 2.13 gives the option a new name and warns about the old one.
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"


# Averages of small tensors over the ranks of one host, through shared memory.


class HostMemory:
    """A file in /dev/shm with a row for every rank, and a Unix socket between every two ranks to signal that it is set.

    The rows are double-buffered: a rank that is one exchange ahead cannot overwrite what another still reads. The
    file is deleted once all ranks have opened it, so it is freed however they end.
    """

    def __init__(self, group: Group, folder: Path, most_bytes: int, timeout_seconds: float) -> None:
        self.most_bytes = most_bytes  # over all ranks
        self._rank, self._world_size = group.rank, group.world_size
        self._timeout_seconds = timeout_seconds
        with _listen(folder / str(group.rank)) as own:
            whole = torch.from_file(str(folder / "tensors"), shared=True, size=2 * most_bytes, dtype=torch.uint8)
            group.barrier("the opening of shared memory")
            lower = [_connect(folder / str(other), group.rank, timeout_seconds) for other in range(group.rank)]
            higher = [_accept(own, timeout_seconds) for _ in range(group.rank + 1, group.world_size)]
        group.barrier("the opening of shared memory")
        self._halves = whole.view(2, most_bytes)
        self._turn = 0
        self._others: dict[int, socket.socket] = dict(enumerate(lower)) | dict(higher)

    def average(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replaces the tensor by its mean over ranks; summed in the order of ranks, so bitwise equal on all of them."""
        half = self._halves[self._turn].view(tensor.dtype)
        self._turn = 1 - self._turn
        rows = half[: self._world_size * tensor.numel()].view(self._world_size, tensor.numel())
        rows[self._rank].copy_(tensor.view(-1))
        for rank, other in self._others.items():
            self._signal(rank, other)
        for rank, other in self._others.items():
            self._wait_for(rank, other)
        return torch.mean(rows, 0, out=tensor.view(-1)).view_as(tensor)

    def close(self) -> None:
        """Closes the sockets; the memory is freed with the last rank."""
        for other in self._others.values():
            other.close()

    def _signal(self, rank: int, other: socket.socket) -> None:
        try:
            other.sendall(b"\0")
        except ConnectionError as error:
            raise _ended(rank) from error

    def _wait_for(self, rank: int, other: socket.socket) -> None:
        try:
            received = other.recv(1)
        except TimeoutError as error:
            raise DeadlineError(
                f"rank {self._rank} on host {platform.node()} waited {self._timeout_seconds:g} s for the gradients "
                f"of rank {rank}, which runs but did not send them. Look at the log of that rank."
            ) from error
        except ConnectionError as error:
            raise _ended(rank) from error
        if not received:
            raise _ended(rank)


def _ended(rank: int) -> ConnectionToRankLost:
    return ConnectionToRankLost(f"rank {rank} has ended: connection closed by peer")


def share_memory(group: Group, most_bytes: int) -> HostMemory | None:
    """Opens memory shared by all ranks; None if they are on several hosts or /dev/shm cannot be used."""
    if group.placement.world_size != group.placement.local_size:
        return None
    folder = group.from_first(_make_folder(most_bytes) if group.is_first else None, Path | None)
    if not all(group.gather(folder is not None and folder.is_dir())):
        return None
    assert folder is not None
    try:
        return HostMemory(group, folder, most_bytes, group.timeout_seconds)
    finally:
        if group.is_first:
            shutil.rmtree(folder, ignore_errors=True)


def _make_folder(most_bytes: int) -> Path | None:
    """Creates a folder in /dev/shm with the file to share, fully allocated."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="tutti-", dir="/dev/shm"))
    except OSError:
        return None
    try:
        with (folder / "tensors").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 2 * most_bytes)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return folder


def _listen(path: Path) -> socket.socket:
    own = socket.socket(socket.AF_UNIX)
    own.bind(str(path))
    own.listen()
    return own


def _connect(path: Path, rank: int, timeout_seconds: float) -> socket.socket:
    other = socket.socket(socket.AF_UNIX)
    other.settimeout(timeout_seconds)
    other.connect(str(path))
    other.sendall(rank.to_bytes(4, "little"))
    return other


def _accept(own: socket.socket, timeout_seconds: float) -> tuple[int, socket.socket]:
    own.settimeout(timeout_seconds)
    other, _ = own.accept()
    other.settimeout(timeout_seconds)
    return int.from_bytes(other.recv(4, socket.MSG_WAITALL), "little"), other


# The wrapped model.


def wrap_model(
    model: nn.Module,
    config: DdpConfig,
    group: Group,
    device: torch.device,
    on_last_gradient: Callable[[], None] = lambda: None,
    on_bucket: Callable[[torch.Tensor], None] | None = None,
) -> nn.Module:
    """Wraps the model in DDP if there is more than one rank.

    `on_last_gradient` is called in each synchronising backward pass when the last gradient of this rank is ready, and
    `on_bucket` with each bucket of gradients before it is averaged.
    """
    if group.world_size == 1 or not config.communicate:
        return model
    sync_buffers: dict[str, Any] = {_SYNC_BUFFERS: config.broadcast_buffers}
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=config.bucket_mb,
        find_unused_parameters=config.find_unused_parameters,
        gradient_as_bucket_view=True,
        **sync_buffers,
    )
    memory = share_memory(group, MOST_DIRECT_BYTES) if config.direct and device.type == "cpu" else None
    wrapped.register_comm_hook(Averaging(memory, on_last_gradient, on_bucket), average_gradients)
    return wrapped


@dataclass(frozen=True)
class Averaging:
    """The state of the communication hook."""

    memory: HostMemory | None
    on_last_gradient: Callable[[], None]
    on_bucket: Callable[[torch.Tensor], None] | None = None


def average_gradients(state: Averaging, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: averages a bucket of gradients over ranks.

    Gloo's all-reduce has a latency of several hundred microseconds whatever the size, and the last bucket of a step
    has no computation to overlap with. If it is small, it is averaged in shared memory instead.
    """
    if bucket.is_last():
        state.on_last_gradient()
    gradients, memory = bucket.buffer(), state.memory
    if state.on_bucket is not None:
        state.on_bucket(gradients)
    if not memory or not bucket.is_last() or dist.get_world_size() * gradients.nbytes > memory.most_bytes:
        return allreduce_hook(None, bucket)  # pyright: ignore[reportArgumentType]
    done = torch.futures.Future[torch.Tensor]()
    done.set_result(memory.average(gradients))
    return done


def without_sync(model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Returns the context manager for a backward pass that accumulates gradients on this rank only."""
    return model.no_sync if isinstance(model, DistributedDataParallel) else contextlib.nullcontext
