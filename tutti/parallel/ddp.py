"""Data parallelism: every rank holds the whole model, and gradients are averaged."""

import contextlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tutti.config.schema import DdpConfig
from tutti.parallel.host_memory import HostMemory, share_memory
from tutti.runtime.group import Group

_PARAMETERS = inspect.signature(DistributedDataParallel.__init__).parameters
# torch 2.13 gives the option a new name and warns about the old one.
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"

_MOST_DIRECT_BYTES = 1 << 20  # over all ranks; measured on 2 and 4 ranks of one host


def spread(model: nn.Module, config: DdpConfig, group: Group, device: torch.device) -> nn.Module:
    """The model as it is on one rank, else wrapped so that the last backward pass of a step averages gradients."""
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
    memory = share_memory(group, _MOST_DIRECT_BYTES) if config.direct and device.type == "cpu" else None
    if memory:
        wrapped.register_comm_hook(memory, average_gradients)
    return wrapped


def average_gradients(memory: HostMemory, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean over the ranks of one host of a bucket of gradients.

    Gloo's all-reduce takes several rounds through a thread of its own, a few hundred microseconds each whatever the
    size. Nothing is left to overlap with the last bucket of a step: if it is small, it goes through shared memory.
    """
    gradients = bucket.buffer()
    if not bucket.is_last() or dist.get_world_size() * gradients.nbytes > memory.most_bytes:
        return allreduce_hook(None, bucket)  # pyright: ignore[reportArgumentType]
    done = torch.futures.Future[torch.Tensor]()
    done.set_result(memory.average(gradients))
    return done


def silence(model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """The context for a pass whose gradients only add up on this rank."""
    return model.no_sync if isinstance(model, DistributedDataParallel) else contextlib.nullcontext
