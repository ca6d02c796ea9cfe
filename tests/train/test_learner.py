"""What one step does to the weights of a model."""

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from tutti.config.load import load
from tutti.train.learner import TorchLearner

LENGTH = 0.5


def clipped_gradient(scale: float) -> torch.Tensor:
    """The gradient of a fixed loss after clipping to LENGTH and unscaling, where the loss was scaled."""
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).view(2, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    step: Any = SimpleNamespace(
        _config=load("digits", f"optim.clip_norm={LENGTH}"), scaler=scaler, optimizer=optimizer, model=model
    )
    scaler.scale(model(torch.ones(3)).square().sum()).backward()
    TorchLearner.clip_gradients(cast(TorchLearner, step))
    scaler.step(optimizer)  # which unscales what was not unscaled before
    assert model.weight.grad is not None
    return model.weight.grad


def test_gradients_are_clipped_to_their_length_without_the_scale_of_half_precision() -> None:
    torch.testing.assert_close(clipped_gradient(1024.0), clipped_gradient(1.0))
    torch.testing.assert_close(clipped_gradient(1024.0).norm(), torch.tensor(LENGTH), rtol=1e-4, atol=0.0)
