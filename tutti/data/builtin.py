"""Datasets without files: the handwritten digits of scikit-learn, and random samples of any shape."""

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from tutti.data.dataset import ArrayDataset
from tutti.errors import DataError

_VALID_SAMPLES = 360
_FILE = Path("datasets") / "data" / "digits.csv.gz"  # one row per image: 64 pixels, then the digit


def digits(split: str, shift: int = 0) -> ArrayDataset:
    """Returns the 8 x 8 digits: 1,437 for training and 360 for validation, a fixed split."""
    table = _read()
    images, labels = table[:, :-1], table[:, -1]
    chosen = np.random.Generator(np.random.PCG64(0)).permutation(len(images))
    chosen = chosen[_VALID_SAMPLES:] if split == "train" else chosen[:_VALID_SAMPLES]
    inputs = torch.from_numpy(images[chosen]).reshape(-1, 1, 8, 8)
    targets = torch.from_numpy(labels[chosen].astype(np.int64))
    return ArrayDataset(inputs, targets, mean=4.9, std=6.0, shift=shift if split == "train" else 0)


def _read() -> np.ndarray:
    """Reads the file inside scikit-learn's package; importing scikit-learn would take longer than a short run."""
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise DataError("data.name='digits' needs scikit-learn. Install it: pip install 'tutti-train[digits]'.")
    path = Path(found.origin).parent / _FILE
    try:
        with gzip.open(path, "rt") as file:
            return np.array([[int(value) for value in line.split(",")] for line in file], np.uint8)
    except (OSError, ValueError):  # another version stores the digits elsewhere
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        return np.column_stack([images, labels]).astype(np.uint8)


def synthetic(
    split: str,
    shape: tuple[int, ...] = (3, 64, 64),
    classes: int = 10,
    train: int = 1024,
    valid: int = 1024,
    noise: float = 1.0,
    seed: int = 0,
) -> ArrayDataset:
    """Returns random samples around one mean per class; the same seed gives the same samples."""
    means = torch.randn(classes, *shape, generator=torch.Generator().manual_seed(seed))
    samples = train if split == "train" else valid
    generator = torch.Generator().manual_seed(seed + (1 if split == "train" else 2))
    targets = torch.arange(samples) % classes
    inputs = torch.randn(samples, *shape, generator=generator).mul_(noise).add_(means[targets])
    return ArrayDataset(inputs, targets)
