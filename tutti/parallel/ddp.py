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

_MOST_GATHERED_BYTES = 1 << 20  # measured on 2 and 4 ranks of one host: beyond it the all-reduce is faster


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
    if config.gather_small and device.type == "cpu":
        wrapped.register_comm_hook(world_size, average_gradients)
    return wrapped


def average_gradients(world_size: int, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean over ranks of a bucket of gradients.

    Gloo's all-reduce passes messages on in several rounds, each a few hundred microseconds whatever its size. A small
    bucket is gathered instead, which takes one round, and summed on every rank in the order of ranks.
    """
    gradients = bucket.buffer()
    if world_size * gradients.nbytes > _MOST_GATHERED_BYTES:
        return allreduce_hook(None, bucket)  # pyright: ignore[reportArgumentType]
    gathered = gradients.new_empty(world_size, gradients.numel())
    work = dist.all_gather(list(gathered.unbind()), gradients, async_op=True)
    assert work is not None
    return work.get_future().then(lambda _: torch.mean(gathered, 0, out=gradients))


def silence(model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """The context for a pass whose gradients only add up on this rank."""
    return model.no_sync if isinstance(model, DistributedDataParallel) else contextlib.nullcontext
