"""Random samples of any shape: each class has a random mean, and noise is laid over it."""

import torch

from tutti.data.dataset import ArrayDataset


def synthetic(
    split: str,
    shape: tuple[int, ...] = (3, 64, 64),
    classes: int = 10,
    train: int = 1024,
    valid: int = 1024,
    noise: float = 1.0,
    seed: int = 0,
) -> ArrayDataset:
    """Samples that can be learned, the same from the same seed."""
    means = torch.randn(classes, *shape, generator=torch.Generator().manual_seed(seed))
    samples = train if split == "train" else valid
    generator = torch.Generator().manual_seed(seed + (1 if split == "train" else 2))
    targets = torch.arange(samples) % classes
    inputs = torch.randn(samples, *shape, generator=generator).mul_(noise).add_(means[targets])
    return ArrayDataset(inputs, targets)
