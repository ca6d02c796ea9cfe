"""Convolutional networks of the CIFAR-10 tutorials, for images of 32 x 32 and other sizes."""

from collections.abc import Sequence

import torch
from torch import nn

from tutti.errors import ConfigError


class FeaturesAndHead(nn.Module):
    """Convolutions (`features`) whose flattened output a few dense layers (`head`) turn into class scores."""

    features: nn.Module
    head: nn.Module

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images))


class Cnn(FeaturesAndHead):
    """Convolutions 3x3 (width, 2 width, 4 width), a 2x2 max-pool after each, dense 128, dropout, dense."""

    def __init__(
        self, input_shape: Sequence[int] = (3, 32, 32), num_classes: int = 10, width: int = 16, dropout: float = 0.1
    ) -> None:
        super().__init__()
        height, image_width = _size_after(input_shape, halvings=3)
        self.features = nn.Sequential(
            *_convolution(input_shape[0], width, pool=True),
            *_convolution(width, 2 * width, pool=True),
            *_convolution(2 * width, 4 * width, pool=True),
            nn.Flatten(),
        )
        self.head = nn.Sequential(
            nn.Linear(4 * width * height * image_width, 128),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(128, num_classes),
        )


class AlexnetSmall(FeaturesAndHead):
    """AlexNet for small images: 3x3 convolutions 64 (stride 2), 192, 384, 256, 256, 2x2 max-pools after the first,
    second and fifth, two dense layers with dropout before each, dense."""

    def __init__(
        self, input_shape: Sequence[int] = (3, 32, 32), num_classes: int = 10, dropout: float = 0.5, dense: int = 4096
    ) -> None:
        super().__init__()
        height, image_width = _size_after(input_shape, halvings=4)
        self.features = nn.Sequential(
            *_convolution(input_shape[0], 64, stride=2, pool=True),
            *_convolution(64, 192, pool=True),
            *_convolution(192, 384),
            *_convolution(384, 256),
            *_convolution(256, 256, pool=True),
            nn.Flatten(),
        )
        self.head = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(256 * height * image_width, dense),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(dense, dense),
            nn.ReLU(),
            nn.Linear(dense, num_classes),
        )


def _convolution(inputs: int, outputs: int, stride: int = 1, pool: bool = False) -> tuple[nn.Module, ...]:
    """The layers of a 3x3 convolution, with a 2x2 max-pool after it where one is asked for."""
    layers = nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.ReLU(inplace=True)
    return (*layers, nn.MaxPool2d(2)) if pool else layers


def _size_after(input_shape: Sequence[int], halvings: int) -> tuple[int, int]:
    """Returns height and width after `halvings` halvings; raises ConfigError if nothing is left."""
    height, width = (size >> halvings for size in input_shape[1:])
    if not (height and width):
        least = 1 << halvings
        raise ConfigError(
            f"images of {' x '.join(map(str, input_shape))} (channels first) are too small for this network: expected "
            f"at least {least} x {least} pixels. Choose another model, or larger images."
        )
    return height, width
