"""The adversarial network of gan.py as a recipe whose step is a function: two networks, two optimizers.

Two ranks:       tutti train examples/gan.yaml -n 2
Another rate:    tutti train examples/gan.yaml -n 2 optim.lr=3e-3
Resume it:       tutti train examples/gan.yaml -n 4 --resume
"""

import math

import torch
from gan import Ring, network
from torch import nn
from torch.nn.functional import softplus


class Latents:
    """Inputs of the generator for validation; the random numbers of a sample depend only on its index."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(4, generator=torch.Generator().manual_seed(index)), index


def samples(split: str) -> Ring | Latents:
    return Ring() if split == "train" else Latents()


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = network(4, 2), network(2, 1)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the points that validation measures, and that `tutti apply` makes."""
        return self.generator(latents)


def optimizers(model: Gan, lr: float) -> dict[str, torch.optim.Optimizer]:
    return {
        "make": torch.optim.Adam(model.generator.parameters(), lr=lr, betas=(0.5, 0.9)),
        "judge": torch.optim.Adam(model.critic.parameters(), lr=lr, betas=(0.5, 0.9)),
    }


def step(run, model, optimizers, batch):
    real, _ = batch
    made = model.generator(run.normal(4))
    told = run.backward(
        softplus(-model.critic(real)).mean() + softplus(model.critic(made.detach())).mean(), model.critic
    )
    optimizers["judge"].step()
    fooled = run.backward(softplus(-model.critic(made)).mean(), model.generator)
    optimizers["make"].step()
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    return {"loss": fooled, "critic": told}


def distance(made: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Return the mean distance of the points to the nearest of the eight centres."""
    angles = torch.arange(8, device=made.device) * 2 * math.pi / 8
    centres = torch.stack([angles.cos(), angles.sin()], 1)
    return torch.cdist(made, centres).min(1).values.mean()
