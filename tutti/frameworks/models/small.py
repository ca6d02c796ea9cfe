"""Small networks in Keras: fully connected, those of the MNIST tutorials, and a convolutional one."""

from collections.abc import Sequence

import keras

from tutti.errors import ConfigError
from tutti.frameworks.models import layers
from tutti.frameworks.models.layers import Tensor


def mlp(
    input_shape: Sequence[int],
    num_classes: int,
    hidden: Sequence[int] = (128, 64),
    dropout: float = 0.0,
    batch_norm: bool = False,
) -> keras.Model:
    """Flattens its input, then layers of the given widths, each with optional batch norm and dropout."""
    inputs = layers.images(tuple(input_shape))
    found = keras.layers.Flatten()(inputs)
    for width in hidden:
        found = layers.dense(found, width)
        if batch_norm:
            found = layers.batch_norm(found)
        found = layers.dropout(layers.relu(found), dropout)
    return layers.scores(inputs, found, num_classes, "mlp")


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
