"""The exponential moving average of weights, in fp32, beside those that are trained."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from tutti.parallel.mesh import Mesh


class AveragedWeights:
    """Averages of a model's parameters and of its batch-norm statistics; of shards, where ranks hold shards.

    An average is a function of one element over the steps, so that it does not depend on how ranks share the elements.
    Batch-norm statistics are of a rank's own samples until they are averaged over ranks; that is linear, as the moving
    average is, and is done when either is used.
    """

    def __init__(self, model: nn.Module, decay: float, mesh: Mesh) -> None:
        self._model, self._decay, self._mesh = model, decay, mesh
        statistics = {
            f"{name}.{key}": buffer.data
            for name, layer in model.named_modules()
            if isinstance(layer, _NormBase)
            for key, buffer in layer.named_buffers(recurse=False)
            if buffer.is_floating_point()
        }
        self._trained: dict[str, torch.Tensor] = dict(model.named_parameters()) | statistics
        self._statistics = list(statistics)
        self.state = {
            name: torch.zeros_like(value.detach(), dtype=torch.float32) for name, value in self._trained.items()
        }
        self._copy(self._local(self._trained), self._local(self.state))

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the weights of this step."""
        weights = [value.float() for value in self._local(self._trained)]
        torch._foreach_lerp_(self._local(self.state), weights, 1 - self._decay)

    @torch.no_grad()
    def combine_ranks(self) -> None:
        """Average the averaged statistics of batch norm over ranks; every rank enters."""
        copies = self._mesh.layout.copies
        if copies == 1 or not self._statistics:
            return
        own = [self.state[name] for name in self._statistics]
        flat = torch.cat([each.reshape(-1) for each in own])
        dist.all_reduce(flat, group=self._mesh.copies)
        flat /= copies
        for each, part in zip(own, flat.split([each.numel() for each in own]), strict=True):
            each.copy_(part.view_as(each))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Have the model compute with the averages, and with its own weights again afterwards."""
        self._reshard()
        trained = self._local(self._trained)
        kept = [value.clone() for value in trained]
        self._copy(self._local(self.state), trained)
        try:
            yield
        finally:
            self._reshard()
            self._copy(kept, trained)

    def _reshard(self) -> None:
        """Free parameters that FSDP has gathered and still holds, so that it gathers those that are set now."""
        if self._mesh.layout.uses_fsdp:
            from torch.distributed.fsdp import FSDPModule

            for module in self._model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    @torch.no_grad()
    def _copy(self, source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> None:
        for value, place in zip(source, target, strict=True):
            place.copy_(value)

    def _local(self, values: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """The elements of each tensor that this rank holds, in the memory of the tensor."""
        found = [value.detach() for value in values.values()]
        return [value.to_local() if isinstance(value, DTensor) else value for value in found]
