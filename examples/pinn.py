"""A physics-informed network: second derivatives in the loss, and L-BFGS after Adam.

It solves u'' = -pi^2 sin(pi x) on [-1, 1] with u = 0 at both ends; the solution is sin(pi x).

One rank:        python examples/pinn.py
Two ranks:       tutti run -n 2 examples/pinn.py
Resume it:       tutti run -n 4 examples/pinn.py --resume latest
"""

import argparse
import math

import torch
from torch import nn

import tutti

ADAM_STEPS = 20
torch.set_default_dtype(torch.float64)  # L-BFGS amplifies the rounding of smaller numbers


class Points:
    """Places at which the equation is to hold, and its right-hand side there."""

    def __init__(self, samples: int = 256) -> None:
        self.places = torch.linspace(-1, 1, samples).unsqueeze(1)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.places[index], -(math.pi**2) * torch.sin(math.pi * self.places[index])


def residual(network: nn.Module, places: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the mean square by which the network misses the equation, and the values at both ends."""
    places = places.detach().requires_grad_()
    found = network(places)
    (slope,) = torch.autograd.grad(found.sum(), places, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), places, create_graph=True)
    ends = network(places.new_tensor([[-1.0], [1.0]]))
    return (curvature - wanted).square().mean() + 100 * ends.square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--resume", help="a run folder, a checkpoint, or latest")
    asked = parser.parse_args()

    points = Points()
    with tutti.start("pinn", points, batch=len(points), epochs=asked.epochs, resume=asked.resume) as run:
        network = run.model(nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)))
        adam = torch.optim.Adam(network.parameters(), lr=1e-3)
        newton = torch.optim.LBFGS(network.parameters(), max_iter=5, line_search_fn="strong_wolfe")
        run.keep(network=network, adam=adam, newton=newton)
        for places, wanted in run.batches():

            def closure(places: torch.Tensor = places, wanted: torch.Tensor = wanted) -> torch.Tensor:
                network.zero_grad()
                return run.backward(residual(network, places, wanted), network)

            if run.step < ADAM_STEPS:
                loss = closure()
                adam.step()
            else:
                loss = newton.step(closure)
            run.log(loss=loss)
            if run.ends_epoch and run.step % 10 == 9:
                with torch.no_grad():
                    errors = [(network(x) - torch.sin(math.pi * x)).abs().max() for x, _ in run.share(points)]
                run.log_epoch(valid_error=run.average(max(errors)))


if __name__ == "__main__":
    main()
