"""The dataset protocol, the in-memory dataset that returns whole batches, and augmentation of whole batches."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch

from tutti.data.order import Draws
from tutti.errors import DataError

Fill = Literal["zero", "edge", "reflect"]
Flip = bool | Literal["alternate"]
_PADDING = {"zero": "constant", "edge": "edge", "reflect": "reflect"}


class MovedImages:
    """Images that are shifted by up to `shift` pixels in both directions and mirrored as they are taken.

    With `flip="alternate"` half of the images are mirrored in even epochs and the other half in odd ones.
    """

    def __init__(self, images: torch.Tensor, shift: int, flip: Flip = False, fill: Fill = "zero") -> None:
        self._shift, self._flip = shift, flip
        self._height, self._width = images.shape[2:]
        padded = _pad(images, shift, fill)
        self._padded = padded
        if images.device.type == "cpu":
            # Every window of every image as a view: a shift is a choice of window, and copies only its own pixels.
            self._windows = np.lib.stride_tricks.sliding_window_view(padded.numpy(), images.shape[2:], axis=(2, 3))

    def take(self, ids: torch.Tensor, draws: Draws | None) -> torch.Tensor:
        """The images of the given ids, each moved in its own way, or all in their places."""
        top = left = torch.full_like(ids, self._shift)
        mirrored = None
        if draws is not None:
            if self._shift:
                top, left = draws.integers(0, 2 * self._shift), draws.integers(0, 2 * self._shift)
            if self._flip:
                mirrored = draws.alternating() if self._flip == "alternate" else draws.integers(0, 1).bool()
        take = self.take_windows if self._padded.device.type == "cpu" else self.gather
        return take(ids, top, left, mirrored)

    def take_windows(
        self, ids: torch.Tensor, top: torch.Tensor, left: torch.Tensor, mirrored: torch.Tensor | None
    ) -> torch.Tensor:
        """In memory, a window of each image."""
        images = torch.from_numpy(self._windows[ids.numpy(), :, top.numpy(), left.numpy()])
        if mirrored is not None:
            images[mirrored] = images[mirrored].flip(-1)
        return images

    def gather(
        self, ids: torch.Tensor, top: torch.Tensor, left: torch.Tensor, mirrored: torch.Tensor | None
    ) -> torch.Tensor:
        """On a GPU, one gather for the whole batch; the channels come out innermost."""
        choices = torch.stack((ids, top, left, ids if mirrored is None else mirrored.to(ids.dtype)))
        device = self._padded.device
        if device.type == "cuda":
            choices = choices.pin_memory().to(device, non_blocking=True)
        ids, top, left, mirrors = choices.unsqueeze(-1)
        rows = top + torch.arange(self._height, device=device)
        columns = torch.arange(self._width, device=device).expand(len(ids), -1)
        if mirrored is not None:
            columns = torch.where(mirrors.bool(), self._width - 1 - columns, columns)
        columns = columns + left
        return self._padded[ids[:, :, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _pad(images: torch.Tensor, pixels: int, fill: Fill) -> torch.Tensor:
    """Images with a margin, made on the CPU, where bytes need not become floats for it."""
    if not pixels:
        return images
    margins = ((0, 0), (0, 0), (pixels, pixels), (pixels, pixels))
    return torch.from_numpy(np.pad(images.cpu().numpy(), margins, mode=_PADDING[fill])).to(images.device)  # pyright: ignore


_IGNORED = -100  # the label of what cross entropy leaves out


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


def check_labels(labels: np.ndarray, classes: int, place: str, fix: str) -> None:
    """Refuse labels that are no class; `place` says where they are, `fix` what to do."""
    if len(wrong := labels[(labels < 0) | (labels >= classes)]):
        raise DataError(f"{place} holds the label {wrong[0]}: expected 0 to {classes - 1}. {fix}")


def check_batch(dataset: Any, batch: Any, ids: Sequence[int]) -> None:
    """Refuse labels that are no class in a batch on the CPU, where its dataset says how many classes there are."""
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
    """Refuse labels in validation data for which a model built for the training data has no output."""
    known, used = getattr(train_data, "num_classes", None), getattr(valid_data, "num_classes", None)
    if isinstance(valid_data, ArrayDataset) and isinstance(known, int) and isinstance(used, int) and used > known:
        raise DataError(
            f"the validation data holds the label {used - 1}: expected 0 to {known - 1}, as in the training data. "
            "Correct the labels, or give training samples of that class."
        )


class ArrayDataset:
    """Samples in memory as one tensor; images stay bytes and become normalised floats batch by batch.

    On a device they stay there for the whole run, and batches are made there. `mean` and `std` are numbers for all
    channels or one for each, in the units of the inputs.
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
        here = ids.to(self._inputs.device, non_blocking=True)
        inputs = self._moved.take(ids, draws) if self._moved else self._inputs.index_select(0, here)
        if inputs.dtype == torch.uint8:
            inputs = inputs.mul(self._scale).add_(self._offset)  # bytes times a number are floats
        else:
            inputs = inputs.to(torch.float32)
            if self._is_scaled:
                inputs.mul_(self._scale).add_(self._offset)  # taking has made a copy of its own
        return inputs, self._targets.index_select(0, here)

    def _by_channel(self, values: np.ndarray) -> Any:
        """A number as it is, or a tensor with one value for each channel."""
        if values.ndim == 0:
            return float(values)
        shape = (-1, *[1] * (self._inputs.ndim - 2))
        return torch.tensor(values, dtype=torch.float32, device=self._inputs.device).view(shape)


def _count_classes(targets: torch.Tensor) -> int:
    """One more than the largest label."""
    if not len(targets):
        raise DataError("a dataset has no samples: expected at least one. Check where its data is read from.")
    if bool((wrong := (targets < 0) & (targets != _IGNORED)).any()):
        raise DataError(
            f"the targets of a dataset hold the label {int(targets[wrong][0])}: expected 0 or more. Correct the labels."
        )
    return int(targets.max()) + 1
