"""Squares of the gradient before and after its average, in the steps in which the noise scale is measured."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from tutti.runs.noise_scale import EVERY_STEPS


def find_biases(model: nn.Module) -> tuple[str, ...]:
    """What in a model makes the gradient of a batch differ from the mean over its samples."""
    normed = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    return ("batch norm",) if normed else ()


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
        self._parts: list[torch.Tensor] = []  # of the buckets of this rank, or of its micro-batches
        self._held: list[torch.Tensor | None] = []  # what earlier micro-batches have accumulated
        self._found: dict[int, torch.Tensor] = {}

    def begin_step(self, step: int) -> None:
        """Measure a step, counted from 1, if it is due."""
        self._is_due = step % EVERY_STEPS == 0
        self._parts.clear()

    def add_bucket(self, gradients: torch.Tensor) -> None:
        """Square gradients of this rank that are to be averaged over ranks."""
        if self._is_due:
            self._parts.append(_square([gradients]))

    def begin_pass(self) -> None:
        """On one rank, put what earlier passes have accumulated aside."""
        if self._is_due and self._is_alone:
            self._held = [each.grad for each in self._parameters]
            for each in self._parameters:
                each.grad = None

    def end_pass(self) -> None:
        """On one rank, square the gradients of this pass, and add them to the earlier ones."""
        if not (self._is_due and self._is_alone):
            return
        self._parts.append(_square(self._gradients()))
        for each, held in zip(self._parameters, self._held, strict=True):
            if each.grad is None:
                each.grad = held
            elif held is not None:
                each.grad.add_(held)  # the same sum, bit for bit, as that of accumulation
        self._held = []

    def end_step(self, step: int) -> None:
        """Square the gradients of the whole batch, before they are clipped."""
        if self._is_due and self._parts:  # without parts, the step had no average over ranks
            passes = len(self._parts) if self._is_alone else 1
            # The loss of each of several passes is divided by their number: their mean of squares has it as a factor.
            part = torch.stack(self._parts).sum() * passes
            scale = self._scaler.scale(torch.ones_like(part))
            self._found[step] = torch.stack([part, _square(self._gradients())]) / scale**2
        self._is_due = False

    def take(self) -> dict[int, list[float]]:
        """The squares of this rank's part and of the whole batch by step, since they were taken last."""
        steps, squares = list(self._found), list(self._found.values())
        self._found.clear()
        return dict(zip(steps, torch.stack(squares).tolist(), strict=True)) if steps else {}

    def _gradients(self) -> list[torch.Tensor]:
        return [each.grad for each in self._parameters if each.grad is not None]


def _square(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    dense = [each.coalesce().values() if each.is_sparse else each for each in gradients]
    norms = torch._foreach_norm(dense, 2, dtype=torch.float32)
    return torch.stack(norms).double().square().sum()
