"""Keras and TensorFlow get the same samples as torch, in the same order, with the same augmentation."""

from typing import Any

import numpy as np
import pytest
import torch

from tutti.config.layout import Layout
from tutti.config.plan import Plan
from tutti.data.builtin import digits
from tutti.data.loader import Loader, evaluation_batches, peek
from tutti.data.order import SampleOrder
from tutti.frameworks.feed import CPU, Feed, as_arrays, evaluation_feed
from tutti.train.timing import Clock

PLAN = Plan(Layout(2), global_batch=64, per_rank_batch=32, micro_batch=32, train_samples=1437, epochs=2)


class OneOf:
    """A rank by its number, without others."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size


def loader(rank: int) -> Loader:
    return Loader(digits("train", shift=1), PLAN, SampleOrder(PLAN, 7), rank, CPU, workers=0, prefetch=0)


@pytest.mark.parametrize("rank", [0, 1])
def test_training_samples_are_torchs_bit_by_bit(rank: int) -> None:
    first, batches = peek(loader(rank).steps(20))
    assert first is not None
    feed = Feed(lambda: next(batches, None), Clock())
    arrays = list(feed.arrays())
    expected = [batch.micro_batches[0] for batch in loader(rank).steps(20)]
    assert len(arrays) == len(expected) == PLAN.total_steps - 20
    assert (as_arrays(first.micro_batches[0])[0] == arrays[0][0]).all()
    for (images, labels), (inputs, targets) in zip(arrays, expected, strict=True):
        assert images.shape == (32, 8, 8, 1)
        assert np.moveaxis(images, -1, 1).tobytes() == inputs.numpy().tobytes()
        assert labels.tobytes() == targets.numpy().tobytes()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_validation_sample_is_on_exactly_one_rank(ranks: int) -> None:
    data = digits("valid")
    found = []
    for rank in range(ranks):
        group: Any = OneOf(rank, ranks)
        batches, count = evaluation_feed(data, group, 50, workers=0, seed=7)
        own = list(batches)
        assert len(own) == count
        found += own
    whole = torch.cat([inputs for inputs, _ in evaluation_batches(data, 0, 1, 360, CPU, 0, 7)])
    assert (
        np.concatenate([images for images, _ in found]).tobytes() == whole.movedim(1, -1).contiguous().numpy().tobytes()
    )
