"""Small networks: fully connected, those of the MNIST tutorials, and a convolutional one for images of any size."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from torch import nn


class Mlp(nn.Module):
    """Multilayer perceptron with hidden layers of the given widths, optional batch norm and dropout."""

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        hidden: Sequence[int] = (128, 64),
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise((prod(input_shape), *hidden)):
            layers.append(nn.Linear(inputs, outputs))
            if batch_norm:
                layers.append(nn.BatchNorm1d(outputs))
            layers.append(nn.ReLU())
            if dropout:
                layers.append(nn.Dropout(dropout))
        last = hidden[-1] if hidden else prod(input_shape)
        self.layers = nn.Sequential(*layers, nn.Linear(last, num_classes))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)

    def stages(self) -> list[str]:
        """The modules that are applied one after another."""
        return [f"layers.{index}" for index in range(len(self.layers))]


class MnistTorch(nn.Module):
    """conv 1->10 5x5, pool, conv 10->20 5x5 with 2-D dropout, pool, dense 320->50, dropout, dense 50->10."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 10, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(10, 20, 5),
            nn.Dropout2d(),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Linear(320, 50), nn.ReLU(), nn.Dropout(), nn.Linear(50, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images))

    def stages(self) -> list[str]:
        """The modules that are applied one after another."""
        return [*(f"features.{index}" for index in range(len(self.features))), "head"]


class MnistKeras(nn.Module):
    """conv 32 3x3, conv 64 3x3, pool, dropout 0.25, dense 128, dropout 0.5, dense 10."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images))


class SmallCnn(nn.Module):
    """Three 3x3 convolutions (width, 2 width, 2 width), a 2x2 max-pool after the first, 2x2 average, dropout, dense."""

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        width: int = 32,
        dropout: float = 0.2,
        batch_norm: bool = True,
    ) -> None:
        super().__init__()
        channels = input_shape[0]
        self.features = nn.Sequential(
            _block(channels, width, batch_norm),
            nn.MaxPool2d(2),
            _block(width, 2 * width, batch_norm),
            _block(2 * width, 2 * width, batch_norm),
            Quarters(),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(8 * width, num_classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images))


class Quarters(nn.Module):
    """Adaptive average pooling to 2 x 2, with a deterministic gradient on a GPU."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        height, width = images.shape[-2:]
        kernel, stride = ((height + 1) // 2, (width + 1) // 2), (height // 2, width // 2)
        return nn.functional.avg_pool2d(images, kernel, stride)


def _block(inputs: int, outputs: int, batch_norm: bool) -> nn.Sequential:
    norm = [nn.BatchNorm2d(outputs)] if batch_norm else []
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=not batch_norm), *norm, nn.ReLU())
