"""Masks of dropout as functions of their position: statistics, parts of a whole, and the modules of torch."""

import itertools
import math

import pytest
import torch
from torch import nn

from tutti.parallel.dropout import DropoutMasks
from tutti.parallel.recompute import recompute

CPU = torch.device("cpu")
LAYERS = [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout]


def masked(
    *shape: int, p: float = 0.5, names: int = 1, step: int = 0, micro_batch: int = 0, seed: int = 0
) -> torch.Tensor:
    """Where each of several layers keeps the elements of a tensor, as zeros and ones."""
    model = nn.ModuleList(nn.Dropout(p) for _ in range(names))
    masks = DropoutMasks(model, CPU)
    masks.begin_pass(seed, step, micro_batch)
    return torch.stack([(layer(torch.ones(shape)) != 0).double() for layer in model]).squeeze(0)


def correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    """The correlation of two masks in units of its standard error, that of independent draws."""
    first, second = first.flatten() - first.mean(), second.flatten() - second.mean()
    return float((first @ second) / (first.norm() * second.norm()) * math.sqrt(len(first)))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(100_000,), (400, 500), (8, 64, 384), (1, 4, 32, 40, 40), (50_000, 4)])
def test_the_share_that_is_dropped_is_the_one_that_was_asked_for(p: float, shape: tuple[int, ...]) -> None:
    keeps = masked(*shape, p=p)
    error = math.sqrt(p * (1 - p) / keeps.numel())
    assert abs((1 - keeps.mean().item()) - p) < 4 * error
    for dim in range(keeps.ndim):  # also in every row, column, ... that has enough elements
        others = [each for each in range(keeps.ndim) if each != dim]
        count = keeps.numel() // keeps.shape[dim]
        if count * p * (1 - p) > 20:
            assert (1 - keeps.mean(others) - p).abs().max() < 6 * math.sqrt(p * (1 - p) / count)


def test_neighbours_are_independent_in_every_direction() -> None:
    keeps = masked(16, 48, 256)
    for shift in itertools.product((0, 1, 2), (-1, 0, 1, 7), (-1, 0, 1, 2, 64)):
        if any(shift):
            assert abs(correlation(keeps, keeps.roll(shift, (0, 1, 2)))) < 4.5, shift


def test_squares_of_four_neighbours_are_independent() -> None:
    keeps = masked(512, 512) * 2 - 1
    for rows, columns in itertools.product((1, 2, 5), (1, 2, 64)):
        product = keeps * keeps.roll(rows, 0) * keeps.roll(columns, 1) * keeps.roll((rows, columns), (0, 1))
        assert abs(product.mean().item()) * 512 < 5


def test_steps_micro_batches_seeds_and_layers_are_independent() -> None:
    base = masked(128, 256, names=4)
    for first, second in itertools.combinations(base, 2):
        assert abs(correlation(first, second)) < 4
    others = [masked(128, 256, step=step) for step in range(1, 20)]
    others += [masked(128, 256, micro_batch=each) for each in range(1, 10)]
    others += [masked(128, 256, seed=each) for each in range(1, 10)]
    first = masked(128, 256)
    assert all(abs(correlation(first, other)) < 4 for other in others)
    assert all(abs(correlation(one, next_one)) < 4 for one, next_one in itertools.pairwise(others))


def test_the_sum_of_a_layers_masks_over_steps_spreads_as_independent_draws_do() -> None:
    layer = nn.Dropout(0.5)
    masks, total, steps = DropoutMasks(layer, CPU), torch.zeros(64, 96), 400
    for step in range(steps):
        masks.begin_pass(0, step, 0)
        total += layer(torch.ones(64, 96)) / 2
    assert total.var().item() == pytest.approx(steps / 4, rel=0.08)


def test_the_same_key_gives_the_same_mask_and_torch_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    assert torch.equal(masked(30, 40, step=3), masked(30, 40, step=3))
    assert not torch.equal(masked(30, 40, step=3), masked(30, 40, step=4))
    assert torch.equal(state, torch.get_rng_state())


def test_masks_never_change() -> None:
    keeps = masked(4, 4, step=1, seed=42).long().flatten().tolist()
    assert keeps == [0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("cut", [0, 1, 2])
@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout2d])
def test_the_parts_of_a_tensor_have_the_parts_of_its_mask(cut: int, kind: type[nn.Module]) -> None:
    layer, whole = kind(0.5), torch.randn(6, 10, 12)
    masks = DropoutMasks(layer, CPU)
    masks.begin_pass(0, 0, 0)
    expected, found = layer(whole), []
    for start, end in ((0, 3), (3, 4), (4, whole.shape[cut])):
        offsets = [0, 0, 0]
        offsets[cut] = start
        masks.begin_pass(0, 0, 0)
        masks.locate = lambda name, shape, offsets=tuple(offsets): (whole.shape, offsets)
        found.append(layer(whole.narrow(cut, start, end - start)))
    assert torch.equal(torch.cat(found, cut), expected)


@pytest.mark.parametrize("kind", LAYERS)
def test_values_and_gradients_are_those_of_torch_for_the_mask(kind: type[nn.Module]) -> None:
    layer = kind(0.25)
    inputs = torch.randn(64, 32, 8, 8, 2, dtype=torch.float64).requires_grad_()
    inputs = inputs[..., 0] if kind in (nn.Dropout2d,) else inputs
    inputs = inputs.flatten(2) if kind is nn.Dropout1d else inputs
    theirs = layer(inputs)
    masks = DropoutMasks(layer, CPU)
    masks.begin_pass(0, 0, 0)
    ours = layer(inputs)
    assert isinstance(layer, kind)
    kept = _slope(layer, inputs, masks) != 0
    scale = {float(each) for each in _slope(kind(0.25), inputs, None).unique().round(decimals=9)} - {0.0}
    assert {float(each) for each in _slope(layer, inputs, masks)[kept].unique().round(decimals=9)} == scale
    if kind in (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout):
        by_channel = kept.flatten(2)
        assert (by_channel == by_channel[..., :1]).all()
    assert ours.shape == theirs.shape
    assert ours.mean().item() == pytest.approx(0, abs=0.15) and ours.var().item() == pytest.approx(
        theirs.var().item(), rel=0.1
    )
    assert torch.equal(layer.eval()(inputs), inputs)


def _slope(layer: nn.Module, inputs: torch.Tensor, masks: DropoutMasks | None) -> torch.Tensor:
    if masks:
        masks.begin_pass(0, 0, 0)
    leaf = inputs.detach().requires_grad_()
    layer(leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout2d])
def test_probabilities_of_none_and_all(kind: type[nn.Module]) -> None:
    inputs = torch.randn(4, 5, 6, 7)
    for p, expected in ((0.0, inputs), (1.0, torch.zeros_like(inputs))):
        layer = kind(p)
        DropoutMasks(layer, CPU).begin_pass(0, 0, 0)
        assert torch.equal(layer(inputs), expected)


def test_a_layer_that_is_called_twice_draws_twice_and_again_in_the_next_pass() -> None:
    layer, inputs = nn.Dropout(0.5), torch.ones(64, 64)
    masks = DropoutMasks(layer, CPU)
    masks.begin_pass(0, 0, 0)
    first, second = layer(inputs), layer(inputs)
    assert abs(correlation((first != 0).double(), (second != 0).double())) < 4
    masks.begin_pass(0, 0, 0)
    assert torch.equal(layer(inputs), first) and torch.equal(layer(inputs), second)


def test_in_place_changes_the_input() -> None:
    layer, inputs = nn.Dropout(0.5, inplace=True), torch.ones(100)
    DropoutMasks(layer, CPU).begin_pass(0, 0, 0)
    assert layer(inputs) is inputs and set(inputs.tolist()) == {0.0, 2.0}


class Twice(nn.Module):
    """A unit that uses one dropout layer two times."""

    def __init__(self, dropout: nn.Module) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(300, 300), dropout

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear(self.dropout(inputs).tanh()))


def test_activations_that_are_computed_again_have_the_same_masks() -> None:
    torch.manual_seed(0)
    shared = nn.Dropout(0.5)
    model, inputs = nn.Sequential(Twice(shared), Twice(shared)), torch.randn(200, 300)
    gradients = []
    for again in (False, True):
        if again:
            recompute(model)
        masks = DropoutMasks(model, CPU)
        masks.begin_pass(0, 5, 2)
        model.zero_grad()
        model(inputs).square().sum().backward()
        gradients.append([each.grad.clone() for each in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_a_compiled_model_draws_the_same_masks_without_compiling_again() -> None:
    layer, inputs = nn.Dropout(0.5), torch.randn(300, 400)
    masks, compiles = DropoutMasks(layer, CPU), []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        compiles.append(graph)
        return graph

    compiled = torch.compile(layer, backend=backend, dynamic=False, fullgraph=True)
    for step in range(4):
        masks.begin_pass(0, step, 0)
        expected = layer(inputs)
        masks.begin_pass(0, step, 0)
        assert torch.equal(compiled(inputs), expected)
    assert len(compiles) == 1
