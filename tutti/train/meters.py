"""Running sums over samples: kept on each rank without a synchronisation, added up over ranks when they are read."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tutti.ranks.group import Group

Metrics = Mapping[str, Callable[[Any, Any], torch.Tensor]]


class Meter:
    """Weighted sums of the loss and of the metrics; their means over all samples of all ranks come out."""

    def __init__(self, metrics: Metrics, device: torch.device) -> None:
        self.names = ("loss", *metrics)
        self._metrics = list(metrics.values())
        self._sums = [torch.zeros((), dtype=torch.float64, device=device) for _ in self.names]
        self._weights = [0.0] * len(self.names)

    def add_loss(self, loss: torch.Tensor, samples: int) -> None:
        """Add a batch's mean loss."""
        self._add(0, loss.detach(), samples)

    def add_metrics(self, outputs: Any, targets: Any, samples: int) -> None:
        """Measure a batch; a metric gives one value a sample, or a mean."""
        with torch.no_grad():
            for index, metric in enumerate(self._metrics, start=1):
                self._add(index, torch.as_tensor(metric(outputs, targets)), samples)

    def totals(self, group: Group, beside: Callable[[], Sequence[float]] = tuple) -> list[float]:
        """The sums, then the weights, then what is to be added up beside them; every rank must enter."""
        sums = torch.stack(self._sums).cpu()  # a GPU has computed all steps now
        others = torch.tensor([*self._weights, *beside()], dtype=torch.float64)
        return group.sum(torch.cat([sums, others])).tolist()

    def means(self, totals: Sequence[float]) -> dict[str, float]:
        """Totals as means by name; what has not been measured is left out."""
        count = len(self.names)
        weighted = zip(self.names, totals[:count], totals[count : 2 * count], strict=True)
        return {name: total / weight for name, total, weight in weighted if weight}

    def clear(self) -> None:
        for value in self._sums:
            value.zero_()
        self._weights = [0.0] * len(self.names)

    def put(self, totals: Sequence[float], is_first: bool) -> None:
        """Hold given totals on rank 0 and nothing elsewhere: the same sums, on any number of ranks."""
        self.clear()
        if is_first:
            count = len(self.names)
            for value, total in zip(self._sums, totals[:count], strict=True):
                value.fill_(total)
            self._weights = list(totals[count:])

    def _add(self, index: int, value: torch.Tensor, samples: int) -> None:
        if value.ndim:
            self._sums[index].add_(value.sum(dtype=torch.float64))
        else:
            self._sums[index].add_(value, alpha=samples)
        self._weights[index] += samples


def count_samples(targets: Any) -> int:
    """The number of samples in a batch, from its first tensor."""
    while not isinstance(targets, torch.Tensor):
        targets = next(iter(targets.values() if isinstance(targets, dict) else targets))
    return len(targets)
