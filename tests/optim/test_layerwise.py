"""LARS and LAMB: the formulas of the papers, excluded parameters, and whole runs on any number of ranks."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_jobs import read_losses, run_ranks, train
from torch import nn

from tutti.config.framework import check_framework
from tutti.config.load import resolve_values
from tutti.errors import ConfigError
from tutti.optim.layerwise import Lamb, Lars
from tutti.optim.muon import Muon
from tutti.optim.optimizers import build_optimizer

pytestmark = pytest.mark.xdist_group("layerwise")
RATES = (0.5, 0.2, 0.9, 0.1)
VALUES: dict[str, Any] = {
    "recipe": "layers",
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": [32]},
    "batch": {"global": 512, "micro": 128},
    "schedule": {"warmup_steps": 2, "decay": "cosine"},
    "epochs": 8,
    "checkpoint": {"every_steps": 9, "every_epochs": None},
    "log": {"every_steps": 4, "tensorboard": False},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "lars": {"name": "lars", "lr": 1.0, "eta": 0.05, "clip_norm": 5.0},
    "lamb": {"name": "lamb", "lr": 0.1, "clip_norm": 5.0},
}


def lars_by_hand(weights: np.ndarray, gradients: np.ndarray, is_layer: bool) -> np.ndarray:
    """You, Gitman and Ginsburg (2017), algorithm 1: eta 0.01, momentum 0.8, decay 0.1."""
    velocity = np.zeros_like(weights)
    for lr, gradient in zip(RATES, gradients, strict=True):
        decay = 0.1 if is_layer else 0.0
        norm = np.linalg.norm(weights)
        local = 0.01 * norm / (np.linalg.norm(gradient) + decay * norm) if is_layer else 1.0
        velocity = 0.8 * velocity + lr * local * (gradient + decay * weights)
        weights = weights - velocity
    return weights


def lamb_by_hand(weights: np.ndarray, gradients: np.ndarray, is_layer: bool) -> np.ndarray:
    """You et al. (2019), algorithm 2: betas 0.8 and 0.95, eps 1e-4, decay 0.1."""
    mean, square = np.zeros_like(weights), np.zeros_like(weights)
    for step, (lr, gradient) in enumerate(zip(RATES, gradients, strict=True), start=1):
        mean = 0.8 * mean + 0.2 * gradient
        square = 0.95 * square + 0.05 * gradient**2
        update = mean / (1 - 0.8**step) / (np.sqrt(square / (1 - 0.95**step)) + 1e-4)
        if is_layer:
            update = update + 0.1 * weights
            update = update * np.linalg.norm(weights) / np.linalg.norm(update)
        weights = weights - lr * update
    return weights


def make_lars(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return Lars(parameters, lr=1.0, momentum=0.8, weight_decay=0.1, eta=0.01)


def make_lamb(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return Lamb(parameters, lr=1.0, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1)


BY_HAND = pytest.mark.parametrize(("make", "by_hand"), [(make_lars, lars_by_hand), (make_lamb, lamb_by_hand)])
Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def take_steps(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], gradients: list[np.ndarray]) -> None:
    """A step for each rate, with the gradients of all parameters."""
    for index in range(len(gradients[0])):
        for group in optimizer.param_groups:
            group["lr"] = RATES[index]
        for parameter, given in zip(parameters, gradients, strict=True):
            parameter.grad = torch.tensor(given[index])
        optimizer.step()


@BY_HAND
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 2, 2), (5,), ()], ids=["matrix", "filters", "bias", "scale"])
def test_some_steps_are_those_of_the_paper(make: Make, by_hand: Callable[..., np.ndarray], shape: tuple) -> None:
    random = np.random.default_rng(3)
    weights, gradients = random.normal(size=shape), random.normal(size=(len(RATES), *shape))
    others = random.normal(size=(2, 2)), random.normal(size=(len(RATES), 2, 2))
    parameters = [nn.Parameter(torch.tensor(weights)), nn.Parameter(torch.tensor(others[0]))]
    take_steps(make([*parameters]), [*parameters], [gradients, others[1]])
    expected = by_hand(weights, gradients, len(shape) > 1)
    np.testing.assert_allclose(parameters[0].detach().numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(parameters[1].detach().numpy(), by_hand(*others, True), rtol=1e-12)


def test_biases_of_lars_take_plain_momentum_and_biases_of_lamb_take_adam() -> None:
    random = np.random.default_rng(4)
    weights, gradients = random.normal(size=6), random.normal(size=(len(RATES), 6))
    for make, plain in (
        (make_lars, lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.8)),
        (make_lamb, lambda parameters: torch.optim.Adam(parameters, lr=1.0, betas=(0.8, 0.95), eps=1e-4)),
    ):
        ours, theirs = nn.Parameter(torch.tensor(weights)), nn.Parameter(torch.tensor(weights))
        gradient = gradients[:1] if make is make_lars else gradients  # torch's momentum is of gradients
        take_steps(make([ours]), [ours], [gradient])
        take_steps(plain([theirs]), [theirs], [gradient])
        torch.testing.assert_close(ours, theirs)


def test_the_step_of_a_layer_does_not_depend_on_the_length_of_its_gradient() -> None:
    random = np.random.default_rng(5)
    weights, gradient = random.normal(size=(4, 4)), random.normal(size=(1, 4, 4))
    for make in (lambda p: Lars(p, lr=1.0, weight_decay=0.0), lambda p: Lamb(p, lr=1.0, weight_decay=0.0, eps=1e-12)):
        ends = []
        for factor in (1.0, 1e4):
            parameter = nn.Parameter(torch.tensor(weights))
            take_steps(make([parameter]), [parameter], [gradient * factor])
            ends.append(parameter.detach().numpy())
        np.testing.assert_allclose(ends[0], ends[1], rtol=1e-6)


@pytest.mark.parametrize("make", [make_lars, make_lamb])
def test_weights_or_gradients_of_zero_have_a_ratio_of_one_and_stay_finite(make: Make) -> None:
    zero = nn.Parameter(torch.zeros(2, 3))
    still = nn.Parameter(torch.zeros(2, 2))
    unused = nn.Parameter(torch.ones(2, 2))
    optimizer = make([zero, still, unused])
    optimizer.param_groups[0]["lr"] = 0.5
    zero.grad, still.grad = torch.full((2, 3), 2.0), torch.zeros(2, 2)
    optimizer.step()
    moved = -0.5 * 2.0 if make is make_lars else -0.5 * 2.0 / (2.0 + 1e-4)
    torch.testing.assert_close(zero.detach(), torch.full((2, 3), moved))
    assert still.detach().equal(torch.zeros(2, 2))
    assert unused.detach().equal(torch.ones(2, 2)) and not optimizer.state[unused]


@pytest.mark.parametrize("make", [make_lars, make_lamb])
def test_a_saved_state_goes_on_bit_by_bit_in_another_optimizer(make: Make) -> None:
    random = np.random.default_rng(6)
    gradients = [random.normal(size=(len(RATES), 3, 3)), random.normal(size=(len(RATES), 3))]
    whole = [nn.Parameter(torch.ones(3, 3, dtype=torch.float64)), nn.Parameter(torch.ones(3, dtype=torch.float64))]
    optimizer = make([*whole])
    take_steps(optimizer, [*whole], [given[:2] for given in gradients])
    copies = [nn.Parameter(parameter.detach().clone()) for parameter in whole]
    resumed = make([*copies])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # loading does not copy
    for parameters, steps in ((whole, optimizer), (copies, resumed)):
        take_steps(steps, [*parameters], [given[2:] for given in gradients])
    assert all(a.equal(b) for a, b in zip(whole, copies, strict=True))


def test_a_closure_is_evaluated_with_gradients() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = Lars([parameter], lr=1.0)

    def loss() -> torch.Tensor:
        found = (parameter**2).sum()
        found.backward()
        return found

    assert optimizer.step(loss).item() == 4.0
    assert (parameter < 1).all()


def test_recipes_choose_them_by_name_with_their_options() -> None:
    given = {"name": "lars", "lr": 2.0, "momentum": 0.5, "weight_decay": 0.0, "eta": 0.02}
    lars = build_optimizer(resolve_values(VALUES | {"optim": given}).optim, nn.Linear(2, 2))
    assert isinstance(lars, Lars)
    assert lars.defaults.items() >= {key: value for key, value in given.items() if key != "name"}.items()
    config = resolve_values(VALUES | {"optim": {"name": "lamb", "lr": 0.1, "betas": [0.8, 0.9]}})
    lamb = build_optimizer(config.optim, nn.Linear(2, 2))
    assert isinstance(lamb, Lamb)
    assert tuple(lamb.defaults["betas"]) == (0.8, 0.9)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_keras_has_neither_and_says_so(name: str) -> None:
    values = VALUES | {"optim": {"name": name, "lr": 1.0}, "framework": "keras"}
    expected = f"optim.name={name!r} does not exist in framework=keras: expected sgd, adam, adamw. Choose one of them"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        check_framework(resolve_values(values))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: Lars(p, lr=1.0, eta=0.05),
        lambda p: Lamb(p, lr=0.05),
        lambda p: Muon(p, lr=0.05, ns_precision="bf16"),
    ],
    ids=["lars", "lamb", "muon"],
)
def test_they_learn_in_half_precision(make: Make) -> None:
    torch.manual_seed(7)
    inputs = torch.randn(64, 8)
    labels = (inputs[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = make(list(model.parameters()))
    losses = []
    for _ in range(30):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert all(value.dtype == torch.float32 for state in optimizer.state.values() for value in state.values())


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["lars", pytest.param("lamb", marks=pytest.mark.slow)])
def test_large_batches_learn_the_same_on_two_ranks_as_on_one_and_resume_exactly(name: str, tmp_path: Path) -> None:
    values = VALUES | {"optim": OPTIMIZERS[name]}
    alone = run_ranks(1, train, values | {"out": str(tmp_path / "alone")})[0]
    both = run_ranks(2, train, values | {"out": str(tmp_path / "both")})
    assert alone["results"]["valid_accuracy"] > 0.8
    assert both[0]["weights"] == both[1]["weights"]
    assert both[0]["weights"] == pytest.approx(alone["weights"], abs=1e-4)
    losses = read_losses(alone["folder"])
    checkpoint = alone["folder"] / "checkpoints" / "step-000009"
    resumed = run_ranks(1, train, values | {"out": str(tmp_path / "alone")}, str(checkpoint))[0]
    assert resumed["weights"] == alone["weights"]
    assert read_losses(resumed["folder"]) == losses
