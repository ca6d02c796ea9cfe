"""Memory for batches of images, which worker processes fill and the rank reads, allocated once."""

import math
import mmap
from typing import NamedTuple

import torch


class BatchSlots:
    """Batches in memory that this process shares with those forked from it; each is reused after some batches.

    New shared memory for every batch costs a page fault for each of its pages, in the worker and in the rank.
    """

    def __init__(self, shape: tuple[int, ...], samples: int, slots: int) -> None:
        self.count = slots
        memory = mmap.mmap(-1, math.prod(shape) * samples * slots)
        channels, height, width = shape
        stored = torch.frombuffer(memory, dtype=torch.uint8).view(slots, samples, height, width, channels)
        self._batches = stored.permute(0, 1, 4, 2, 3)  # the channels-last memory format
        self._places = [list(batch) for batch in self._batches]

    def place(self, slot: int, number: int) -> torch.Tensor:
        """The memory of one sample of a slot."""
        return self._places[slot][number]

    def fill(self, slot: int, labels: list[int]) -> "FilledSlot":
        """What a worker sends in place of the samples that it has written."""
        return FilledSlot(slot, labels)

    def take(self, filled: "FilledSlot") -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the samples of a filled slot, valid until the next batch, and their labels."""
        return self._batches[filled.slot, : len(filled.labels)], torch.tensor(filled.labels)


class FilledSlot(NamedTuple):
    """The number of a slot, and the labels of its samples; a list, since a tensor would take a file descriptor."""

    slot: int
    labels: list[int]
