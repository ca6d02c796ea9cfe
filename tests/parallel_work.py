"""What ranks do in the tests of layouts; each function runs on every rank."""

import copy
from typing import Any

import torch
from rank_work import join_all
from torch import nn

from tutti.config.layout import Layout
from tutti.models.transformer import GPT
from tutti.parallel.mesh import Mesh
from tutti.parallel.shard import allocate, shard_model
from tutti.parallel.tensor import split_layers


def first_weights(shards: tuple[int, ...]) -> list[dict[str, Any]]:
    """The first weights of a GPT that was built on the meta device, for each number of shards."""
    group, found = join_all(), []
    device = torch.device("cpu")
    for shard in shards:
        mesh = Mesh(Layout(group.world_size, shard=shard), group.rank, device)
        with torch.device("meta"):
            model = GPT(vocabulary=11, context=5, width=12, depth=2, heads=2)
        shard_model(model, mesh.weights)
        allocate(model, device, seed=3)
        held = sum(each.to_local().numel() for each in model.parameters())
        found.append({"held": held} | {name: each.full_tensor().tolist() for name, each in model.named_parameters()})
    group.leave()
    return found


class SplitBlock(nn.Module):
    """Attention and a gate between layers that ranks share, with dropout in between and a parameter of its own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 1.5))
        self.head_width = width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.weights_dropout, self.inner_dropout = nn.Dropout(0.2), nn.Dropout(0.2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        by_head = self.qkv(inputs * self.scale).unflatten(-1, (-1, 3, self.head_width))
        query, key, value = (each.transpose(1, 2) for each in by_head.unbind(-2))
        weights = self.weights_dropout((query @ key.transpose(-1, -2)).softmax(-1))
        inputs = inputs + self.out((weights @ value).transpose(1, 2).flatten(2))
        return inputs + self.down(self.inner_dropout(self.up(inputs).tanh()))


class SplitNet(nn.Module):
    """A network on the rows of an image, by blocks whose layers are split."""

    def __init__(self, num_classes: int = 10, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, num_classes)
        self.blocks = nn.ModuleList(SplitBlock(width, heads) for _ in range(2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.first(images.squeeze(1))
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden.mean(1))

    def tensor_plan(self) -> dict[str, str]:
        kinds = {"qkv": "columns", "out": "rows", "up": "columns", "down": "rows"}
        return {f"blocks.{index}.{name}": kind for index in range(2) for name, kind in kinds.items()}


def split_gradients() -> dict[str, Any]:
    """Gradients of a split model by the names of its parameters, as this rank and all have them, and of a whole one."""
    group = join_all()
    mesh = Mesh(Layout(group.world_size, tensor=group.world_size), group.rank, torch.device("cpu"))
    torch.manual_seed(0)
    whole, images = SplitNet().double().eval(), torch.randn(6, 1, 8, 8, dtype=torch.float64)
    parts = copy.deepcopy(whole)
    split_layers(parts, mesh.tensor)
    for model in (whole, parts):
        model(images).square().mean().backward()
    expected = {name: each.grad for name, each in whole.named_parameters()}
    gradients = {name: each.grad for name, each in parts.named_parameters()}
    storage = sum(each.to_local().untyped_storage().nbytes() for each in parts.parameters())
    found = {
        "expected": expected,
        "whole": {name: each.full_tensor() for name, each in gradients.items()},
        "own": {name: each.to_local() for name, each in gradients.items() if each.placements[0].is_replicate()},
        "bytes": storage,
    }
    group.leave()
    return found
