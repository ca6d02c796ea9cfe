"""A network in plain torch, and what ranks do with runs of it; importing this module needs no tutti."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

VALUES: dict[str, Any] = {
    "recipe": "net",
    "data": {"name": "digits"},
    "model": {"name": "after_work:Net", "width": 8},
    "optim": {"name": "adamw", "lr": 5e-3},
    "batch": {"global": 64, "micro": 16},
    "epochs": 2,
    "checkpoint": {"best": "loss", "keep": 2},
    "log": {"every_steps": 11, "tensorboard": False},
}


class Net(nn.Module):
    """A convolution with batch norm, and a dense layer."""

    def __init__(self, width: int = 8, num_classes: int = 10) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(64 * width, num_classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(images))


def images() -> torch.Tensor:
    """Some inputs, the same in every process."""
    return torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(3))


def evaluate(folder: Path, split: str = "valid", which: str = "best", in_keras: bool = False) -> dict[str, float]:
    """Evaluate a checkpoint of a run as this rank."""
    from tutti.after import evaluate as after
    from tutti.after.run import open_run
    from tutti.ranks.environments import discover

    if in_keras:
        from tutti.frameworks.run import KerasFramework as Framework
    else:
        from tutti.train.torch import TorchFramework as Framework
    run, placement = open_run(folder), discover(os.environ)
    config = after.for_ranks(run.config, run.record, placement.world_size, [])
    chosen = run.checkpoint(which)
    return after.evaluate(Framework(), config, placement, split, chosen.path, chosen.manifest).metrics
