"""Data parallelism: every rank holds the whole model, and gradients are averaged."""

import contextlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tutti.config.schema import DdpConfig

_PARAMETERS = inspect.signature(DistributedDataParallel.__init__).parameters
# torch 2.13 gives the option a new name and warns about the old one.
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"


def spread(model: nn.Module, config: DdpConfig, world_size: int, device: torch.device) -> nn.Module:
    """The model as it is on one rank, else wrapped so that the last backward pass of a step averages gradients."""
    if world_size == 1 or not config.communicate:
        return model
    sync_buffers: dict[str, Any] = {_SYNC_BUFFERS: config.broadcast_buffers}
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=config.bucket_mb,
        find_unused_parameters=config.find_unused_parameters,
        gradient_as_bucket_view=True,
        **sync_buffers,
    )


def silence(model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """The context for a pass whose gradients only add up on this rank."""
    return model.no_sync if isinstance(model, DistributedDataParallel) else contextlib.nullcontext
