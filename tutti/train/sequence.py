"""The learner of sequences that are split over ranks: each has the outputs and the loss of its places."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tutti.config.plan import Plan
from tutti.config.run import RunConfig
from tutti.data.loader import evaluation_batches
from tutti.errors import ConfigError
from tutti.parallel.mesh import Mesh
from tutti.parallel.sequence import SequenceParts, check_sequence, gives_parts, split_sequences
from tutti.ranks.group import Group
from tutti.train.learner import TorchLearner
from tutti.train.spread import fake_forward

Criterion = Callable[[Any, Any], torch.Tensor]


class SequenceLearner(TorchLearner):
    """A learner whose model computes on this rank's places of sequences."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        group: Group,
        mesh: Mesh,
        model: nn.Module,
        criterion: Criterion,
        *more: Any,
    ) -> None:
        self._parts = SequenceParts(mesh.layout.sequence, mesh.layout.space_rank(group.rank), *mesh.neighbours)
        self._gives_parts = gives_parts(model)
        split_sequences(model, self._parts)
        loss = PlacesLoss(criterion, self._parts) if self._gives_parts else criterion
        super().__init__(config, plan, group, mesh, model, loss, *more)

    def _whole(self, inputs: Any, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """Outputs of whole sequences, for metrics; every rank that shares them enters."""
        if not self._gives_parts or not self._metrics:
            return outputs, targets
        with torch.no_grad():
            return self._parts.gather(outputs), targets


class PlacesLoss(nn.Module):
    """A loss of this rank's places, given the targets of whole sequences."""

    def __init__(self, criterion: Criterion, parts: SequenceParts) -> None:
        super().__init__()
        self._criterion, self._parts = criterion, parts

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._criterion(outputs, self._parts.cut(targets))


def check_sequences(
    config: RunConfig, plan: Plan, model: nn.Module, criterion: Criterion, data: Any, device: torch.device
) -> None:
    """Refuse a model, data or a loss that cannot be split by places."""
    parts, found = plan.layout.sequence, []
    check_sequence(model, parts, lambda: found.append(fake_forward(model, config, plan, data, device, None)))
    if not gives_parts(model):
        return
    shape = found[0].shape[1:]
    _, targets = next(evaluation_batches(data, 0, len(data), 1, device, 0, config.seed))
    if not isinstance(targets, torch.Tensor) or targets.shape[1:2] != shape[:1]:
        given = f"shape {list(targets.shape[1:])}" if isinstance(targets, torch.Tensor) else type(targets).__name__
        raise ConfigError(
            f"parallel.sequence={parts} with targets of {given} for {shape[0]} places: expected a target for each "
            "place. Set parallel.sequence=1, or choose other data."
        )
    outputs = torch.rand(1, *shape, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        expected = float(criterion(outputs, targets))
        pairs = zip(outputs.chunk(parts, 1), targets.chunk(parts, 1), strict=True)
        mean = sum(float(criterion(*pair)) for pair in pairs) / parts
    if not math.isclose(expected, mean, rel_tol=1e-3, abs_tol=1e-6):
        raise ConfigError(
            f"parallel.sequence={parts}: the loss of a whole sequence is {expected:.4g} and the mean over its parts "
            f"{mean:.4g}: expected a loss that is a mean over places. Choose another loss, or set parallel.sequence=1."
        )
