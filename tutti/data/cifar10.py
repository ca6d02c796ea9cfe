"""CIFAR-10 from its binary files, its Python pickles, or a tree of image files; in a folder or in a tar archive."""

from pathlib import Path

import torch

from tutti.data import decoded
from tutti.data.augment import Fill, Flip
from tutti.data.cifar10_files import BATCH_FILES, BATCHES, find, list_archive, list_folder
from tutti.data.cifar10_forms import SHAPE, decode
from tutti.data.dataset import ArrayDataset
from tutti.data.decoded import Split
from tutti.errors import DataError

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training pixels, scaled to 0..1


def cifar10(
    split: str,
    path: str = "data/cifar10",
    shift: int = 0,
    flip: Flip = False,
    fill: Fill = "edge",
    cache: str | None = None,
    device: torch.device | None = None,
) -> ArrayDataset:
    """The training images, or the test images as validation."""
    try:
        images, labels = read(split, find(Path(path)), cache)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}. Check who may read it.") from error
    augmented = split == "train"
    return ArrayDataset(
        torch.from_numpy(images),
        torch.from_numpy(labels),
        mean=tuple(255 * value for value in MEAN),
        std=tuple(255 * value for value in STD),
        shift=shift if augmented else 0,
        flip=flip if augmented else False,
        fill=fill,
        device=device,
    )


def read(split: str, source: Path, cache: str | None = None) -> Split:
    """Images and labels of a split; what is slow to read, an archive or a tree of images, is kept decoded."""
    files = {} if source.is_file() else list_folder(source)
    if not files.keys().isdisjoint(BATCH_FILES):
        return decode(split, files, source)
    paths = [path for path in files.values() if isinstance(path, Path)] or [source]
    places = decoded.places("cifar10", BATCHES, source, paths, cache)
    if kept := decoded.load(places[split], SHAPE):
        return kept
    files = files if source.is_dir() else list_archive(source)
    splits = {name: decode(name, files, source) for name in BATCHES}
    for name, place in places.items():
        decoded.save(place, splits[name])
    return splits[split]
