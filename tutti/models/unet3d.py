"""The 3-D U-Net that predicts hydrodynamic fields from N-body fields."""

import torch
import torch.nn.functional as F
from torch import nn

from tutti.errors import ConfigError
from tutti.models.strided import Form, down, up


class UNet3d(nn.Module):
    """Six convolutions that halve the volume, six that double it, with skip connections and a tanh at the end.

    `fold` computes the first layer, the last layer and the gradients of the layer before it as matrix products: the
    same function, in less time on a GPU.
    """

    def __init__(
        self,
        in_channels: int = 4,
        out_channels: int = 5,
        width: int = 64,
        depth: int = 6,
        input_shape: tuple[int, ...] | None = None,
        fold: bool = False,
    ) -> None:
        super().__init__()
        _check_shape(input_shape, in_channels, depth)
        self.fold = fold
        widths = [min(width * 2**level, 8 * width) for level in range(depth)]
        self.downs = nn.ModuleList(
            nn.Conv3d(before, after, 4, stride=2, padding=1)
            for before, after in zip([in_channels, *widths], widths, strict=False)
        )
        entering = [widths[-1], *(2 * each for each in widths[-2:0:-1])]
        self.ups = nn.ModuleList(
            nn.ConvTranspose3d(before, after, 4, stride=2, padding=1)
            for before, after in zip(entering, widths[-2::-1], strict=True)
        )
        self.last = nn.ConvTranspose3d(2 * width, out_channels, 4, stride=2, padding=1)
        for layer in self.modules():
            if isinstance(layer, nn.Conv3d | nn.ConvTranspose3d):
                nn.init.normal_(layer.weight, 0.0, 0.02)
                nn.init.zeros_(layer.bias)  # pyright: ignore[reportArgumentType]

    def forward(self, volume: torch.Tensor) -> torch.Tensor:
        skipped = []
        for level, layer in enumerate(self.downs):
            form: Form = "product" if self.fold and level == 0 else "convolution"
            volume = F.leaky_relu(_apply(down, layer, volume, form), inplace=True)
            skipped.append(volume)
        skipped.pop()
        for layer in self.ups:
            form = "mixed" if self.fold and len(skipped) == 1 else "convolution"
            volume = torch.cat((F.relu(_apply(up, layer, volume, form), inplace=True), skipped.pop()), 1)
        return torch.tanh(_apply(up, self.last, volume, "product" if self.fold else "convolution"))


def _apply(function, layer: nn.Module, volume: torch.Tensor, form: Form) -> torch.Tensor:
    return function(volume, layer.weight, layer.bias, form)


def _check_shape(input_shape: tuple[int, ...] | None, in_channels: int, depth: int) -> None:
    if input_shape is None:
        return
    channels, *sizes = input_shape
    if len(sizes) != 3:
        raise ConfigError(
            f"the data is {' x '.join(map(str, input_shape))}: expected volumes, channels x depth x height x width. "
            "Choose a dataset of volumes, such as data.name=nbody, or another model."
        )
    if channels != in_channels:
        raise ConfigError(
            f"model.in_channels={in_channels}, but the data has {channels} channels. Set model.in_channels={channels}."
        )
    if any(size % 2**depth for size in sizes):
        raise ConfigError(
            f"volumes of {' x '.join(map(str, sizes))} cells cannot be halved {depth} times: "
            f"expected multiples of {2**depth}. Set data.crop, or a smaller model.depth."
        )
