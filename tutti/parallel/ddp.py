"""Data parallelism: every rank holds the whole model, and gradients are averaged."""

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


def spread(
    model: nn.Module,
    config: DdpConfig,
    group: Group,
    device: torch.device,
    all_there: Callable[[], None] = lambda: None,
) -> nn.Module:
    """The model as it is on one rank, else wrapped so that the last backward pass of a step averages gradients.

    `all_there` is called in each such pass when the last gradient of this rank is there.
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
    wrapped.register_comm_hook(Averaging(memory, all_there), average_gradients)
    return wrapped


@dataclass(frozen=True)
class Averaging:
    """What the averaging of gradients needs to know."""

    memory: HostMemory | None
    all_there: Callable[[], None]


def average_gradients(state: Averaging, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean over ranks of a bucket of gradients.

    Gloo's all-reduce takes several rounds through a thread of its own, a few hundred microseconds each whatever the
    size. Nothing is left to overlap with the last bucket of a step: if it is small, it goes through memory
    that the ranks of a host share.
    """
    if bucket.is_last():
        state.all_there()
    gradients, memory = bucket.buffer(), state.memory
    if not memory or not bucket.is_last() or dist.get_world_size() * gradients.nbytes > memory.most_bytes:
        return allreduce_hook(None, bucket)  # pyright: ignore[reportArgumentType]
    done = torch.futures.Future[torch.Tensor]()
    done.set_result(memory.average(gradients))
    return done


def silence(model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """The context for a pass whose gradients only add up on this rank."""
    return model.no_sync if isinstance(model, DistributedDataParallel) else contextlib.nullcontext
