"""Layers that begin and behave as torch's do, so that a network is the same in every framework."""

import math
from typing import Any

import keras

from tutti.errors import ConfigError

Tensor = Any


def images(input_shape: tuple[int, ...]) -> Tensor:
    """An input for images whose shape is given with the channels first."""
    channels, *sizes = input_shape
    return keras.Input((*sizes, channels))


def convolution(
    found: Tensor, width: int, kernel: int, stride: int = 1, padding: int = 0, bias: bool = True, he: bool = False
) -> Tensor:
    """A convolution with the same margin on all sides; `he` spreads the first weights for a ReLU behind it."""
    if stride == 1 and kernel == 2 * padding + 1:
        margin = "same"
    else:
        found, margin = pad(found, padding), "valid"
    start = _for_relu() if he else _for_inputs()
    first_bias = _first_bias(kernel * kernel * found.shape[-1])
    return keras.layers.Conv2D(
        width, kernel, stride, margin, use_bias=bias, kernel_initializer=start, bias_initializer=first_bias
    )(found)


def dense(found: Tensor, width: int) -> Tensor:
    return keras.layers.Dense(width, kernel_initializer=_for_inputs(), bias_initializer=_first_bias(found.shape[-1]))(
        found
    )


def batch_norm(found: Tensor, silent: bool = False) -> Tensor:
    """Batch norm; a silent one begins with scales of zero."""
    start = "zeros" if silent else "ones"
    return keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, gamma_initializer=start)(found)


def pad(found: Tensor, pixels: int) -> Tensor:
    return keras.layers.ZeroPadding2D(pixels)(found) if pixels else found


def relu(found: Tensor) -> Tensor:
    return keras.layers.ReLU()(found)


def pool(found: Tensor) -> Tensor:
    return keras.layers.MaxPooling2D(2)(found)


def dropout(found: Tensor, share: float) -> Tensor:
    return keras.layers.Dropout(share)(found) if share else found


def scores(inputs: Tensor, found: Tensor, num_classes: int, name: str) -> keras.Model:
    """The network that ends in a dense layer; its scores are float32 whatever the precision of the layers."""
    found = dense(found, num_classes)
    return keras.Model(inputs, keras.layers.Activation("linear", dtype="float32")(found), name=name)


def check_size(input_shape: tuple[int, ...], halvings: int) -> None:
    """Refuse images that a network would halve to nothing."""
    least = 1 << halvings
    if min(input_shape[1:]) < least:
        raise ConfigError(
            f"images of {' x '.join(map(str, input_shape))} (channels first) are too small for this network: expected "
            f"at least {least} x {least} pixels. Choose another model, or larger images."
        )


def _for_inputs() -> Any:
    """Torch's first weights: uniform up to one over the root of the number of inputs."""
    return keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")


def _for_relu() -> Any:
    return keras.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal")


def _first_bias(inputs: int) -> Any:
    bound = 1 / math.sqrt(inputs)
    return keras.initializers.RandomUniform(-bound, bound)
