"""What ranks do in the tests of samples split in space; each function runs on every rank."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_work import join_all
from torch import nn

from tutti.models.unet3d import UNet3d
from tutti.parallel.dropout import DropoutMasks
from tutti.parallel.space import whole
from tutti.parallel.space.halo import SpaceGrid, cut, place_of
from tutti.parallel.space.marks import dims_of
from tutti.parallel.space.mode import SpaceMode, check_space

CONVOLUTIONS = [  # kernel, stride, padding, kind
    (4, 2, 1, "conv"),
    (4, 2, 1, "transposed"),
    (3, 1, 1, "conv"),
    (3, 1, 1, "transposed"),
    (3, 2, 1, "conv"),
    (7, 2, 3, "conv"),
    (5, 1, 2, "conv"),
    (5, 1, 2, "transposed"),
    (2, 2, 0, "conv"),
    (2, 2, 0, "transposed"),
    (1, 1, 0, "conv"),
    (1, 2, 0, "conv"),
    (6, 2, 2, "conv"),
    (6, 2, 2, "transposed"),
    (8, 4, 2, "conv"),
    (8, 4, 2, "transposed"),
    (4, 4, 0, "conv"),
    (3, 3, 0, "transposed"),
    (6, 4, 1, "transposed"),
]


class Flows(nn.Module):
    """A function of a volume as a module."""

    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, volume: torch.Tensor) -> torch.Tensor:
        return self.call(volume)


class Autoencoder(nn.Module):
    """Levels that are smaller than a stride at the bottom, without skip connections."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.downs = nn.ModuleList(nn.Conv2d(3, 3, 4, 2, 1) for _ in range(depth))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(3, 3, 4, 2, 1) for _ in range(depth))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for layer in (*self.downs, *self.ups):
            images = torch.tanh(layer(images))
        return images


class Channels(nn.Module):
    """What networks do with channels: attention over them, layer norm of them last, groups of them shuffled."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dense, self.gate = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.places = nn.Parameter(torch.randn(6, 16, 16))
        self.all = nn.LayerNorm((6, 16, 16))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        last = self.dense(self.norm(images.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        gates = torch.sigmoid(self.gate(images.mean((2, 3))))[:, :, None, None]
        batch, channels, height, width = last.shape
        shuffled = last.reshape(batch, 2, channels // 2, height, width).transpose(1, 2).flatten(1, 2)
        rows = torch.linspace(-1, 1, images.shape[2]).to(images).view(-1, 1)
        mixed = self.all(shuffled * gates + self.places + rows)
        first, second = mixed.chunk(2, 1)
        return torch.cat((first * second.softmax(1), images.amax((2, 3), keepdim=True)[:, :3] * second), 1)


def layer(kernel: int, stride: int, padding: int, kind: str, spatial: int, **more: Any) -> nn.Module:
    kinds = {
        "conv": (nn.Conv1d, nn.Conv2d, nn.Conv3d),
        "transposed": (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    }
    return kinds[kind][spatial - 1](2, 4, kernel, stride, padding, **more)


def models() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Models by name, each with the shape of a sample."""
    torch.manual_seed(3)
    line, square, volume = (2, 24), (2, 24, 24), (2, 24, 24, 4)
    found: dict[str, tuple[nn.Module, tuple[int, ...]]] = {}
    for case in CONVOLUTIONS:
        sample = (2, 32, 32) if case[1] in (2, 4) else square
        found[f"{case}"] = layer(*case, 2), sample
    found |= {
        "3d": (nn.Sequential(layer(4, 2, 1, "conv", 3), nn.Tanh(), nn.ConvTranspose3d(4, 2, 4, 2, 1)), volume),
        "1d": (nn.Sequential(nn.Conv1d(2, 4, 5, padding=2), nn.Tanh(), nn.MaxPool1d(2), nn.AvgPool1d(3, 1, 1)), line),
        "dilated": (layer(3, 1, 2, "conv", 2, dilation=2), square),
        "dilated transposed": (layer(3, 1, 2, "transposed", 2, dilation=2), square),
        "groups": (layer(3, 1, 1, "conv", 2, groups=2), square),
        "output padding": (layer(3, 2, 1, "transposed", 2, output_padding=1), square),
        "same": (nn.Conv2d(2, 4, 4, padding="same"), square),
        "circular": (layer(3, 1, 1, "conv", 2, padding_mode="circular"), square),
        "circular stride": (layer(4, 2, 1, "conv", 2, padding_mode="circular"), square),
        "constant pad": (nn.Sequential(nn.ConstantPad2d((1, 0, 2, 1), 0.5), nn.Conv2d(2, 3, (4, 2))), square),
        "pad and add": (Flows(lambda x: F.pad(x, (1, 1, 1, 1)).tanh()[:, :, 1:-1, 1:-1] + x), square),
        "max pool": (nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2)), square),
        "max pool, ceil": (nn.MaxPool2d(3, 2, ceil_mode=True), square),
        "average pool": (nn.Sequential(nn.AvgPool2d(3, 2, 1), nn.AvgPool2d(2)), square),
        "average pool without padding": (nn.AvgPool2d(3, 1, 1, count_include_pad=False), square),
        "to one": (nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten()), square),
        "to one, largest": (nn.Sequential(nn.AdaptiveMaxPool2d(1), nn.Flatten()), square),
        "to four": (nn.AdaptiveAvgPool2d(4), square),
        "to three": (nn.AdaptiveAvgPool2d(3), square),
        "valid": (nn.Conv2d(2, 4, 5), square),
        "nearest": (nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(2, 2, 3, padding=1)), square),
        "bilinear": (Flows(lambda x: F.interpolate(F.max_pool2d(x, 2), size=x.shape[2:], mode="bilinear") * x), square),
        "pixel shuffle": (nn.Sequential(nn.Conv2d(2, 8, 1), nn.PixelShuffle(2), nn.PixelUnshuffle(4)), square),
        "batch norm": (nn.Sequential(nn.Conv2d(2, 6, 1, bias=False), nn.BatchNorm2d(6), nn.SiLU()), square),
        "group norm": (nn.Sequential(nn.Conv2d(2, 6, 1), nn.GroupNorm(3, 6), nn.GELU(), nn.Conv2d(6, 2, 1)), square),
        "instance norm": (nn.InstanceNorm2d(2, affine=True, track_running_stats=True), square),
        "channels": (Channels(), (6, 16, 16)),
        "gathered": (Autoencoder(4), (3, 16, 16)),
        "U-Net": (UNet3d(2, 3, width=2, depth=4, input_shape=(2, 16, 16, 16)), (2, 16, 16, 16)),
        "dropout": (nn.Sequential(nn.Dropout(0.4), nn.Dropout2d(0.5), nn.Conv2d(2, 40, 1), nn.Dropout(0.3)), square),
        "whole": (Flows(lambda x: whole(x.tanh()).flatten(1)), square),
    }  # fmt: skip
    for name in ("(3, 3, 0, 'transposed')", "(6, 4, 1, 'transposed')"):
        found[name] = found[name][0], square
    return found


def compare(parts: tuple[int, ...]) -> dict[str, list[float]]:
    """The largest differences of a model on parts from that on the whole: outputs, gradients, and buffers."""
    grid = join(parts)
    return {name: _compare_one(grid, *case) for name, case in models().items() if len(case[1]) > len(parts)}


def compare_compiled() -> dict[str, list[float]]:
    """The same of models that are compiled to one graph."""
    grid, known = join((2,)), models()
    names = ("U-Net", "batch norm", "to one", "dropout")
    return {name: _compare_one(grid, *known[name], compiles=True) for name in names}


def join(parts: tuple[int, ...]) -> SpaceGrid:
    torch.set_num_threads(1)
    if not dist.is_initialized():
        join_all()
    return SpaceGrid(parts, place_of(parts, dist.get_rank()), None, tuple(range(dist.get_world_size())))


def _compare_one(grid: SpaceGrid, model: nn.Module, shape: tuple[int, ...], compiles: bool = False) -> list[float]:
    model.double().train()
    torch.manual_seed(5)
    inputs = torch.randn(2, *shape, dtype=torch.float64)
    mode = SpaceMode(grid)
    if compiles:
        check_space(model, mode, shape, torch.device("cpu"))
    masks = DropoutMasks(model, torch.device("cpu"), not compiles, mode)
    masks.begin_pass(7, 0, 0)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    reference = inputs.clone().requires_grad_()
    expected = model(reference)
    factors = torch.randn_like(expected)
    (expected * factors).mean().backward()
    wanted = [each.grad for each in model.parameters()]
    buffers = [each.clone() for each in model.buffers()]
    model.zero_grad(set_to_none=True)
    model.load_state_dict(before)

    masks.begin_pass(7, 0, 0)
    axes = tuple(2 + axis for axis in grid.axes)
    part = cut(inputs, axes, grid).contiguous().requires_grad_()
    run = torch.compile(mode.run, backend="aot_eager", fullgraph=True) if compiles else mode.run
    found = run(model, part)
    is_part = dims_of(found) is not None if not compiles else found.shape != expected.shape
    answer, scale = (cut(each, axes, grid) if is_part else each for each in (expected, factors))
    (found * scale).mean().backward()
    assert found.shape == answer.shape, (found.shape, answer.shape)
    differences = [(found - answer).abs().max()]
    assert part.grad is not None and reference.grad is not None
    own = cut(reference.grad, axes, grid)
    differences.append((part.grad / grid.size - own).abs().max() / own.abs().max())
    for each, good in zip(model.parameters(), wanted, strict=True):
        assert each.grad is not None and good is not None
        dist.all_reduce(each.grad)
        differences.append((each.grad / grid.size - good).abs().max() / good.abs().max())
    differences += [(each - good).abs().max() for each, good in zip(model.buffers(), buffers, strict=True)]
    return [float(each) for each in differences]
