"""The networks of `tutti.models` in Keras, under the same names, with channels last, on any backend."""

import math
from collections.abc import Sequence
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
    """A convolution with the same padding on all sides; `he` selects He initialization, for a ReLU after it."""
    if stride == 1 and kernel == 2 * padding + 1:
        margin = "same"
    else:
        found, margin = pad(found, padding), "valid"
    start = _for_relu() if he else _for_inputs()
    first_bias = _first_bias(kernel * kernel * found.shape[-1])
    return keras.layers.Conv2D(
        width, kernel, stride, margin, use_bias=bias, kernel_initializer=start, bias_initializer=first_bias
    )(found)


def dense_layer(found: Tensor, width: int) -> Tensor:
    return keras.layers.Dense(width, kernel_initializer=_for_inputs(), bias_initializer=_first_bias(found.shape[-1]))(
        found
    )


def batch_norm_layer(found: Tensor, zero_scale: bool = False) -> Tensor:
    """Batch norm; with `zero_scale` its scales start at zero."""
    start = "zeros" if zero_scale else "ones"
    return keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, gamma_initializer=start)(found)


def pad(found: Tensor, pixels: int) -> Tensor:
    return keras.layers.ZeroPadding2D(pixels)(found) if pixels else found


def relu(found: Tensor) -> Tensor:
    return keras.layers.ReLU()(found)


def pool(found: Tensor) -> Tensor:
    return keras.layers.MaxPooling2D(2)(found)


def dropout_layer(found: Tensor, share: float) -> Tensor:
    return keras.layers.Dropout(share)(found) if share else found


def scores(inputs: Tensor, found: Tensor, num_classes: int, name: str) -> keras.Model:
    """The network that ends in a dense layer; its scores are float32 whatever the precision of the layers."""
    found = dense_layer(found, num_classes)
    return keras.Model(inputs, keras.layers.Activation("linear", dtype="float32")(found), name=name)


def check_size(input_shape: tuple[int, ...], halvings: int) -> None:
    """Refuse images that are too small to be halved so many times."""
    least = 1 << halvings
    if min(input_shape[1:]) < least:
        raise ConfigError(
            f"images of {' x '.join(map(str, input_shape))} (channels first) are too small for this network: expected "
            f"at least {least} x {least} pixels. Choose another model, or larger images."
        )


def _for_inputs() -> Any:
    """The initial weights of torch: uniform within one over the square root of the number of inputs."""
    return keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")


def _for_relu() -> Any:
    return keras.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal")


def _first_bias(inputs: int) -> Any:
    bound = 1 / math.sqrt(inputs)
    return keras.initializers.RandomUniform(-bound, bound)


def mlp(
    input_shape: Sequence[int],
    num_classes: int,
    hidden: Sequence[int] = (128, 64),
    dropout: float = 0.0,
    batch_norm: bool = False,
) -> keras.Model:
    """Flattens its input, then layers of the given widths, each with optional batch norm and dropout."""
    inputs = images(tuple(input_shape))
    found = keras.layers.Flatten()(inputs)
    for width in hidden:
        found = dense_layer(found, width)
        if batch_norm:
            found = batch_norm_layer(found)
        found = dropout_layer(relu(found), dropout)
    return scores(inputs, found, num_classes, "mlp")


def mnist_torch(input_shape: Sequence[int] = (1, 28, 28)) -> keras.Model:
    """conv 1->10 5x5, pool, conv 10->20 5x5 with 2-D dropout, pool, dense 320->50, dropout, dense 50->10."""
    inputs = _images(input_shape)
    found = relu(pool(convolution(inputs, 10, 5)))
    found = keras.layers.SpatialDropout2D(0.5)(convolution(found, 20, 5))
    found = keras.layers.Flatten()(relu(pool(found)))
    found = dropout_layer(relu(dense_layer(found, 50)), 0.5)
    return scores(inputs, found, 10, "mnist_torch")


def mnist_keras(input_shape: Sequence[int] = (1, 28, 28)) -> keras.Model:
    """conv 32 3x3, conv 64 3x3, pool, dropout 0.25, dense 128, dropout 0.5, dense 10."""
    inputs = _images(input_shape)
    found = relu(convolution(inputs, 32, 3))
    found = relu(convolution(found, 64, 3))
    found = keras.layers.Flatten()(dropout_layer(pool(found), 0.25))
    found = dropout_layer(relu(dense_layer(found, 128)), 0.5)
    return scores(inputs, found, 10, "mnist_keras")


def _images(input_shape: Sequence[int]) -> Tensor:
    if tuple(input_shape) != (1, 28, 28):
        raise ConfigError(
            f"images of {' x '.join(map(str, input_shape))} (channels first): expected 1 x 28 x 28. "
            "Choose another model, small_cnn for one, or the data of mnist."
        )
    return images((1, 28, 28))


def small_cnn(
    input_shape: Sequence[int], num_classes: int, width: int = 32, dropout: float = 0.2, batch_norm: bool = True
) -> keras.Model:
    """Three 3x3 convolutions (width, 2 width, 2 width), a 2x2 max-pool after the first, 2x2 average, dropout, dense."""
    inputs = images(tuple(input_shape))
    found = pool(_block(inputs, width, batch_norm))
    found = _block(found, 2 * width, batch_norm)
    found = _block(found, 2 * width, batch_norm)
    found = keras.layers.Flatten()(_quarters(found))
    return scores(inputs, dropout_layer(found, dropout), num_classes, "small_cnn")


def _quarters(found: Tensor) -> Tensor:
    """The mean over each quarter of an image of any size."""
    height, width = found.shape[1:3]
    kernel, stride = ((height + 1) // 2, (width + 1) // 2), (height // 2, width // 2)
    return keras.layers.AveragePooling2D(kernel, stride)(found)


def _block(found: Tensor, width: int, batch_norm: bool) -> Tensor:
    found = convolution(found, width, 3, padding=1, bias=not batch_norm)
    return relu(batch_norm_layer(found) if batch_norm else found)


def cnn(
    input_shape: Sequence[int] = (3, 32, 32), num_classes: int = 10, width: int = 16, dropout: float = 0.1
) -> keras.Model:
    """Convolutions 3x3 (width, 2 width, 4 width), a 2x2 max-pool after each, dense 128, dropout, dense."""
    check_size(tuple(input_shape), halvings=3)
    found = inputs = images(tuple(input_shape))
    for factor in (1, 2, 4):
        found = pool(_convolution(found, factor * width))
    found = keras.layers.Flatten()(found)
    found = dropout_layer(relu(dense_layer(found, 128)), dropout)
    return scores(inputs, found, num_classes, "cnn")


def alexnet_small(
    input_shape: Sequence[int] = (3, 32, 32), num_classes: int = 10, dropout: float = 0.5, dense: int = 4096
) -> keras.Model:
    """AlexNet for small images: 3x3 convolutions 64 (stride 2), 192, 384, 256, 256, 2x2 max-pools after the first,
    second and fifth, two dense layers with dropout before each, dense."""
    check_size(tuple(input_shape), halvings=4)
    inputs = images(tuple(input_shape))
    found = pool(_convolution(inputs, 64, stride=2))
    found = pool(_convolution(found, 192))
    for width in (384, 256, 256):
        found = _convolution(found, width)
    found = keras.layers.Flatten()(pool(found))
    for _ in range(2):
        found = relu(dense_layer(dropout_layer(found, dropout), dense))
    return scores(inputs, found, num_classes, "alexnet_small")


def _convolution(found: Tensor, width: int, stride: int = 1) -> Tensor:
    return relu(convolution(found, width, 3, stride, padding=1))


_WIDTHS, _STRIDES = (64, 128, 256, 512), (1, 2, 2, 2)  # of the four stages
_STEMS = ("imagenet", "small")
_RGB = (3, 224, 224)


def resnet18(
    input_shape: Sequence[int] = _RGB, num_classes: int = 1000, stem: str = "imagenet", zero_init_last: bool = True
) -> keras.Model:
    """ResNet-18: two basic blocks a stage."""
    return _resnet("resnet18", (2, 2, 2, 2), 1, input_shape, num_classes, stem, zero_init_last)


def resnet34(
    input_shape: Sequence[int] = _RGB, num_classes: int = 1000, stem: str = "imagenet", zero_init_last: bool = True
) -> keras.Model:
    """ResNet-34: 3, 4, 6 and 3 basic blocks."""
    return _resnet("resnet34", (3, 4, 6, 3), 1, input_shape, num_classes, stem, zero_init_last)


def resnet50(
    input_shape: Sequence[int] = _RGB, num_classes: int = 1000, stem: str = "imagenet", zero_init_last: bool = True
) -> keras.Model:
    """ResNet-50 v1.5: 3, 4, 6 and 3 bottlenecks, with the stride in the 3x3 convolution."""
    return _resnet("resnet50", (3, 4, 6, 3), 4, input_shape, num_classes, stem, zero_init_last)


def resnet_small(input_shape: Sequence[int] = (3, 32, 32), num_classes: int = 10) -> keras.Model:
    """26 layers without those of shortcuts: conv 64 3x3, four stages of a projection block and an identity block,
    each 1x1-3x3-1x1 of equal widths (64, 128, 256, 512), the mean over positions, dense."""
    inputs = images(tuple(input_shape))
    found = relu(_normed(inputs, 64, 3))
    for width, stride in zip(_WIDTHS, _STRIDES, strict=True):
        found = _bottleneck(found, width, width, stride, projects=True, zero_scale=False)
        found = _bottleneck(found, width, width, stride=1, projects=False, zero_scale=False)
    return _finish(inputs, found, num_classes, "resnet_small")


def _resnet(
    name: str,
    depths: Sequence[int],
    widening: int,
    input_shape: Sequence[int],
    num_classes: int,
    stem: str,
    zero_init_last: bool,
) -> keras.Model:
    if stem not in _STEMS:
        raise ConfigError(f"stem={stem!r}: expected 'imagenet' (7x7 stride 2, max-pool) or 'small' (3x3 stride 1).")
    inputs = images(tuple(input_shape))
    if stem == "imagenet":
        found = relu(_normed(inputs, 64, 7, stride=2))
        found = keras.layers.MaxPooling2D(3, 2)(pad(found, 1))  # no value is below the zeros at the margin
    else:
        found = relu(_normed(inputs, 64, 3))
    block = _basic_block if widening == 1 else _bottleneck
    for depth, width, stride in zip(depths, _WIDTHS, _STRIDES, strict=True):
        outputs = widening * width
        projects = stride > 1 or found.shape[-1] != outputs
        found = block(found, width, outputs, stride, projects, zero_init_last)
        for _ in range(depth - 1):
            found = block(found, width, outputs, 1, False, zero_init_last)
    return _finish(inputs, found, num_classes, name)


def _basic_block(found: Tensor, width: int, outputs: int, stride: int, projects: bool, zero_scale: bool) -> Tensor:
    """Two 3x3 convolutions beside a shortcut."""
    shortcut = _normed(found, outputs, 1, stride) if projects else found
    found = relu(_normed(found, width, 3, stride))
    return relu(keras.layers.Add()([_normed(found, outputs, 3, zero_scale=zero_scale), shortcut]))


def _bottleneck(found: Tensor, width: int, outputs: int, stride: int, projects: bool, zero_scale: bool) -> Tensor:
    """Convolutions 1x1, 3x3 (with the stride) and 1x1 beside a shortcut."""
    shortcut = _normed(found, outputs, 1, stride) if projects else found
    found = relu(_normed(found, width, 1))
    found = relu(_normed(found, width, 3, stride))
    return relu(keras.layers.Add()([_normed(found, outputs, 1, zero_scale=zero_scale), shortcut]))


def _normed(found: Tensor, width: int, kernel: int, stride: int = 1, zero_scale: bool = False) -> Tensor:
    """A convolution and its batch norm."""
    found = convolution(found, width, kernel, stride, padding=kernel // 2, bias=False, he=True)
    return batch_norm_layer(found, zero_scale)


def _finish(inputs: Tensor, found: Tensor, num_classes: int, name: str) -> keras.Model:
    return scores(inputs, keras.layers.GlobalAveragePooling2D()(found), num_classes, name)
