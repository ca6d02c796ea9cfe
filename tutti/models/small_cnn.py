"""A small convolutional network for images of any size."""

from collections.abc import Sequence

import torch
from torch import nn


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
    """The mean over each quarter of an image of any size: adaptive pooling to 2 x 2, with a gradient that has no
    random order of sums on a GPU."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        height, width = images.shape[-2:]
        kernel, stride = ((height + 1) // 2, (width + 1) // 2), (height // 2, width // 2)
        return nn.functional.avg_pool2d(images, kernel, stride)


def _block(inputs: int, outputs: int, batch_norm: bool) -> nn.Sequential:
    norm = [nn.BatchNorm2d(outputs)] if batch_norm else []
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=not batch_norm), *norm, nn.ReLU())
