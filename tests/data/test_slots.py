"""Slots of shared memory: many batches through few slots are the batches without them."""

from pathlib import Path

import pytest
import torch

from tutti.config.layout import Layout
from tutti.config.plan import Plan
from tutti.data.image_tree import image_tree
from tutti.data.loader import Loader
from tutti.data.make_images import make_images
from tutti.data.order import SampleOrder
from tutti.data.slots import BatchSlots

CPU = torch.device("cpu")


def test_a_slot_holds_its_samples_until_it_is_filled_again() -> None:
    slots = BatchSlots((3, 4, 5), samples=2, slots=3)
    for value in (7, 8):
        slots.place(1, value - 7).fill_(value)
    images, labels = slots.take(slots.fill(1, [4, 2]))
    assert images.shape == (2, 3, 4, 5) and images.is_contiguous(memory_format=torch.channels_last)
    assert images[0].unique().tolist() == [7] and images[1].unique().tolist() == [8]
    assert labels.tolist() == [4, 2] and labels.dtype == torch.int64
    slots.place(2, 0).fill_(9)
    assert images[0].unique().tolist() == [7]
    assert len(slots.take(slots.fill(1, [4]))[0]) == 1


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_more_batches_than_slots_are_those_without_workers(tmp_path: Path) -> None:
    tree = make_images(tmp_path / "tree", classes=2, train=6, valid=1, size=24)
    dataset = image_tree("train", str(tree), size=16)
    plan = Plan(Layout(1), 2, 2, 2, len(dataset), 4)
    runs = []
    for workers, prefetch in ((0, 0), (1, 0), (2, 3)):
        loader = Loader(dataset, plan, SampleOrder(plan, 1), 0, CPU, workers, prefetch)
        runs.append([batch.micro_batches[0] for batch in loader.steps(0)])
    assert len(runs[0]) == 24
    for run in runs[1:]:
        for (images, labels), (expected, expected_labels) in zip(run, runs[0], strict=True):
            assert torch.equal(images, expected) and torch.equal(labels, expected_labels)
