"""Optimizers by name, with the fused kernels where the parameters allow them."""

from collections.abc import Iterable

import torch
from torch import nn

from tutti.config import parts
from tutti.config.options import OptimizerOptions


def build_optimizer(config: OptimizerOptions, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that a recipe names, over the given parameters."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    target = config.locate()
    offered = {"fused": True} if config.target and _can_fuse(trainable) else {}
    return parts.call(target, "optim", config.options() | {"params": trainable}, **offered)


def _can_fuse(parameters: list[nn.Parameter]) -> bool:
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
