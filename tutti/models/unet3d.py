"""The 3-D U-Net that predicts hydrodynamic fields from N-body fields."""

import torch
from torch import nn

from tutti.errors import ConfigError
from tutti.models.strided import Form, down, up


class Down(nn.Conv3d):
    """A level that halves the volume."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(before, after, 4, stride=2, padding=1)

    def forward(self, volume: torch.Tensor, form: Form = "convolution") -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert self.bias is not None
        return down(volume, self.weight, self.bias, form, slope=0.01)


class Up(nn.ConvTranspose3d):
    """A level that doubles the volume, with the volume of the same size from the way down beside it."""

    def __init__(self, before: int, after: int, is_last: bool = False) -> None:
        super().__init__(before, after, 4, stride=2, padding=1)
        self._is_last = is_last

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, volume: torch.Tensor, skipped: torch.Tensor | None = None, form: Form = "convolution"
    ) -> torch.Tensor:
        assert self.bias is not None
        if skipped is not None:
            volume = torch.cat((volume, skipped), 1)
        if self._is_last:
            return torch.tanh(up(volume, self.weight, self.bias, form))
        return up(volume, self.weight, self.bias, form, slope=0.0)


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
            Down(before, after) for before, after in zip([in_channels, *widths], widths, strict=False)
        )
        entering = [widths[-1], *(2 * each for each in widths[-2:0:-1])]
        self.ups = nn.ModuleList(Up(before, after) for before, after in zip(entering, widths[-2::-1], strict=True))
        self.last = Up(2 * width, out_channels, is_last=True)
        for layer in self.modules():
            if isinstance(layer, nn.Conv3d | nn.ConvTranspose3d):
                nn.init.normal_(layer.weight, 0.0, 0.02)
                nn.init.zeros_(layer.bias)  # pyright: ignore[reportArgumentType]

    def units(self) -> list[str]:
        """The levels, as which weights are sharded and activations computed again."""
        return [f"{name}.{level}" for name in ("downs", "ups") for level in range(len(getattr(self, name)))] + ["last"]

    def forward(self, volume: torch.Tensor) -> torch.Tensor:
        levels = []
        for level, layer in enumerate(self.downs):
            volume = layer(volume, "product" if self.fold and level == 0 else "convolution")
            levels.append(volume)
        skipped: torch.Tensor | None = None
        levels.pop()
        for layer in self.ups:
            volume = layer(volume, skipped, "mixed" if self.fold and len(levels) == 1 else "convolution")
            skipped = levels.pop()
        return self.last(volume, skipped, "product" if self.fold else "convolution")

    def stages(self) -> list[str]:
        """The levels, in order."""
        return self.units()

    def run_stage(self, name: str, *levels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Apply one level to the last of the volumes that are needed from here on, which are then given."""
        layer, earlier = self.get_submodule(name), list(levels[:-1])
        if name == "downs.0":
            return (layer(levels[-1], "product" if self.fold else "convolution"),)
        if name.startswith("downs."):
            return (*levels, layer(levels[-1]))
        skipped = earlier.pop() if name != "ups.0" else None
        last = {"last": "product", f"ups.{len(self.ups) - 1}": "mixed"}
        form = last.get(name, "convolution") if self.fold else "convolution"
        return (*earlier, layer(levels[-1], skipped, form))


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
