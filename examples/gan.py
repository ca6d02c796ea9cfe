"""A generative adversarial network: two models, two optimizers, a loop of one's own.

One rank:        python examples/gan.py
Two ranks:       tutti run -n 2 examples/gan.py
Resume it:       tutti run -n 4 examples/gan.py --resume latest
"""

import argparse
import math

import torch
from torch import nn
from torch.nn.functional import softplus

import tutti


class Ring:
    """Points near eight centres on a circle; the random numbers of a sample depend only on its index."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        draw = torch.Generator().manual_seed(index)
        angle = 2 * math.pi * (index % 8) / 8
        centre = torch.tensor([math.cos(angle), math.sin(angle)])
        return centre + 0.05 * torch.randn(2, generator=draw), index % 8


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, outputs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--resume", help="a run folder, a checkpoint, or latest")
    asked = parser.parse_args()

    with tutti.start("gan", Ring(), batch=128, epochs=asked.epochs, resume=asked.resume) as run:
        generator, critic = run.model(network(4, 2)), run.model(network(2, 1))
        make = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
        judge = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
        run.keep(generator=generator, critic=critic, make=make, judge=judge)
        for real, _ in run.batches():
            made = generator(run.normal(4))
            told = run.backward(softplus(-critic(real)).mean() + softplus(critic(made.detach())).mean(), critic)
            judge.step()
            fooled = run.backward(softplus(-critic(made)).mean(), generator)
            make.step()
            for optimizer in (make, judge):
                optimizer.zero_grad()
            run.log(loss=fooled, critic=told)


if __name__ == "__main__":
    main()
