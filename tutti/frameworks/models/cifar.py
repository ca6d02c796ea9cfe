"""Convolutional networks of the CIFAR-10 tutorials; both give class scores for images of 32 x 32 and other sizes."""

from collections.abc import Sequence

import keras

from tutti.frameworks.models import layers
from tutti.frameworks.models.layers import Tensor


def cnn(
    input_shape: Sequence[int] = (3, 32, 32), num_classes: int = 10, width: int = 16, dropout: float = 0.1
) -> keras.Model:
    """Convolutions 3x3 (width, 2 width, 4 width), a 2x2 max-pool after each, dense 128, dropout, dense."""
    layers.check_size(tuple(input_shape), halvings=3)
    found = inputs = layers.images(tuple(input_shape))
    for factor in (1, 2, 4):
        found = layers.pool(_convolution(found, factor * width))
    found = keras.layers.Flatten()(found)
    found = layers.dropout(layers.relu(layers.dense(found, 128)), dropout)
    return layers.scores(inputs, found, num_classes, "cnn")


def alexnet_small(
    input_shape: Sequence[int] = (3, 32, 32), num_classes: int = 10, dropout: float = 0.5, dense: int = 4096
) -> keras.Model:
    """AlexNet for small images: 3x3 convolutions 64 (stride 2), 192, 384, 256, 256, 2x2 max-pools after the first,
    second and fifth, two dense layers with dropout before each, dense."""
    layers.check_size(tuple(input_shape), halvings=4)
    inputs = layers.images(tuple(input_shape))
    found = layers.pool(_convolution(inputs, 64, stride=2))
    found = layers.pool(_convolution(found, 192))
    for width in (384, 256, 256):
        found = _convolution(found, width)
    found = keras.layers.Flatten()(layers.pool(found))
    for _ in range(2):
        found = layers.relu(layers.dense(layers.dropout(found, dropout), dense))
    return layers.scores(inputs, found, num_classes, "alexnet_small")


def _convolution(found: Tensor, width: int, stride: int = 1) -> Tensor:
    return layers.relu(layers.convolution(found, width, 3, stride, padding=1))
