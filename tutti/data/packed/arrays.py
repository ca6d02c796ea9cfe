"""Packed arrays as a map-style dataset."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tutti.data.packed.index import PackedSamples, is_packed
from tutti.data.packed.staging import Stage
from tutti.errors import DataError


def packed_arrays(
    split: str, path: str = "data/packed", stage: str | None = None, keep_staged: bool = False
) -> "PackedArrays":
    """Returns the arrays of a split of a packed folder."""
    folder = Path(path)
    if not is_packed(folder):
        raise DataError(f"{folder} is not a packed dataset. Make one: tutti data pack module:object {folder}")
    samples = PackedSamples(folder, split)
    if samples.plan.kind != "arrays":
        raise DataError(f"{folder} holds packed {samples.plan.kind}: expected arrays. Use data.name=images for images.")
    found = PackedArrays(samples)
    found.stage = samples.stage(stage, keep_staged) if stage else None
    return found


class PackedArrays:
    """Pairs of input and target as they were packed; a target that is a label is a number."""

    def __init__(self, samples: PackedSamples) -> None:
        self._samples = samples
        self.stage: Stage | None = None
        self.blocks = samples.blocks(len(samples))  # for data.shuffle=blocks
        labels = samples.index.records["label"]
        self.input_shape = tuple(self[0][0].shape)
        if labels.min() >= 0:
            self.num_classes = int(labels.max()) + 1

    def __len__(self) -> int:
        return len(self._samples)

    def read_ahead(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Has a thread read blocks of samples in sequence."""
        self._samples.read_ahead(blocks)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Any]:
        try:
            content = np.load(io.BytesIO(self._samples.read(index)), allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self._samples.path(index)} cannot be read ({error}). Remove the shard and run tutti data pack again."
            ) from error
        if isinstance(content, np.ndarray):
            return torch.from_numpy(content), self._samples.label(index)
        return torch.from_numpy(content["inputs"]), torch.from_numpy(content["targets"])
