"""Fully connected networks."""

from collections.abc import Sequence

import keras

from tutti.frameworks.models import layers


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
