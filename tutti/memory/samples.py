"""What a model is given in a run: the shape of a sample, from the options of a recipe or from its dataset."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tutti.config import parts
from tutti.config.run import RunConfig
from tutti.data.packed.index import is_packed, read_plan
from tutti.ranks.device import DTYPES

NBODY_CHANNELS = 4, 5
_IMAGENET_CLASSES = 1000
_MANY_SAMPLES = 1 << 40  # where their number is not known, an epoch is long


@dataclass(frozen=True)
class Samples:
    """One sample with a dimension for the batch, and what a model is told of the data."""

    inputs: Any
    targets: Any
    shapes: dict[str, Any]
    count: int = _MANY_SAMPLES
    notes: tuple[str, ...] = ()


def describe_samples(config: RunConfig) -> Samples:
    """The shape of a sample: from the options of the recipe where they tell it, else from the dataset, then opened."""
    found = _from_options(config).get(config.data.name, functools.partial(_open, config))()
    count = config.data.train_samples()
    return found if count is None else replace(found, count=count)


def tells_shape(config: RunConfig) -> bool:
    """Return whether the options of a recipe tell the shape of a sample, so that no dataset is opened for it."""
    return config.data.name in _from_options(config)


def _from_options(config: RunConfig) -> dict[str, Callable[[], Samples]]:
    data: Any = config.data
    return {
        "digits": lambda: _images((1, 8, 8), 10),
        "mnist": lambda: _images((1, 28, 28), 10),
        "cifar10": lambda: _images((3, 32, 32), 10),
        "synthetic": lambda: _images(data.shape, data.classes),
        "images": lambda: _image_tree(data),
        "nbody": lambda: _volumes(data.crop, DTYPES[config.precision] if data.rounded else torch.float32),
    }


def _images(shape: Sequence[int], classes: int) -> Samples:
    inputs = torch.empty((1, *shape), device="meta")
    targets = torch.empty(1, dtype=torch.int64, device="meta")
    return Samples(inputs, targets, {"input_shape": tuple(shape), "num_classes": classes})


def _image_tree(data: Any) -> Samples:
    root = Path(data.path)
    known = len(read_plan(root).classes) if is_packed(root) else sum(each.is_dir() for each in root.glob("train/*"))
    classes = known or _IMAGENET_CLASSES
    found = _images((3, data.size, data.size), min(classes, data.classes or classes))
    if known or data.classes:
        return found
    note = f"{_IMAGENET_CLASSES:,} classes are assumed, since there are no images in data.path={data.path}"
    return replace(found, notes=(note,))


def _volumes(crop: int, dtype: torch.dtype) -> Samples:
    inputs, targets = (torch.empty((1, channels, crop, crop, crop), device="meta") for channels in NBODY_CHANNELS)
    inputs = inputs.to(dtype)
    return Samples(inputs, targets, {"input_shape": tuple(inputs.shape[1:])})


def _open(config: RunConfig) -> Samples:
    dataset = parts.call(config.data.locate(), "data", config.data.options(), split="train")
    if hasattr(dataset, "batch"):
        pair = dataset.batch(torch.arange(1), None)
    else:
        pair = getattr(dataset, "collate", torch.utils.data.default_collate)([dataset[0]])
    if hasattr(dataset, "finish"):
        pair = (dataset.finish(pair[0]), pair[1])
    shapes = {name: getattr(dataset, name) for name in ("input_shape", "num_classes") if hasattr(dataset, name)}
    return Samples(pair[0], pair[1], {name: each for name, each in shapes.items() if each is not None}, len(dataset))
