"""The built-in networks: input shapes, output shapes and numbers of parameters."""

from itertools import pairwise
from math import prod

import pytest
import torch
from torch import nn

from tutti.models.small import Mlp, MnistKeras, MnistTorch, Quarters, SmallCnn


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def scores(model: nn.Module, *shape: int, samples: int = 3) -> torch.Tensor:
    return model(torch.randn(samples, *shape))


@pytest.mark.parametrize(("model", "count"), [(MnistTorch, 21_840), (MnistKeras, 1_199_882)])
def test_the_tutorials_networks_have_the_tutorials_parameters(model: type[nn.Module], count: int) -> None:
    net = model()
    assert parameters(net) == count
    assert scores(net, 1, 28, 28).shape == (3, 10)


@pytest.mark.parametrize("model", [MnistTorch, MnistKeras])
def test_the_tutorials_networks_give_scores_and_drop_out_while_training_only(model: type[nn.Module]) -> None:
    net, images = model(), torch.randn(4, 1, 28, 28)
    assert not torch.equal(net(images), net(images))
    net.eval()
    found = net(images)
    assert torch.equal(found, net(images))
    assert not torch.allclose(found.exp().sum(1), torch.ones(4))  # scores, not log-probabilities
    assert not torch.allclose(found.sum(1), torch.ones(4))


@pytest.mark.parametrize("hidden", [(), (5,), (128, 64), (3, 3, 3)])
@pytest.mark.parametrize("shape", [(7,), (1, 8, 8)])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_an_mlp_has_the_layers_it_is_asked_for(
    hidden: tuple[int, ...], shape: tuple[int, ...], batch_norm: bool
) -> None:
    net = Mlp(shape, 10, hidden, dropout=0.5, batch_norm=batch_norm)
    widths = [prod(shape), *hidden, 10]
    expected = sum(a * b + b for a, b in pairwise(widths))
    assert parameters(net) == expected + batch_norm * 2 * sum(hidden)
    assert scores(net, *shape).shape == (3, 10)
    assert sum(isinstance(layer, nn.Dropout) for layer in net.modules()) == len(hidden)
    assert sum(isinstance(layer, nn.ReLU) for layer in net.modules()) == len(hidden)


def test_an_mlp_without_dropout_is_the_same_each_time() -> None:
    net, samples = Mlp((4,), 2), torch.randn(3, 4)
    assert torch.equal(net(samples), net(samples))


@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, 64), (3, 9)])
@pytest.mark.parametrize("width", [4, 32])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_the_small_cnn_takes_images_of_any_size(channels: int, size: int, width: int, batch_norm: bool) -> None:
    net = SmallCnn((channels, size, size), 10, width=width, batch_norm=batch_norm)
    norms_or_biases = 10 * width if batch_norm else 5 * width
    convolutions = 9 * (channels * width + 2 * width * width + 4 * width * width)
    assert parameters(net) == convolutions + norms_or_biases + 8 * width * 10 + 10
    assert scores(net, channels, size, size).shape == (3, 10)


@pytest.mark.parametrize("model", [MnistTorch(), MnistKeras(), Mlp((1, 28, 28), 10), SmallCnn((1, 28, 28), 10)])
def test_every_parameter_gets_a_gradient(model: nn.Module) -> None:
    scores(model, 1, 28, 28, samples=16).square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("size", [(2, 2), (3, 4), (4, 4), (7, 5), (32, 33)])
def test_quarters_are_adaptive_pooling_to_two_by_two(size: tuple[int, int]) -> None:
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    expected = torch.nn.functional.adaptive_avg_pool2d(images, 2)
    torch.testing.assert_close(Quarters()(images), expected)
