"""Metrics by name: each gives one value a sample, or one mean for the batch."""

import torch


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """1 where the highest score is the right class."""
    return (output.argmax(-1) == target).float()


def top5(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """1 where the right class is among the five highest scores."""
    highest = output.topk(min(5, output.shape[-1]), -1).indices
    return (highest == target.unsqueeze(-1)).any(-1).float()
