"""Data parallelism: every rank holds the whole model, and gradients are averaged over ranks."""

import contextlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tutti.config.schema import MOST_DIRECT_BYTES, DdpConfig
from tutti.parallel.host_memory import HostMemory, share_memory
from tutti.ranks.group import Group

_PARAMETERS = inspect.signature(DistributedDataParallel.__init__).parameters
# torch 2.13 gives the option a new name and warns about the old one.
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"


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
