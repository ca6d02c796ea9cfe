"""What a dataset is to the loader, and the in-memory kind that gives whole batches at once."""

from typing import Any, Protocol, runtime_checkable

import torch

from tutti.data.augment import Shift
from tutti.data.draws import Draws


@runtime_checkable
class BatchDataset(Protocol):
    """Gives the samples of many ids at once; with draws it augments them, without it does not."""

    def __len__(self) -> int: ...

    def batch(self, ids: torch.Tensor, draws: Draws | None) -> tuple[Any, Any]: ...


@runtime_checkable
class SampleDataset(Protocol):
    """Gives one sample at a time, as torch's map-style datasets do."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class ArrayDataset:
    """Samples in memory as one tensor; images stay bytes and become normalised floats batch by batch."""

    def __init__(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        *,
        mean: float = 0.0,
        std: float = 1.0,
        shift: int = 0,
    ) -> None:
        self._shift = Shift(inputs, shift) if shift else None
        self._inputs = inputs
        self._targets = targets
        self._scale, self._offset = 1 / std, -mean / std
        self.input_shape = tuple(inputs.shape[1:])
        self.num_classes = int(targets.max()) + 1 if targets.dtype == torch.int64 else None

    def __len__(self) -> int:
        return len(self._targets)

    def batch(self, ids: torch.Tensor, draws: Draws | None) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = self._shift.take(ids, draws) if self._shift else self._inputs.index_select(0, ids)
        if inputs.dtype == torch.uint8:
            inputs = inputs.mul(self._scale).add_(self._offset)  # bytes times a number are floats
        else:
            inputs = inputs.to(torch.float32)
            if (self._scale, self._offset) != (1.0, 0.0):
                inputs.mul_(self._scale).add_(self._offset)  # taking has made a copy of its own
        return inputs, self._targets.index_select(0, ids)
