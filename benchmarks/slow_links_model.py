"""The network of benchmarks on emulated nodes, whose compute time does not depend on other nodes.

The nodes of those benchmarks share the cores of one machine and would slow each other down. Most of their compute time
is therefore simulated by waiting, as a rank waits for an accelerator: a third of it in the forward pass and two thirds
in the backward pass, layer by layer. The network itself, its gradients and their communication are real.
"""

import time
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class SlowNetwork(nn.Module):
    """Layers with a fixed compute time for each sample."""

    def __init__(
        self,
        inputs: int,
        width: int,
        classes: int,
        seconds_per_sample: float,
        depth: int = 1,
        slow_seconds: float = 0.0,
    ) -> None:
        super().__init__()
        widths = [inputs, *[width] * (depth + 1), classes]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.seconds = seconds_per_sample / len(self.layers)
        self.slow_seconds = slow_seconds  # of every step, on rank 1 alone

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        if self.slow_seconds and dist.is_initialized() and dist.get_rank() == 1:
            time.sleep(self.slow_seconds)
        samples = samples.flatten(1)
        for number, layer in enumerate(self.layers):
            samples = _Waiting.apply(layer(samples.relu() if number else samples), self.seconds)
        return samples


class _Waiting(torch.autograd.Function):
    """Returns values and gradients unchanged after the time of a layer."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, seconds_per_sample: float) -> torch.Tensor:
        ctx.seconds = len(values) * seconds_per_sample
        time.sleep(ctx.seconds / 3)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.seconds * 2 / 3)
        return gradients[0], None
