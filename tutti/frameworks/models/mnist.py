"""The MNIST networks of the PyTorch and Keras tutorials; both give class scores for 28 x 28 x 1 images."""

from collections.abc import Sequence

import keras

from tutti.errors import ConfigError
from tutti.frameworks.models import layers
from tutti.frameworks.models.layers import Tensor


def mnist_torch(input_shape: Sequence[int] = (1, 28, 28)) -> keras.Model:
    """conv 1->10 5x5, pool, conv 10->20 5x5 with 2-D dropout, pool, dense 320->50, dropout, dense 50->10."""
    inputs = _images(input_shape)
    found = layers.relu(layers.pool(layers.convolution(inputs, 10, 5)))
    found = keras.layers.SpatialDropout2D(0.5)(layers.convolution(found, 20, 5))
    found = keras.layers.Flatten()(layers.relu(layers.pool(found)))
    found = layers.dropout(layers.relu(layers.dense(found, 50)), 0.5)
    return layers.scores(inputs, found, 10, "mnist_torch")


def mnist_keras(input_shape: Sequence[int] = (1, 28, 28)) -> keras.Model:
    """conv 32 3x3, conv 64 3x3, pool, dropout 0.25, dense 128, dropout 0.5, dense 10."""
    inputs = _images(input_shape)
    found = layers.relu(layers.convolution(inputs, 32, 3))
    found = layers.relu(layers.convolution(found, 64, 3))
    found = keras.layers.Flatten()(layers.dropout(layers.pool(found), 0.25))
    found = layers.dropout(layers.relu(layers.dense(found, 128)), 0.5)
    return layers.scores(inputs, found, 10, "mnist_keras")


def _images(input_shape: Sequence[int]) -> Tensor:
    if tuple(input_shape) != (1, 28, 28):
        raise ConfigError(
            f"images of {' x '.join(map(str, input_shape))} (channels first): expected 1 x 28 x 28. "
            "Choose another model, small_cnn for one, or the data of mnist."
        )
    return layers.images((1, 28, 28))
