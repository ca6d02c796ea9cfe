"""The batches of torch as NumPy arrays, images in channels-last order."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from tutti.data.loader import RankBatch, evaluation_batches
from tutti.data.order import evaluation_ids
from tutti.errors import TuttiError
from tutti.ranks.group import Group
from tutti.train.timing import Clock

Arrays = tuple[np.ndarray, np.ndarray]  # inputs with channels last, and labels
CPU = torch.device("cpu")


def as_arrays(pair: tuple[torch.Tensor, torch.Tensor]) -> Arrays:
    """A batch of torch as arrays, images in channels-last order."""
    inputs, labels = pair
    if inputs.ndim > 2:
        inputs = inputs.movedim(1, -1).contiguous()
    return inputs.numpy(), labels.numpy()


class Feed:
    """A rank's training batches for Keras' `fit`, which may take them from any thread."""

    def __init__(self, next_batch: Callable[[], RankBatch | None], clock: Clock) -> None:
        self._next_batch = next_batch
        self._clock = clock
        self.error: TuttiError | None = None  # raised after `fit`, which would wrap it

    def arrays(self) -> Iterator[Arrays]:
        """The batches, until the last or an error."""
        while True:
            try:
                batch = self._next_batch()
            except TuttiError as error:
                self.error = error
                return
            if batch is None:
                return
            yield self.convert(batch)

    def convert(self, batch: RankBatch) -> Arrays:
        """A batch as arrays; the time of the conversion is measured."""
        began = self._clock.wait_began()
        arrays = as_arrays(batch.micro_batches[0])
        self._clock.wait_ended(began)
        return arrays


def evaluation_feed(
    data: Any, group: Group, per_rank_batch: int, workers: int, seed: int
) -> tuple[Iterator[Arrays], int]:
    """This rank's part of an evaluation, each sample on exactly one rank, and the number of its batches."""
    samples = len(evaluation_ids(len(data), group.rank, group.world_size))
    batches = evaluation_batches(data, group.rank, group.world_size, per_rank_batch, CPU, workers, seed)
    return (as_arrays(batch) for batch in batches), -(-samples // per_rank_batch)
