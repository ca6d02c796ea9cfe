"""scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels, embedded in the package."""

import numpy as np
import torch

from tutti.data.dataset import ArrayDataset
from tutti.errors import DataError

_VALID_SAMPLES = 360


def digits(split: str, shift: int = 0) -> ArrayDataset:
    """The digits, 1,437 for training and 360 for validation, chosen once for all."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            "data.name='digits' needs scikit-learn. Install it: pip install 'tutti-train[digits]'."
        ) from None
    images, labels = load_digits(return_X_y=True)
    chosen = np.random.Generator(np.random.PCG64(0)).permutation(len(images))
    chosen = chosen[_VALID_SAMPLES:] if split == "train" else chosen[:_VALID_SAMPLES]
    inputs = torch.from_numpy(images[chosen].astype(np.uint8)).reshape(-1, 1, 8, 8)
    targets = torch.from_numpy(labels[chosen].astype(np.int64))
    return ArrayDataset(inputs, targets, mean=4.9, std=6.0, shift=shift if split == "train" else 0)
