"""ImageNet and similar datasets: images of classes in a folder tree or in packed shards, decoded by loader workers."""

import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tutti.data.decode import Choose, centre_view, crop_view, decode_view, shift_view
from tutti.data.image_files import SPLITS, CorruptImage, ImageFiles, class_names, find_reason
from tutti.data.packed.images import PackedImages
from tutti.data.packed.index import is_packed
from tutti.data.slots import BatchSlots
from tutti.errors import ConfigError, DataError, nearest

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels, scaled to 0..1
AUGMENTS = ("crop", "shift_zoom", "none")
POLICIES = ("refuse", "skip")


def image_tree(
    split: str,
    path: str = "data/imagenet",
    size: int = 224,
    augment: str = "crop",
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (0.75, 1.3333),
    shift: float = 0.33,
    zoom: float = 0.5,
    flip: bool = True,
    centre: float = 0.875,
    classes: int | None = None,
    corrupt: str = "refuse",
    stage: str | None = None,
    keep_staged: bool = False,
) -> "ImageTree":
    """Returns the images of a folder tree or of a packed folder; `classes` limits them to the first by name."""
    _check_options(split, size, augment, scale, ratio, shift, zoom, centre, corrupt)
    if split == "valid" or augment == "none":
        choose: Choose = partial(centre_view, share=centre)
    elif augment == "crop":
        choose = partial(crop_view, scale=(scale[0], scale[1]), ratio=(ratio[0], ratio[1]), flip=flip)
    else:
        choose = partial(shift_view, shift=shift, zoom=zoom, flip=flip)
    root = Path(path)
    try:
        if is_packed(root):
            files: ImageFiles | PackedImages = PackedImages(root, split, classes, stage, keep_staged)
        else:
            if stage:
                raise DataError(
                    f"data.stage={stage} copies the shards of a packed dataset: {root} is a tree of files. Pack it: "
                    f"tutti data pack {root} FOLDER, and set data.path=FOLDER."
                )
            files = ImageFiles(root, split, class_names(root, classes))
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}. Check its permissions.") from error
    return ImageTree(files, size, choose, corrupt == "skip", replaces=split == "train")


class ImageTree:
    """Map-style dataset of encoded images; pixels are bytes until `finish` normalises a batch on the device.

    Images have the shape (3, size, size) in the channels-last memory format, in which they are decoded.
    """

    def __init__(
        self, files: ImageFiles | PackedImages, size: int, choose: Choose, skips: bool, replaces: bool
    ) -> None:
        self._files = files
        self.stage = getattr(files, "stage", None)
        # For data.shuffle=blocks; a tree has none.
        self.blocks: list[int] | None = getattr(files, "blocks", None)
        self.read_ahead: Callable[[list[tuple[int, int]]], None] | None = getattr(files, "read_ahead", None)
        self._size = size
        self._choose = choose
        self._replaces = replaces
        self.input_shape = (3, size, size)
        self.num_classes = len(files.classes)
        # Corrupt files that were skipped and not yet reported; None if corrupt files are errors.
        self.skipped: list[str] | None = [] if skips else None

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int] | None:
        """Returns an image and its class, or None for one that is left out."""
        image = torch.empty((self._size, self._size, 3), dtype=torch.uint8).permute(2, 0, 1)
        label = self.read_into(index, image)
        return None if label is None else (image, label)

    def allocate_slots(self, samples: int, slots: int) -> BatchSlots:
        """Memory for batches of so many samples, into which loader processes write (`read_into`)."""
        return BatchSlots(self.input_shape, samples, slots)

    def read_into(self, index: int, out: torch.Tensor) -> int | None:
        """Decodes an image into memory and returns its class.

        A corrupt one that is skipped is replaced by the next of its class; in validation it is left out.
        """
        for other in self._files.rest_of_class(index) if self._replaces else [index]:
            try:
                self._decode(other, out)
                return self._files.label(index)
            except CorruptImage:
                if self.skipped is None:
                    raise
                self.skipped.append(self._files.path(other))
        if self._replaces:
            raise DataError(
                f"none of the images in {os.path.dirname(self._files.path(index))} can be decoded: expected at least "
                "one. Replace them, or remove the class."
            )
        return None

    def collate(self, samples: list[tuple[torch.Tensor, int]]) -> Any:
        """Returns a batch in the channels-last memory format."""
        images, labels = torch.utils.data.default_collate([(image.permute(1, 2, 0), label) for image, label in samples])
        return images.permute(0, 3, 1, 2), labels

    def finish(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalises bytes with ImageNet's mean and standard deviation."""
        return normalise(inputs)

    def _decode(self, index: int, out: torch.Tensor) -> None:
        content = self._files.read(index)
        try:
            decode_view(content, out, self._choose, self._files.original_size(index))
        except MemoryError:
            raise
        except Exception as error:  # decoders raise almost anything on bytes that are wrong
            raise CorruptImage(
                f"{self._files.path(index)} cannot be decoded as an image ({find_reason(error, content)}). Replace or "
                "remove it, or skip such images with data.corrupt=skip."
            ) from error


def _check_options(
    split: str,
    size: int,
    augment: str,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    shift: float,
    zoom: float,
    centre: float,
    corrupt: str,
) -> None:
    for key, given, choices in (
        ("split", split, SPLITS),
        ("augment", augment, AUGMENTS),
        ("corrupt", corrupt, POLICIES),
    ):
        if given not in choices:
            raise ConfigError(f"data.{key}={given!r}: expected one of {', '.join(choices)}.{nearest(given, choices)}")
    for key, given, fits, expected in (
        ("size", size, size >= 1, "at least 1 pixel"),
        ("scale", scale, 0 < scale[0] <= scale[1] <= 1, "two shares of the area, 0 < low <= high <= 1"),
        ("ratio", ratio, 0 < ratio[0] <= ratio[1], "two ratios of width to height, 0 < low <= high"),
        ("shift", shift, 0 <= shift < 1, "a share of the height and width from 0 to below 1"),
        ("zoom", zoom, 0 <= zoom < 1, "a share from 0 to below 1"),
        ("centre", centre, 0 < centre <= 1, "a share of the shorter side, above 0 and at most 1"),
    ):
        if not fits:
            raise ConfigError(f"data.{key}={given}: expected {expected}.")


def normalise(inputs: torch.Tensor) -> torch.Tensor:
    """Normalises a batch of bytes with ImageNet's mean and standard deviation."""
    width = inputs.shape[-1]
    scale, offset = _normalisation(inputs.device, width)
    rows = inputs.permute(0, 2, 3, 1).flatten(2)
    if inputs.device.type == "cpu":
        finished = torch.from_numpy(np.empty(rows.shape, np.float32))  # NumPy asks for huge pages, torch does not
    else:
        finished = torch.empty(rows.shape, dtype=torch.float32, device=inputs.device)
    torch.addcmul(offset, finished.copy_(rows), scale, out=finished)
    return finished.unflatten(2, (width, 3)).permute(0, 3, 1, 2)


@cache
def _normalisation(device: torch.device, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scale and offset of each number of a row of pixels, copied to a device once.

    With one factor for each number of a row, memory is passed over in long runs.
    """
    with torch.inference_mode(False):
        mean, std = (torch.tensor(values, dtype=torch.float64) for values in (MEAN, STD))
        scale, offset = (each.to(torch.float32).repeat(width) for each in (1 / (255 * std), -mean / std))
        return scale.to(device), offset.to(device)
