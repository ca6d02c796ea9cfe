"""A small convolutional network for images of any size."""

from collections.abc import Sequence

import keras

from tutti.frameworks.models import layers
from tutti.frameworks.models.layers import Tensor


def small_cnn(
    input_shape: Sequence[int], num_classes: int, width: int = 32, dropout: float = 0.2, batch_norm: bool = True
) -> keras.Model:
    """Three 3x3 convolutions (width, 2 width, 2 width), a 2x2 max-pool after the first, 2x2 average, dropout, dense."""
    inputs = layers.images(tuple(input_shape))
    found = layers.pool(_block(inputs, width, batch_norm))
    found = _block(found, 2 * width, batch_norm)
    found = _block(found, 2 * width, batch_norm)
    found = keras.layers.Flatten()(_quarters(found))
    return layers.scores(inputs, layers.dropout(found, dropout), num_classes, "small_cnn")


def _quarters(found: Tensor) -> Tensor:
    """The mean over each quarter of an image of any size."""
    height, width = found.shape[1:3]
    kernel, stride = ((height + 1) // 2, (width + 1) // 2), (height // 2, width // 2)
    return keras.layers.AveragePooling2D(kernel, stride)(found)


def _block(found: Tensor, width: int, batch_norm: bool) -> Tensor:
    found = layers.convolution(found, width, 3, padding=1, bias=not batch_norm)
    return layers.relu(layers.batch_norm(found) if batch_norm else found)
