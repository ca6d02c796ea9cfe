"""The images of a packed split, in the place of the files of a folder tree."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tutti.data.image_files import CorruptImage
from tutti.data.packed.index import PackedSamples, read_plan
from tutti.errors import DataError


class PackedImages:
    """Images in shards with the order, the labels and the classes of their source."""

    def __init__(
        self, folder: Path, split: str, classes: int | None = None, stage: str | None = None, keep: bool = False
    ) -> None:
        plan = read_plan(folder)
        if plan.kind != "images":
            raise DataError(f"{folder} holds packed {plan.kind}: expected images. Use data.name=packed for arrays.")
        if classes is not None and not 1 <= classes <= len(plan.classes):
            raise DataError(
                f"data.classes={classes}, but {folder} holds {len(plan.classes)} classes: expected 1 to "
                f"{len(plan.classes)}. Leave data.classes out to use all."
            )
        self.classes = plan.classes[:classes]
        self._samples = PackedSamples(folder, split)
        labels = np.arange(len(self.classes) + 1)
        self._starts = np.searchsorted(self._samples.index.records["label"], labels)  # of each class, and the end
        if not len(self):
            raise DataError(f"{folder} holds no {split} images of the classes of the run: expected at least one.")

        self.stage = self._samples.stage(stage, keep, len(self)) if stage else None

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def blocks(self) -> list[int]:
        """The first image of each shard."""
        return self._samples.blocks(len(self))

    def read_ahead(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Has a thread read blocks of images in sequence."""
        self._samples.read_ahead(blocks)

    def label(self, index: int) -> int:
        return self._samples.label(index)

    def path(self, index: int) -> str:
        return self._samples.path(index)

    def read(self, index: int) -> bytes:
        """Reads the content of an image and compares it with its checksum."""
        try:
            return self._samples.read(index)
        except OSError as error:
            raise DataError(
                f"{self.path(index)} cannot be read: {os.strerror(error.errno or 0)}. Check that the shard is there."
            ) from error
        except ValueError as error:
            raise CorruptImage(
                f"{self.path(index)} has changed since it was packed ({error}). Remove the shard and run tutti data "
                "pack again, or skip such images with data.corrupt=skip."
            ) from error

    def original_size(self, index: int) -> tuple[int, int]:
        """The width and height of an image before it was shrunk."""
        record = self._samples.index.records[index]
        return int(record["width"]), int(record["height"])

    def rest_of_class(self, index: int) -> Iterator[int]:
        """Yields an index, then the other indices of its class in cyclic order."""
        yield index
        first, end = map(int, self._starts[self.label(index) : self.label(index) + 2])
        yield from range(index + 1, end)
        yield from range(first, index)
