"""Fully connected networks."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from torch import nn


class Mlp(nn.Module):
    """Flattens its input, then layers of the given widths, each with optional batch norm and dropout."""

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        hidden: Sequence[int] = (128, 64),
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise((prod(input_shape), *hidden)):
            layers.append(nn.Linear(inputs, outputs))
            if batch_norm:
                layers.append(nn.BatchNorm1d(outputs))
            layers.append(nn.ReLU())
            if dropout:
                layers.append(nn.Dropout(dropout))
        last = hidden[-1] if hidden else prod(input_shape)
        self.layers = nn.Sequential(*layers, nn.Linear(last, num_classes))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)
