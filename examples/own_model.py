"""Train your own network, dataset, loss and metric with tutti.

From a recipe, on two ranks:   tutti train examples/own_model.yaml -n 2
From Python, on one rank:      python examples/own_model.py
From Python, on two ranks:     tutti run -n 2 examples/own_model.py
"""

import math

import torch
from torch import nn

import tutti

CHANNELS = 64


class Peaks:
    """Noisy spectra with one spectral line each; the target is the position of the line, in channels.

    A map-style dataset that generates its samples. The random numbers of a sample depend only on its index.
    """

    def __init__(self, split: str, samples: int = 2048, noise: float = 0.2) -> None:
        self.samples = samples if split == "train" else 512
        self.noise = noise
        self.offset = 0 if split == "train" else 1_000_000

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(self.offset + index)
        centre = 8 + (CHANNELS - 16) * torch.rand((), generator=draw)
        width = 1 + 2 * torch.rand((), generator=draw)
        line = torch.exp(-0.5 * ((torch.arange(CHANNELS) - centre) / width) ** 2)
        return line + self.noise * torch.randn(CHANNELS, generator=draw), centre


class PeakFinder(nn.Module):
    """Two convolutions compute a weight for each channel; the output is the weighted mean of the channel numbers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.weigh = nn.Sequential(
            nn.Conv1d(1, width, 7, padding=3), nn.GELU(), nn.Conv1d(width, 1, 7, padding=3), nn.Flatten()
        )
        self.register_buffer("channels", torch.arange(CHANNELS, dtype=torch.float32))

    def forward(self, spectra: torch.Tensor) -> torch.Tensor:
        return (self.weigh(spectra.unsqueeze(1)).softmax(-1) * self.channels).sum(-1)


def log_cosh(found: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
    """Return the mean log-cosh loss over the batch: quadratic for small errors, linear for large ones."""
    error = (found - centre).abs()
    return (error + nn.functional.softplus(-2 * error) - math.log(2)).mean()


def channel_error(found: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
    """Return the absolute error of each sample; tutti averages it over all samples of all ranks."""
    return (found - centre).abs()


if __name__ == "__main__":
    outcome = tutti.fit(
        PeakFinder(),
        Peaks("train"),
        Peaks("valid"),
        loss=log_cosh,
        metrics={"channel_error": channel_error},
        name="own_model",
        optim={"name": "adam", "lr": 1e-2},
        batch={"global": 64},
        epochs=5,
    )
    print(f"run folder: {outcome.folder.path}, off by {outcome.results['valid_channel_error']:.3f} channels")
