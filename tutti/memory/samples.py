"""What a model is given in a run: the shape of a sample, from the options of a recipe or from its dataset."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tutti.config import parts
from tutti.config.plan import MANY_SAMPLES, Plan
from tutti.config.run import RunConfig
from tutti.data.packed.index import is_packed, read_plan
from tutti.ranks.device import DTYPES

_IMAGENET_CLASSES = 1000
_CIFAR10_IMAGES = {"train": 50_000, "valid": 10_000}


@dataclass(frozen=True)
class Samples:
    """One sample with a dimension for the batch, and what a model is told of the data."""

    inputs: Any
    targets: Any
    shapes: dict[str, Any]
    count: int = MANY_SAMPLES
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
        "nbody": lambda: _volumes(config),
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


def _volumes(config: RunConfig) -> Samples:
    data: Any = config.data
    sizes = (data.crop,) * 3
    inputs, targets = (torch.empty((1, channels, *sizes), device="meta") for channels in _box_channels())
    missing = [each for each in (data.train, data.valid) if not (data.make or Path(each).is_file())]
    notes = [f"{each} is not here: its memory is not counted" for each in missing]
    return Samples(
        inputs.to(_input_dtype(config, data)),
        targets,
        {"input_shape": tuple(inputs.shape[1:])},
        notes=() if data.source in ("synthetic", "disk") else tuple(notes),
    )


def _box_channels() -> tuple[int, ...]:
    """Of the inputs and of the targets. Whatever reads boxes needs HDF5, which no other run should import."""
    from tutti.data.nbody.box import CHANNELS

    return tuple(CHANNELS.values())


def _input_dtype(config: RunConfig, data: Any) -> torch.dtype:
    return DTYPES[config.precision] if data.rounded else torch.float32


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


def resident_bytes(config: RunConfig, plan: Plan, device: str, memory_bytes: int | None = None) -> int:
    """The bytes of samples that stay in the memory of a device, and of what they are copied through.

    `memory_bytes` is the memory of the device, of which data.source=auto takes a share for each box; all that a box
    needs if it is not known.
    """
    sets: list[tuple[Any, Sequence[str]]] = [(config.data, ("train", "valid"))]
    taken = 0
    for data, splits in [*sets, *((each, ("valid",)) for each in config.valid_sets().values())]:
        if data.name == "cifar10":
            taken += sum(_CIFAR10_IMAGES[split] for split in splits) * 3 * (32 + 2 * data.shift) ** 2
        elif data.name == "nbody" and device == "cuda":
            taken += _boxes_on_gpu(config, data, splits, None if memory_bytes is None else memory_bytes - taken)
        elif data.name == "nbody":
            taken += _boxes_on_host(config, data, splits, plan)
    return taken


def _boxes_on_gpu(config: RunConfig, data: Any, splits: Sequence[str], memory_bytes: int | None) -> int:
    """The bytes of the boxes that a dataset puts on a GPU, one after the other."""
    from tutti.data.nbody.dataset import GPU_SHARE

    if data.source not in ("device", "auto"):
        return 0
    inputs, targets = _box_channels()
    cell = inputs * _input_dtype(config, data).itemsize + targets * 4
    taken = 0
    for side in _sides(data, splits):
        in_file = 4 * (inputs + targets) * side**3
        if data.source == "device" or memory_bytes is None or in_file <= GPU_SHARE * (memory_bytes - taken):
            taken += cell * side**3
    return taken


def _boxes_on_host(config: RunConfig, data: Any, splits: Sequence[str], plan: Plan) -> int:
    """The bytes of boxes in memory, and of the tensors through which crops go to batches."""
    channels = sum(_box_channels())
    boxes = 0 if data.source == "disk" else sum(4 * channels * side**3 for side in _sides(data, splits))
    # Tensors of batches are used again, when the step after the next begins; a crop is copied through a block.
    whole = 4 * data.crop**3
    batches = {"train": plan.per_rank_batch, "valid": config.batch.eval or plan.micro_batch}
    kept = channels * sum(batches[split] for split in splits) * whole // plan.layout.parts
    checked = channels * whole if plan.layout.parts > 1 else 0  # a whole sample, on which a model in parts is checked
    return boxes + kept + checked + 2 * max(_box_channels()) * whole


def _sides(data: Any, splits: Sequence[str]) -> list[int]:
    """The sides of a dataset's boxes, of those that are here or will be made."""
    from tutti.data.nbody.box import open_box

    files = [Path(getattr(data, split)) for split in splits]
    if data.source == "synthetic":
        return [max(data.box, data.crop)] * len(files)
    here = [open_box(each, data.crop).side for each in files if each.is_file()]
    return here + [data.box for each in files if data.make and not each.is_file()]
