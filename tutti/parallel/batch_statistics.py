"""Batch-norm running statistics that do not depend on the number of ranks.

A forward pass changes a running value r into (1 - m) r + m s, where s is the statistic of its micro-batch. Averaged
over the passes of a step that all start from the same r, this is (1 - m) r + m mean(s), however the micro-batches are
distributed. Averaging over ranks commutes with this update, so it is needed only before validation and checkpoints.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from tutti.parallel.mesh import Mesh


class BatchStatistics:
    """The running statistics of a model, averaged over the passes of a step and over ranks."""

    def __init__(self, model: nn.Module, passes: int, mesh: Mesh) -> None:
        layers = [m for m in model.modules() if isinstance(m, _NormBase) and m.running_mean is not None]
        # `data`: autograd takes a change for one of values that a later backward pass needs, as between stages.
        self._means = [b.data for m in layers for b in (m.running_mean, m.running_var) if b is not None]
        self._counts = [m.num_batches_tracked for m in layers if m.num_batches_tracked is not None]
        self._passes = passes
        self._mesh = mesh
        self._start: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []
        self._start_counts: list[torch.Tensor] = []

    @torch.no_grad()
    def before_pass(self, index: int) -> None:
        """Restores the values from before the step, so that every pass starts from them."""
        if self._passes == 1 or not self._means:
            return
        if index == 0:
            self._start = [mean.clone() for mean in self._means]
            self._start_counts = [count.clone() for count in self._counts]
            self._sums = [torch.zeros_like(mean) for mean in self._means]
        else:
            torch._foreach_add_(self._sums, self._means)
            torch._foreach_copy_(self._means, self._start)

    @torch.no_grad()
    def after_step(self) -> None:
        """Sets the statistics to the average over the passes."""
        if self._passes == 1 or not self._means:
            return
        torch._foreach_add_(self._sums, self._means)
        torch._foreach_div_(self._sums, self._passes)
        torch._foreach_copy_(self._means, self._sums)
        for count, start in zip(self._counts, self._start_counts, strict=True):
            count.copy_(start + 1)

    @torch.no_grad()
    def combine_ranks(self) -> None:
        """Averages over the ranks with the same layers; a collective that every rank must call."""
        copies = self._mesh.layout.copies
        if copies == 1 or not self._means:
            return
        flat = torch.cat([mean.reshape(-1) for mean in self._means])
        dist.all_reduce(flat, group=self._mesh.copies)
        flat /= copies
        for mean, part in zip(self._means, flat.split([m.numel() for m in self._means]), strict=True):
            mean.copy_(part.view_as(mean))
