"""Losses and metrics by name, and their running sums over samples, kept on each rank without a synchronisation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Metrics = Mapping[str, Callable[[Any, Any], torch.Tensor]]


class Meter:
    """Weighted sums of the loss and of the metrics over the samples of this rank."""

    def __init__(self, metrics: Metrics, device: torch.device) -> None:
        self._metrics = list(metrics.values())
        self._sums = [torch.zeros((), dtype=torch.float64, device=device) for _ in ("loss", *metrics)]
        self._weights = [0.0] * len(self._sums)

    def add_loss(self, loss: torch.Tensor, samples: int) -> None:
        """Add a batch's mean loss."""
        self._add(0, loss.detach(), samples)

    def add_metrics(self, outputs: Any, targets: Any, samples: int) -> None:
        """Measure a batch; a metric gives one value a sample, or a mean."""
        with torch.no_grad():
            for index, metric in enumerate(self._metrics, start=1):
                self._add(index, torch.as_tensor(metric(outputs, targets)), samples)

    def totals(self) -> torch.Tensor:
        """The sums of this rank, then their weights, on the CPU; a GPU has computed all steps then."""
        sums = torch.stack(self._sums).cpu()
        return torch.cat([sums, torch.tensor(self._weights, dtype=torch.float64)])

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
            self._sums[index].add_(value.sum(dtype=torch.float64))
        else:
            self._sums[index].add_(value, alpha=samples)
        self._weights[index] += samples


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
