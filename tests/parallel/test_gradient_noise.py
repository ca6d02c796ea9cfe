"""Squares of the gradients of micro-batches and of their mean, beside those that autograd gives by hand."""

import pytest
import torch
from torch import nn

from tutti.parallel.gradient_noise import GradientSquares, find_biases

PASSES = 3


Squares = dict[int, list[float]]


def accumulate(scale: float | None, measured: bool = True, unused: bool = False) -> tuple[nn.Module, Squares]:
    """An accumulated step of three micro-batches, with the loss scaled as in fp16 where a scale is given."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    extra = nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    squares = GradientSquares([*model.parameters(), *(extra.parameters() if unused else ())], scaler, world_size=1)
    squares.begin_step(10 if measured else 11)
    for batch in torch.randn(PASSES, 6, 5):
        squares.begin_pass()
        scaler.scale(model(batch).square().mean() / PASSES).backward()
        squares.end_pass()
    squares.end_step(10 if measured else 11)
    return model, squares.take()


def squares_by_hand() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    nn.Linear(2, 2)
    gradients = []
    for batch in torch.randn(PASSES, 6, 5):
        parts = torch.autograd.grad(model(batch).square().mean(), list(model.parameters()))
        gradients.append(torch.cat([part.flatten() for part in parts]))
    stacked = torch.stack(gradients)
    return [stacked.square().sum(1).mean().item(), stacked.mean(0).square().sum().item()]


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_squares_are_those_of_micro_batches_and_of_their_mean_without_the_scale(scale: float | None) -> None:
    assert accumulate(scale)[1] == {10: pytest.approx(squares_by_hand(), rel=1e-5)}


def test_a_parameter_without_a_gradient_does_not_count() -> None:
    assert accumulate(None, unused=True)[1] == accumulate(None)[1]


def test_accumulated_gradients_are_the_same_bits_whether_measured_or_not() -> None:
    (model, found), (other, nothing) = accumulate(None), accumulate(None, measured=False)
    assert found and not nothing
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_half_precision_is_squared_in_single() -> None:
    weight = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    squares = GradientSquares([weight], torch.amp.GradScaler("cpu", enabled=False), world_size=2)
    weight.grad = torch.full_like(weight, 3.0)
    squares.begin_step(20)
    squares.add_bucket(torch.full((999,), 2.0, dtype=torch.bfloat16))
    squares.add_bucket(torch.ones(1))
    squares.end_step(20)
    assert squares.take() == {20: pytest.approx([4.0 * 999 + 1, 9000.0], rel=1e-6)}


def test_a_step_whose_gradients_stay_on_the_rank_is_left_out() -> None:
    squares = GradientSquares([], torch.amp.GradScaler("cpu", enabled=False), world_size=2)
    squares.begin_step(10)
    squares.end_step(10)
    assert squares.take() == {}


def test_batch_norm_is_named() -> None:
    assert find_biases(nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2), nn.InstanceNorm2d(2))) == ()
    assert find_biases(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))) == ("batch norm",)
