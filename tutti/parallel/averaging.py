"""Gradients averaged over ranks while a backward pass computes them, for loops that call that pass themselves."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

_BUCKET_BYTES = 25 << 20


class GradientAverage:
    """Averages the gradients of some parameters over ranks, in buckets, each as soon as it is complete.

    Buckets are filled from the last parameter to the first, as gradients come, and sent in that order on every rank.
    A gradient that a backward pass does not give counts as zero, and stays absent.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], world_size: int) -> None:
        self._world_size = world_size
        self._buckets = _in_buckets([each for each in parameters if each.requires_grad])
        self._bucket_of = {parameter: index for index, bucket in enumerate(self._buckets) for parameter in bucket}
        self._missing: list[int] = []  # gradients, in each bucket; empty between backward passes
        self._sent: list[tuple[torch.Tensor, dist.Work | None]] = []
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._add)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a loss on this rank, and average them; every rank enters."""
        self._missing, self._sent = [len(bucket) for bucket in self._buckets], []
        try:
            loss.backward()
            while len(self._sent) < len(self._buckets):
                self._send()
            for bucket, (values, work) in zip(self._buckets, self._sent, strict=True):
                if work is not None:
                    work.wait()
                _put(bucket, values.div_(self._world_size))
        finally:
            self._missing, self._sent = [], []

    def _add(self, parameter: torch.Tensor) -> None:
        if not self._missing:  # a backward pass of somebody else's
            return
        self._missing[self._bucket_of[parameter]] -= 1  # pyright: ignore[reportArgumentType]
        while len(self._sent) < len(self._buckets) and self._missing[len(self._sent)] == 0:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[len(self._sent)]
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in bucket]
        values = torch.cat([each.reshape(-1) for each in gradients])
        self._sent.append((values, dist.all_reduce(values, async_op=True)))


def _in_buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters of one type each, from the last to the first."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in reversed(parameters):
        if not buckets or size + parameter.nbytes > _BUCKET_BYTES or buckets[-1][0].dtype != parameter.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.nbytes
    return buckets


def _put(bucket: list[nn.Parameter], values: torch.Tensor) -> None:
    for parameter, part in zip(bucket, values.split([each.numel() for each in bucket]), strict=True):
        if parameter.grad is not None:
            parameter.grad.copy_(part.view_as(parameter))
