"""Residual networks: the standard ones of 18, 34 and 50 layers, and one of 26 layers for small images."""

import contextlib
from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn

from tutti.errors import ConfigError

_KERNELS = False
if torch.cuda.is_available():
    with contextlib.suppress(ImportError):  # triton is installed with torch where it supports the GPU
        import tutti.models.kernels.pooling  # noqa: F401 (registers the operators)

        _KERNELS = True

Stem = Literal["imagenet", "small"]
_WIDTHS, _STRIDES = (64, 128, 256, 512), (1, 2, 2, 2)  # of the four stages


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    expansion = 1  # output channels per channel of the 3x3 convolutions

    def __init__(self, inputs: int, width: int, outputs: int, stride: int, projects: bool) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, outputs, 3)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _projection(inputs, outputs, stride) if projects else nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.relu(self.bn1(self.conv1(images)))
        found = self.bn2(self.conv2(found))
        return self.relu(found + self.downsample(images))


class Bottleneck(nn.Module):
    """Convolutions 1x1, 3x3 (with the stride) and 1x1 with a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, outputs: int, stride: int, projects: bool) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _projection(inputs, outputs, stride) if projects else nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.relu(self.bn1(self.conv1(images)))
        found = self.relu(self.bn2(self.conv2(found)))
        found = self.bn3(self.conv3(found))
        return self.relu(found + self.downsample(images))


Block = type[BasicBlock] | type[Bottleneck]


class ResNet(nn.Module):
    """A stem, four stages of blocks, global average pooling, dense; parameter names are those of torchvision.

    `fold` computes the stem for large images in another form: the same function, in less time on a GPU.
    """

    def __init__(
        self,
        block: Block,
        depths: Sequence[int],
        num_classes: int = 1000,
        stem: Stem = "imagenet",
        zero_init_last: bool = True,
    ) -> None:
        super().__init__()
        if stem not in get_args(Stem):
            raise ConfigError(f"stem={stem!r}: expected 'imagenet' (7x7 stride 2, max-pool) or 'small' (3x3 stride 1).")
        self.fold = False
        self.conv1 = _convolution(3, 64, 7, 2) if stem == "imagenet" else _convolution(3, 64, 3)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if stem == "imagenet" else nn.Identity()
        self.layer1, self.layer2, self.layer3, self.layer4 = _stages(block, depths, block.expansion)
        self.fc = nn.Linear(block.expansion * _WIDTHS[-1], num_classes)
        _initialise(self)
        if zero_init_last:
            _zero_last_norms(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        folds = self.fold and isinstance(self.maxpool, nn.MaxPool2d) and _divides(images, 4)
        found = folded_stem(images, self.conv1.weight) if folds else self.conv1(images)
        found = self.relu(self.bn1(found))
        found = torch.ops.tutti.max_pool(found)[0] if folds and _KERNELS and found.is_cuda else self.maxpool(found)
        found = self.layer4(self.layer3(self.layer2(self.layer1(found))))
        return self.fc(found.mean((2, 3)))


def _divides(images: torch.Tensor, number: int) -> bool:
    return images.shape[2] % number == images.shape[3] % number == 0


def folded_stem(images: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The convolution of 7x7 with stride 2, as one of 4x4 over squares of 2x2 pixels.

    The fast kernels of GPUs take channels by eight: three channels become 12, and 16 with those that are zero.
    """
    batch, channels, height, width = images.shape
    squares = images.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 3, 5, 1, 2, 4)
    spare = -4 * channels % 8
    squares = F.pad(squares.reshape(batch, 4 * channels, height // 2, width // 2), (2, 1, 2, 1, 0, spare))
    taps = F.pad(weight, (1, 0, 1, 0)).view(len(weight), channels, 4, 2, 4, 2).permute(0, 3, 5, 1, 2, 4)
    taps = F.pad(taps.reshape(len(weight), 4 * channels, 4, 4), (0, 0, 0, 0, 0, spare))
    return F.conv2d(squares.contiguous(memory_format=torch.channels_last), taps)


def resnet18(num_classes: int = 1000, stem: Stem = "imagenet", zero_init_last: bool = True) -> ResNet:
    """ResNet-18: two basic blocks per stage."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, stem, zero_init_last)


def resnet34(num_classes: int = 1000, stem: Stem = "imagenet", zero_init_last: bool = True) -> ResNet:
    """ResNet-34: 3, 4, 6 and 3 basic blocks."""
    return ResNet(BasicBlock, (3, 4, 6, 3), num_classes, stem, zero_init_last)


def resnet50(num_classes: int = 1000, stem: Stem = "imagenet", zero_init_last: bool = True) -> ResNet:
    """ResNet-50 v1.5: 3, 4, 6 and 3 bottlenecks, with the stride in the 3x3 convolution."""
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, stem, zero_init_last)


class ResNetSmall(nn.Module):
    """26 layers, not counting shortcuts: conv 64 3x3, four stages of a projection block and an identity block,
    each 1x1-3x3-1x1 of equal widths (64, 128, 256, 512), global average pooling, dense."""

    def __init__(self, input_shape: Sequence[int] = (3, 32, 32), num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _convolution(input_shape[0], 64, 3),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            *_stages(Bottleneck, (2, 2, 2, 2), expansion=1, always_project=True),
        )
        self.fc = nn.Linear(_WIDTHS[-1], num_classes)
        _initialise(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(self.features(images).mean((2, 3)))


def count_layers(model: nn.Module) -> int:
    """Counts convolutions and dense layers outside shortcuts, the number in a ResNet's name."""
    layers = (name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear))
    return sum("downsample" not in name.split(".") for name in layers)


def _stages(block: Block, depths: Sequence[int], expansion: int, always_project: bool = False) -> list[nn.Sequential]:
    """Returns stages of blocks; the first block of a stage changes resolution and channels."""
    stages, inputs = [], _WIDTHS[0]
    for depth, width, stride in zip(depths, _WIDTHS, _STRIDES, strict=True):
        outputs = expansion * width
        first = block(inputs, width, outputs, stride, projects=always_project or stride > 1 or inputs != outputs)
        others = (block(outputs, width, outputs, stride=1, projects=False) for _ in range(depth - 1))
        stages.append(nn.Sequential(first, *others))
        inputs = outputs
    return stages


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)  # a batch norm follows


def _projection(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


def _initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _zero_last_norms(model: nn.Module) -> None:
    """Sets the scale of the last batch norm of every block to zero, so that a block starts as its shortcut."""
    for module in model.modules():
        if isinstance(module, BasicBlock | Bottleneck):
            nn.init.zeros_((module.bn2 if isinstance(module, BasicBlock) else module.bn3).weight)
