"""Losses and metrics by name, and their running sums over samples, kept on each rank without a synchronisation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

Metrics = Mapping[str, Callable[[Any, Any], torch.Tensor]]


class Meter:
    """Weighted sums of the loss and of the metrics over the samples of this rank.

    `share` is the weight of a sample, a part of 1 where several ranks have it: over all ranks, each counts once.
    """

    def __init__(self, metrics: Metrics, device: torch.device, share: float = 1.0) -> None:
        self._metrics, self._share = list(metrics.values()), share
        self._sums = [torch.zeros((), dtype=torch.float64, device=device) for _ in ("loss", *metrics)]
        self._weights = [0.0] * len(self._sums)

    def add_loss(self, loss: torch.Tensor, samples: int) -> None:
        """Add a batch's mean loss."""
        self._add(0, loss.detach(), samples)

    def add_metrics(self, outputs: Any, targets: Any, samples: int) -> None:
        """Measure a batch; a metric gives one value a sample, one for each place of a sample, or a mean."""
        with torch.no_grad():
            for index, metric in enumerate(self._metrics, start=1):
                self._add(index, torch.as_tensor(metric(outputs, targets)), samples)

    def totals(self) -> torch.Tensor:
        """The sums of this rank, then their weights, on the CPU; a GPU has computed all steps then."""
        sums = torch.stack(self._sums).cpu()
        return torch.cat([sums, torch.tensor(self._weights, dtype=torch.float64)])

    def take(self) -> Callable[[], torch.Tensor]:
        """Set the totals to zero; returns a function that gives what they were, and waits for a GPU."""
        sums, weights = torch.stack(self._sums), torch.tensor(self._weights, dtype=torch.float64)
        self.clear()
        if not sums.is_cuda:
            return lambda: torch.cat([sums, weights])
        on_host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True).copy_(sums, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def wait() -> torch.Tensor:
            copied.synchronize()
            return torch.cat([on_host, weights])

        return wait

    def clear(self) -> None:
        """Set all sums and weights to zero."""
        for value in self._sums:
            value.zero_()
        self._weights = [0.0] * len(self._sums)

    def put(self, totals: Sequence[float], is_first: bool) -> None:
        """Hold given totals on rank 0 and zeros elsewhere: the same sums over any number of ranks."""
        self.clear()
        if is_first:
            count = len(self._sums)
            for value, total in zip(self._sums, totals[:count], strict=True):
                value.fill_(total)
            self._weights = list(totals[count:])

    def _add(self, index: int, value: torch.Tensor, samples: int) -> None:
        if value.ndim:
            of_samples = value.flatten(1).mean(1) if value.ndim > 1 else value
            self._sums[index].add_(of_samples.sum(dtype=torch.float64), alpha=self._share)
        else:
            self._sums[index].add_(value, alpha=samples * self._share)
        self._weights[index] += samples * self._share


class Sums(Protocol):
    """Sums of values over steps."""

    def totals(self) -> torch.Tensor: ...

    def clear(self) -> None: ...


def taken(sums: Sums) -> Callable[[], torch.Tensor]:
    """Set sums to zero; returns a function that gives what they were."""
    found = sums.totals()
    sums.clear()
    return lambda: found


def weighted_means(names: Sequence[str], totals: Sequence[float]) -> dict[str, float]:
    """Totals over all ranks, sums and then weights, as means by name; what has not been measured is left out."""
    weighted = zip(names, totals[: len(names)], totals[len(names) : 2 * len(names)], strict=True)
    return {name: total / weight for name, total, weight in weighted if weight}


def count_samples(targets: Any) -> int:
    """The number of samples in a batch, from its first tensor."""
    while not isinstance(targets, torch.Tensor):
        targets = next(iter(targets.values() if isinstance(targets, dict) else targets))
    return len(targets)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """1 where the highest score is the right class."""
    return (output.argmax(-1) == target).float()


def top5(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """1 where the right class is among the five highest scores."""
    highest = output.topk(min(5, output.shape[-1]), -1).indices
    return (highest == target.unsqueeze(-1)).any(-1).float()


class CrossEntropy(nn.CrossEntropyLoss):
    """Cross entropy of class scores.

    Sequences have the scores of their places last, as (samples, places, classes); otherwise classes are second, as
    torch has them.
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        super().__init__(label_smoothing=label_smoothing)

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if outputs.ndim > 2 and outputs.shape[:-1] == targets.shape:
            outputs, targets = outputs.flatten(0, -2), targets.flatten()
        return super().forward(outputs, targets)


_LOG_DENSITY_SCALE = 14.0  # channel 0 holds log(density) / 14


class L1Loss(nn.Module):
    """Mean absolute error, plus `lambda_rho` times that of the density itself, whose logarithm is channel 0."""

    def __init__(self, lambda_rho: float = 0.0) -> None:
        super().__init__()
        self.lambda_rho = lambda_rho

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs, targets = outputs.float(), targets.float()
        loss = F.l1_loss(outputs, targets)
        if not self.lambda_rho:
            return loss
        density, wanted = (torch.exp(_LOG_DENSITY_SCALE * each[:, 0]) for each in (outputs, targets))
        return loss + self.lambda_rho * F.l1_loss(density, wanted)
