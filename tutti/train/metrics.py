"""Losses and metrics by name, and their running sums over samples, kept on each rank without a synchronisation."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from tutti.errors import TrainingError
from tutti.runs.step_parts import StepPart

Metrics = Mapping[str, Callable[[Any, Any], torch.Tensor]]

# What the events of metrics.jsonl have besides what a step or a script gives.
_OF_EVENTS = {"event", "step", "epoch", "time", "lr", "ranks", "samples_per_second", "seconds", "train_loss"}
_OF_EVENTS |= {f"{part.key}_{kind}" for part in StepPart for kind in ("seconds", "share")}


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


class StepValues:
    """Sums over this rank's samples of the values that steps give by name; `base` are names that are always there."""

    def __init__(self, base: Iterable[str], samples: int, device: torch.device) -> None:
        self.names = self._base = tuple(base)
        self._samples, self._device = samples, device
        self._given: set[str] = set()  # names that the steps of this window give
        self._sums: list[torch.Tensor] = []
        self._weight = 0.0
        self.clear()

    def add(self, values: Mapping[str, torch.Tensor | float], where: str) -> torch.Tensor:
        """Add the values of a step, and return its loss."""
        if not self._weight:
            check_names(values, where)
            self.names = tuple(dict.fromkeys((*self._base, *values)))
            self._given = {"loss", *values}
            self.clear()
        if set(values) != self._given:
            expected = ", ".join(name for name in self.names if name in self._given)
            raise TrainingError(
                f"{where}({', '.join(values)}): expected the values of the steps before, {expected}. "
                "Give the same names in every step, loss among them."
            )
        for name, total in zip(self.names, self._sums, strict=True):
            if name in values:
                total.add_(as_scalar(values[name], name, where), alpha=self._samples)
        self._weight += self._samples
        return as_scalar(values["loss"], "loss", where)

    def totals(self) -> torch.Tensor:
        """The sums of the values over this rank's samples, then their weights."""
        weights = [self._weight if name in self._given else 0.0 for name in self.names]
        return torch.cat([torch.stack(self._sums).cpu(), torch.tensor(weights, dtype=torch.float64)])

    def clear(self) -> None:
        """Set the totals to zero."""
        self._sums = [torch.zeros((), dtype=torch.float64, device=self._device) for _ in self.names]
        self._weight = 0.0

    def put(self, totals: Sequence[float], is_first: bool) -> None:
        """Hold given totals on rank 0 and zeros elsewhere."""
        self.clear()
        weights = dict(zip(self.names, totals[len(self.names) :], strict=True))
        if is_first and weights["loss"]:
            for own, total in zip(self._sums, totals, strict=False):
                own.fill_(total)
            self._weight = weights["loss"]
            self._given = {name for name, weight in weights.items() if weight}


def check_names(values: Iterable[str], where: str) -> None:
    """Refuse names that an event of metrics.jsonl has itself."""
    for name in values:
        if name in _OF_EVENTS:
            raise TrainingError(
                f"{where}: the name {name} is one that every line of metrics.jsonl may have: expected another. "
                f"Rename it, as in my_{name}."
            )


def as_number(value: Any, name: str, where: str) -> float:
    """One number, which a user gives as a number, an array or a tensor."""
    return float(as_scalar(value, name, where))


def as_scalar(value: Any, name: str, where: str) -> torch.Tensor:
    """One number as a tensor, which stays where it is."""
    try:
        found = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        found = None
    if found is None or found.numel() != 1 or found.is_complex():
        given = f"{value!r:.40}" if found is None or found.numel() == 1 else f"of the shape {list(found.shape)}"
        raise TrainingError(f"{where}: {name} is {given}: expected one real number. Give a mean over the batch.")
    return found.reshape(())


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
