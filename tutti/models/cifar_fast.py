"""A wide, shallow network that trains on CIFAR-10 in seconds.

It follows the public speed records for this dataset: the first layer whitens 2 x 2 patches and is not trained, the
other convolutions are initialised as identities, and batch norm has biases but no scales.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

_PATCH = 2
_LEAST_VARIANCE = 5e-4
_BIAS_GAIN = 8.0  # multiplies the learning rate of a bias by 64


class CifarFast(nn.Module):
    """Whitening, three blocks of two convolutions, one dense layer; validation averages over `views`."""

    def __init__(
        self,
        input_shape: Sequence[int] = (3, 32, 32),
        num_classes: int = 10,
        widths: Sequence[int] = (64, 256, 256),
        views: int = 6,
    ) -> None:
        super().__init__()
        components = input_shape[0] * _PATCH**2
        self.views = views
        self.whiten = nn.Conv2d(input_shape[0], 2 * components, _PATCH, bias=False)
        self.whiten.weight.requires_grad_(False)
        self.whiten_bias = nn.Parameter(torch.zeros(2 * components))
        entering = (2 * components, *widths[:-1])
        self.blocks = nn.Sequential(*(Block(a, b) for a, b in zip(entering, widths, strict=True)))
        self.dense = nn.Linear(widths[-1], num_classes, bias=False)

    @torch.no_grad()
    def adapt_to_data(self, images: torch.Tensor) -> None:
        """Sets the first layer from training images: whitened components of patches, in both signs."""
        patches = F.unfold(images.float(), _PATCH).transpose(1, 2).flatten(0, 1)
        patches = patches - patches.mean(0)
        variances, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        components = (vectors / (variances + _LEAST_VARIANCE).sqrt()).T
        components = components.view(-1, images.shape[1], _PATCH, _PATCH)
        self.whiten.weight.copy_(torch.cat((components, -components)))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training or self.views == 1:
            return self._scores(images)
        scores = self._both(images)
        if self.views == 2:
            return scores
        moved = F.pad(images, (1, 1, 1, 1), mode="reflect")
        corners = self._both(moved[..., :-2, :-2]) + self._both(moved[..., 2:, 2:])
        return 0.5 * scores + 0.25 * corners

    def _both(self, images: torch.Tensor) -> torch.Tensor:
        return 0.5 * (self._scores(images) + self._scores(images.flip(-1)))

    def _scores(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.whiten(images) + self.whiten_bias.view(-1, 1, 1)
        features = self.blocks(F.gelu(patches))
        # Not amax: its compiled gradient recomputes the values, and compares the maximum with differently rounded ones.
        return self.dense(F.max_pool2d(features, features.shape[2:]).flatten(1)) / 9


class Block(nn.Module):
    """Convolution, pool, batch norm, GELU; convolution, batch norm, GELU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = _identity_convolution(inputs, outputs)
        self.second = _identity_convolution(outputs, outputs)
        self.first_norm, self.second_norm = BiasedNorm(outputs), BiasedNorm(outputs)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = F.gelu(self.first_norm(F.max_pool2d(self.first(images), 2)))
        return F.gelu(self.second_norm(self.second(images)))


class BiasedNorm(nn.BatchNorm2d):
    """Batch norm without scales, with a larger learning rate of biases and a larger momentum of statistics."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, momentum=0.4, affine=False)
        self.shift = nn.Parameter(torch.zeros(channels))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + (_BIAS_GAIN * self.shift).to(input.dtype).view(-1, 1, 1)


def _identity_convolution(inputs: int, outputs: int) -> nn.Conv2d:
    """Returns a 3x3 convolution whose first outputs are its inputs."""
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    with torch.no_grad():
        nn.init.dirac_(convolution.weight[:inputs])
    return convolution
