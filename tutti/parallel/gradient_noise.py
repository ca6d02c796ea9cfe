"""Squares of the gradient before and after its average, in the steps in which the noise scale is measured."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tutti.runs.noise_scale import EVERY_STEPS


def find_biases(model: nn.Module) -> tuple[str, ...]:
    """What in a model makes the gradient of a batch differ from the mean over its samples."""
    normed = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    return ("batch norm",) if normed else ()


@dataclass(frozen=True)
class StepNorms:
    """A measured step, on its device: norms of the parts of the batch, norms of the whole, the scale of the loss."""

    values: torch.Tensor
    of_parts: int
    factor: int  # of the sum of the parts' squares that is their mean

    def squares(self, values: torch.Tensor) -> list[float]:
        """The squared norms of a part, on average, and of the whole batch, from the values on the CPU."""
        squares = (values[:-1] / values[-1]).square()
        return [self.factor * squares[: self.of_parts].sum().item(), squares[self.of_parts :].sum().item()]


class GradientSquares:
    """Squared norms of the gradients of parts of a batch and of the whole batch, by step.

    The parts are those of the ranks, or the micro-batches of an accumulated step on one rank. Nothing is read from
    the device before the squares are taken, and no gradient is changed.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], scaler: torch.amp.GradScaler, world_size: int) -> None:
        self._parameters = [each for each in parameters if each.requires_grad]
        self._scaler = scaler
        self._is_alone = world_size == 1
        self._is_due = False
        self._passes = 0
        self._parts: list[torch.Tensor] = []  # norms of the buckets of this rank, or of its micro-batches
        self._held: list[torch.Tensor | None] = []  # what earlier micro-batches have accumulated
        self._found: dict[int, StepNorms] = {}

    def begin_step(self, step: int) -> None:
        """Measure a step, counted from 1, if it is due."""
        self._is_due = step % EVERY_STEPS == 0
        self._parts, self._passes = [], 0

    def add_bucket(self, gradients: torch.Tensor) -> None:
        """Measure gradients of this rank that are to be averaged over ranks."""
        if self._is_due:
            self._parts += _norms([gradients])

    def begin_pass(self) -> None:
        """On one rank, put what earlier passes have accumulated aside."""
        if self._is_due and self._is_alone:
            self._held = [each.grad for each in self._parameters]
            for each in self._parameters:
                each.grad = None

    def end_pass(self) -> None:
        """On one rank, measure the gradients of this pass, and add them to the earlier ones."""
        if not (self._is_due and self._is_alone):
            return
        self._parts += _norms(self._gradients())
        self._passes += 1
        for each, held in zip(self._parameters, self._held, strict=True):
            if each.grad is None:
                each.grad = held
            elif held is not None:
                each.grad.add_(held)  # the same sum, bit for bit, as that of accumulation
        self._held = []

    def end_step(self, step: int) -> None:
        """Measure the gradients of the whole batch, before they are clipped."""
        if self._is_due and self._parts:  # without parts, the step had no average over ranks
            scale = self._scaler.scale(torch.ones_like(self._parts[0]))
            # The loss of a pass is divided by the number of passes: so many times the sum of squares is their mean.
            values = torch.stack([*self._parts, *_norms(self._gradients()), scale])
            self._found[step] = StepNorms(values, len(self._parts), self._passes or 1)
        self._is_due = False

    def take(self) -> dict[int, list[float]]:
        """The squares of this rank's part and of the whole batch by step, since they were taken last."""
        found, self._found = self._found, {}
        if not found:
            return {}
        values = torch.cat([each.values for each in found.values()]).double().cpu()
        rows = values.split([len(each.values) for each in found.values()])
        return {step: each.squares(row) for (step, each), row in zip(found.items(), rows, strict=True)}

    def _gradients(self) -> list[torch.Tensor]:
        return [each.grad for each in self._parameters if each.grad is not None]


def _norms(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    dense = [each.coalesce().values() if each.is_sparse else each for each in gradients]
    return torch._foreach_norm(dense, 2, dtype=torch.float32)
