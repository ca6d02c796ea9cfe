"""Losses that torch does not have."""

import torch
import torch.nn.functional as F
from torch import nn

_LOG_DENSITY_SCALE = 14.0  # channel 0 holds log(density) / 14


class L1Loss(nn.Module):
    """Mean absolute error, plus `lambda_rho` times that of the density itself, whose logarithm is channel 0."""

    def __init__(self, lambda_rho: float = 0.0) -> None:
        super().__init__()
        self.lambda_rho = lambda_rho

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs, targets = outputs.float(), targets.float()
        loss = F.l1_loss(outputs, targets)
        if not self.lambda_rho:
            return loss
        density, wanted = (torch.exp(_LOG_DENSITY_SCALE * each[:, 0]) for each in (outputs, targets))
        return loss + self.lambda_rho * F.l1_loss(density, wanted)
