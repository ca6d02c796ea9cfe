"""The dataset protocol, the in-memory dataset that returns whole batches, and augmentation of whole batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from tutti.config.layout import Layout
from tutti.data.order import Draws
from tutti.errors import DataError, TuttiError


@dataclass(frozen=True)
class Part:
    """A part of a sample in space: how many there are along each of its first dimensions, and which one this is."""

    parts: tuple[int, ...]
    place: tuple[int, ...]

    def window(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """The first cell and the number of cells along each dimension of a sample of these sizes."""
        counts = (*self.parts, *[1] * (len(sizes) - len(self.parts)))
        places = (*self.place, *[0] * (len(sizes) - len(self.parts)))
        return [
            (size // count * place, size // count) for size, count, place in zip(sizes, counts, places, strict=True)
        ]

    def cut_batch(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """This part of a batch: of its inputs, and of targets with the same cells."""
        first = next(tensors_in(inputs))
        sizes = tuple(first.shape[2:])
        return self._cut(inputs, sizes), self._cut(targets, sizes)

    def _cut(self, values: Any, sizes: tuple[int, ...]) -> Any:
        if isinstance(values, torch.Tensor):
            if values.ndim <= len(sizes) or tuple(values.shape[values.ndim - len(sizes) :]) != sizes:
                return values
            for dim, (start, size) in enumerate(self.window(sizes), start=values.ndim - len(sizes)):
                values = values.narrow(dim, start, size)
            return values.contiguous()
        if isinstance(values, dict):
            return {key: self._cut(value, sizes) for key, value in values.items()}
        if isinstance(values, tuple | list):
            cut = [self._cut(value, sizes) for value in values]
            return type(values)(*cut) if hasattr(values, "_fields") else type(values)(cut)
        return values


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts, such as a batch."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict | list | tuple):
        for value in values.values() if isinstance(values, dict) else values:
            yield from tensors_in(value)


def find_part(layout: Layout, rank: int) -> Part | None:
    """The part of each sample that a rank has; None for whole samples."""
    if max(layout.space) == 1:
        return None
    place, number = [], layout.space_rank(rank)
    for count in reversed(layout.space):
        number, index = divmod(number, count)
        place.append(index)
    return Part(layout.space, tuple(reversed(place)))


Fill = Literal["zero", "edge", "reflect"]
Flip = bool | Literal["alternate"]
_PADDING = {"zero": "constant", "edge": "edge", "reflect": "reflect"}


class MovedImages:
    """Images in memory with random shifts of up to `shift` pixels and random horizontal flips.

    With `flip="alternate"` half of the images are flipped in even epochs and the other half in odd ones.
    """

    def __init__(self, images: torch.Tensor, shift: int, flip: Flip = False, fill: Fill = "zero") -> None:
        self._shift, self._flip = shift, flip
        self._height, self._width = images.shape[2:]
        padded = _pad(images, shift, fill)
        self._padded = padded
        if images.device.type == "cpu":
            # A view of every window of every image: indexing it copies only the pixels of the chosen window.
            self._windows = np.lib.stride_tricks.sliding_window_view(padded.numpy(), images.shape[2:], axis=(2, 3))

    def take(self, ids: torch.Tensor, draws: Draws | None) -> torch.Tensor:
        """Returns the images of the given ids, augmented if `draws` is given."""
        top = left = torch.full_like(ids, self._shift)
        flipped = None
        if draws is not None:
            if self._shift:
                top, left = draws.integers(0, 2 * self._shift), draws.integers(0, 2 * self._shift)
            if self._flip:
                flipped = draws.alternating() if self._flip == "alternate" else draws.integers(0, 1).bool()
        take = self.take_windows if self._padded.device.type == "cpu" else self.gather
        return take(ids, top, left, flipped)

    def take_windows(
        self, ids: torch.Tensor, top: torch.Tensor, left: torch.Tensor, flipped: torch.Tensor | None
    ) -> torch.Tensor:
        """Selects one window of each image, on the CPU."""
        images = torch.from_numpy(self._windows[ids.numpy(), :, top.numpy(), left.numpy()])
        if flipped is not None:
            images[flipped] = images[flipped].flip(-1)
        return images

    def gather(
        self, ids: torch.Tensor, top: torch.Tensor, left: torch.Tensor, flipped: torch.Tensor | None
    ) -> torch.Tensor:
        """Selects one window of each image with a single gather, on a GPU; the result is channels-last."""
        choices = torch.stack((ids, top, left, ids if flipped is None else flipped.to(ids.dtype)))
        device = self._padded.device
        if device.type == "cuda":
            choices = choices.pin_memory().to(device, non_blocking=True)
        ids, top, left, mirrors = choices.unsqueeze(-1)
        rows = top + torch.arange(self._height, device=device)
        columns = torch.arange(self._width, device=device).expand(len(ids), -1)
        if flipped is not None:
            columns = torch.where(mirrors.bool(), self._width - 1 - columns, columns)
        columns = columns + left
        return self._padded[ids[:, :, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _pad(images: torch.Tensor, pixels: int, fill: Fill) -> torch.Tensor:
    """Pads images on the CPU, where padding works on bytes without a conversion to floats."""
    if not pixels:
        return images
    margins = ((0, 0), (0, 0), (pixels, pixels), (pixels, pixels))
    return torch.from_numpy(np.pad(images.cpu().numpy(), margins, mode=_PADDING[fill])).to(images.device)  # pyright: ignore


_IGNORED = -100  # the default `ignore_index` of torch's cross entropy


BatchKey = tuple[int, np.ndarray]  # epoch (-1: no augmentation) and sample ids


class LoadedBatch(NamedTuple):
    """A batch as a worker returns it."""

    pair: Any  # None if every sample was skipped
    skipped: tuple[str, ...] = ()
    error: TuttiError | None = None


@runtime_checkable
class BatchDataset(Protocol):
    """A dataset that returns whole batches; it augments them if `draws` is given."""

    def __len__(self) -> int: ...

    def batch(self, ids: torch.Tensor, draws: Draws | None) -> tuple[Any, Any]: ...


@runtime_checkable
class SampleDataset(Protocol):
    """A map-style dataset, as in torch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def check_labels(labels: np.ndarray, classes: int, place: str, fix: str) -> None:
    """Raises DataError for labels outside 0 .. classes - 1; `place` and `fix` complete the message."""
    if len(wrong := labels[(labels < 0) | (labels >= classes)]):
        raise DataError(f"{place} holds the label {wrong[0]}: expected 0 to {classes - 1}. {fix}")


def check_batch(dataset: Any, batch: Any, ids: Sequence[int]) -> None:
    """Raises DataError for labels outside the dataset's `num_classes` in a batch on the CPU."""
    classes = getattr(dataset, "num_classes", None)
    targets = batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None
    if not isinstance(classes, int) or not isinstance(targets, torch.Tensor):
        return
    if targets.dtype != torch.int64 or targets.ndim != 1 or targets.device.type != "cpu":
        return
    wrong = ((targets < 0) | (targets >= classes)) & (targets != _IGNORED)
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        sample = f"sample {ids[place]}" if len(ids) == len(targets) else "a sample"
        raise DataError(
            f"{sample} of {type(dataset).__name__} has the label {int(targets[place])}: expected 0 to {classes - 1}, "
            f"since its num_classes is {classes}. Correct the label, or num_classes."
        )


def check_classes(train_data: Any, valid_data: Any) -> None:
    """Raises DataError if the validation data has more classes than the training data."""
    known, used = getattr(train_data, "num_classes", None), getattr(valid_data, "num_classes", None)
    if isinstance(valid_data, ArrayDataset) and isinstance(known, int) and isinstance(used, int) and used > known:
        raise DataError(
            f"the validation data holds the label {used - 1}: expected 0 to {known - 1}, as in the training data. "
            "Correct the labels, or give training samples of that class."
        )


class ArrayDataset:
    """Samples in memory as one tensor; images are stored as bytes and normalised batch by batch.

    With `device` the tensor is stored on that device and batches are made there. `mean` and `std` are one number or
    one per channel, in the units of the inputs.
    """

    def __init__(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        *,
        mean: float | Sequence[float] = 0.0,
        std: float | Sequence[float] = 1.0,
        shift: int = 0,
        flip: Flip = False,
        fill: Fill = "zero",
        device: torch.device | None = None,
    ) -> None:
        self.input_shape = tuple(inputs.shape[1:])
        self.num_classes = _count_classes(targets) if targets.dtype == torch.int64 else None
        if device is not None:
            inputs, targets = inputs.to(device), targets.to(device)
        self._inputs, self._targets = inputs, targets
        self._moved = MovedImages(inputs, shift, flip, fill) if shift or flip else None
        scale, offset = 1 / np.asarray(std, np.float64), -np.asarray(mean, np.float64) / np.asarray(std, np.float64)
        self._is_scaled = bool(np.any(scale != 1) or np.any(offset != 0))
        self._scale, self._offset = (self._by_channel(values) for values in (scale, offset))

    def __len__(self) -> int:
        return len(self._targets)

    def batch(self, ids: torch.Tensor, draws: Draws | None) -> tuple[torch.Tensor, torch.Tensor]:
        on_device = ids.to(self._inputs.device, non_blocking=True)
        inputs = self._moved.take(ids, draws) if self._moved else self._inputs.index_select(0, on_device)
        if inputs.dtype == torch.uint8:
            inputs = self.normalise(inputs)
        else:
            inputs = inputs.to(torch.float32)
            if self._is_scaled:
                inputs.mul_(self._scale).add_(self._offset)  # in place: indexing has copied
        return inputs, self._targets.index_select(0, on_device)

    def normalise(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns bytes as a model gets them."""
        return inputs.mul(self._scale).add_(self._offset)  # uint8 times a float gives float32

    def _by_channel(self, values: np.ndarray) -> Any:
        """Returns a number unchanged, or a tensor that broadcasts one value per channel."""
        if values.ndim == 0:
            return float(values)
        shape = (-1, *[1] * (self._inputs.ndim - 2))
        return torch.tensor(values, dtype=torch.float32, device=self._inputs.device).view(shape)


def _count_classes(targets: torch.Tensor) -> int:
    """Returns the largest label plus one."""
    if not len(targets):
        raise DataError("a dataset has no samples: expected at least one. Check where its data is read from.")
    if bool((wrong := (targets < 0) & (targets != _IGNORED)).any()):
        raise DataError(
            f"the targets of a dataset hold the label {int(targets[wrong][0])}: expected 0 or more. Correct the labels."
        )
    return int(targets.max()) + 1
