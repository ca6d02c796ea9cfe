"""The same samples as in torch, as arrays with their channels innermost."""

import contextlib
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch

from tutti.data.loader import Loader, RankBatch, evaluation_batches
from tutti.data.order import evaluation_ids
from tutti.errors import TuttiError
from tutti.ranks.group import Group
from tutti.train.clock import Clock

Arrays = tuple[np.ndarray, np.ndarray]
CPU = torch.device("cpu")


def as_arrays(pair: tuple[torch.Tensor, torch.Tensor]) -> Arrays:
    """A batch of torch's as arrays, images with their channels innermost."""
    inputs, labels = pair
    if inputs.ndim > 2:
        inputs = inputs.movedim(1, -1).contiguous()
    return inputs.numpy(), labels.numpy()


class Feed:
    """A rank's training batches from a step to the end of the run; whoever asks for them may do so from any thread."""

    def __init__(self, loader: Loader, clock: Clock) -> None:
        self._loader = loader
        self._clock = clock
        self._source: Any = None  # what is closed at the end
        self._batches: Iterator[RankBatch] = iter(())
        self.error: TuttiError | None = None  # which cannot pass through Keras as it is

    def open(self, first_step: int) -> Arrays | None:
        """Begin at a step; its batch, which will come again."""
        self._source = self._batches = self._loader.steps(first_step)
        first = next(self._batches, None)
        if first is None:
            return None
        self._batches = chain([first], self._batches)
        return as_arrays(first.micro_batches[0])

    def arrays(self) -> Iterator[Arrays]:
        """The batches; the time that goes into them is measured."""
        while True:
            began = self._clock.wait_began()
            try:
                batch = next(self._batches, None)
            except TuttiError as error:
                self.error = error
                return
            if batch is None:
                return
            arrays = as_arrays(batch.micro_batches[0])
            self._clock.wait_ended(began)
            yield arrays

    def close(self) -> None:
        """End the processes that make samples; if they were ended together with this rank, that is no news."""
        if self._source is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                self._source.close()


def evaluation_feed(
    data: Any, group: Group, per_rank_batch: int, workers: int, seed: int
) -> tuple[Iterator[Arrays], int]:
    """This rank's part of an evaluation, each sample on exactly one rank, and the number of its batches."""
    samples = len(evaluation_ids(len(data), group.rank, group.world_size))
    batches = evaluation_batches(data, group.rank, group.world_size, per_rank_batch, CPU, workers, seed)
    return (as_arrays(batch) for batch in batches), -(-samples // per_rank_batch)
