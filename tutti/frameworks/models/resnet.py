"""Residual networks: the standard ones of 18, 34 and 50 layers, and one of 26 layers for small images."""

from collections.abc import Sequence

import keras

from tutti.errors import ConfigError
from tutti.frameworks.models import layers
from tutti.frameworks.models.layers import Tensor

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
    inputs = layers.images(tuple(input_shape))
    found = layers.relu(_normed(inputs, 64, 3))
    for width, stride in zip(_WIDTHS, _STRIDES, strict=True):
        found = _bottleneck(found, width, width, stride, projects=True, silent=False)
        found = _bottleneck(found, width, width, stride=1, projects=False, silent=False)
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
    inputs = layers.images(tuple(input_shape))
    if stem == "imagenet":
        found = layers.relu(_normed(inputs, 64, 7, stride=2))
        found = keras.layers.MaxPooling2D(3, 2)(layers.pad(found, 1))  # no value is below the zeros at the margin
    else:
        found = layers.relu(_normed(inputs, 64, 3))
    block = _basic_block if widening == 1 else _bottleneck
    for depth, width, stride in zip(depths, _WIDTHS, _STRIDES, strict=True):
        outputs = widening * width
        projects = stride > 1 or found.shape[-1] != outputs
        found = block(found, width, outputs, stride, projects, zero_init_last)
        for _ in range(depth - 1):
            found = block(found, width, outputs, 1, False, zero_init_last)
    return _finish(inputs, found, num_classes, name)


def _basic_block(found: Tensor, width: int, outputs: int, stride: int, projects: bool, silent: bool) -> Tensor:
    """Two 3x3 convolutions beside a shortcut."""
    shortcut = _normed(found, outputs, 1, stride) if projects else found
    found = layers.relu(_normed(found, width, 3, stride))
    return layers.relu(keras.layers.Add()([_normed(found, outputs, 3, silent=silent), shortcut]))


def _bottleneck(found: Tensor, width: int, outputs: int, stride: int, projects: bool, silent: bool) -> Tensor:
    """Convolutions 1x1, 3x3 (with the stride) and 1x1 beside a shortcut."""
    shortcut = _normed(found, outputs, 1, stride) if projects else found
    found = layers.relu(_normed(found, width, 1))
    found = layers.relu(_normed(found, width, 3, stride))
    return layers.relu(keras.layers.Add()([_normed(found, outputs, 1, silent=silent), shortcut]))


def _normed(found: Tensor, width: int, kernel: int, stride: int = 1, silent: bool = False) -> Tensor:
    """A convolution and its batch norm."""
    found = layers.convolution(found, width, kernel, stride, padding=kernel // 2, bias=False, he=True)
    return layers.batch_norm(found, silent)


def _finish(inputs: Tensor, found: Tensor, num_classes: int, name: str) -> keras.Model:
    return layers.scores(inputs, keras.layers.GlobalAveragePooling2D()(found), num_classes, name)
