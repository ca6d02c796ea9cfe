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

_PARAMETERS = inspect.signature(DistributedDataParallel.__init__).parameters
# torch 2.13 gives the option a new name and warns about the old one.
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"

_MOST_DIRECT_BYTES = 1 << 20  # over all ranks; measured on 2 and 4 ranks of one host
_TAG = 0x7475  # apart from messages that a user's model may send


def spread(model: nn.Module, config: DdpConfig, world_size: int, device: torch.device) -> nn.Module:
    """The model as it is on one rank, else wrapped so that the last backward pass of a step averages gradients."""
    if world_size == 1 or not config.communicate:
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
    if config.direct and device.type == "cpu":
        wrapped.register_comm_hook(dist.get_rank(), average_gradients)
    return wrapped


def average_gradients(rank: int, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean over ranks of a bucket of gradients.

    Gloo's all-reduce takes several rounds through a thread of its own, a few hundred microseconds each whatever the
    size. Nothing is left to overlap with the last bucket of a step: if it is small, each rank sends it to each other
    one from this thread, and adds up what it gets in the order of ranks.
    """
    gradients, world_size = bucket.buffer(), dist.get_world_size()
    if not bucket.is_last() or world_size * gradients.nbytes > _MOST_DIRECT_BYTES:
        return allreduce_hook(None, bucket)  # pyright: ignore[reportArgumentType]
    gathered = gradients.new_empty(world_size, gradients.numel())
    others = [other for other in range(world_size) if other != rank]
    works = [dist.irecv(gathered[other], other, tag=_TAG) for other in others]
    works += [dist.isend(gradients, other, tag=_TAG) for other in others]
    gathered[rank].copy_(gradients)
    for work in works:
        if work is not None:
            work.wait()
    done = torch.futures.Future[torch.Tensor]()
    done.set_result(torch.mean(gathered, 0, out=gradients))
    return done


def silence(model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """The context for a pass whose gradients only add up on this rank."""
    return model.no_sync if isinstance(model, DistributedDataParallel) else contextlib.nullcontext
