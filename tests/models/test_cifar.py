"""The CIFAR-10 tutorials' networks: their layers, their sizes, and images of other shapes."""

import pytest
import torch
from torch import nn

from tutti.errors import ConfigError
from tutti.models.cifar import AlexnetSmall, Cnn


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def sizes(model: nn.Module, *shape: int) -> list[tuple[int, ...]]:
    """The shapes of what leaves convolutions, pools and dense layers, for one image."""
    found: list[tuple[int, ...]] = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.MaxPool2d | nn.Linear):
            module.register_forward_hook(lambda _, __, output: found.append(tuple(output.shape[1:])))
    model(torch.randn(1, *shape))
    return found


def test_the_cnn_has_the_tutorials_layers() -> None:
    convolutions = 9 * (3 * 16 + 16 * 32 + 32 * 64) + 16 + 32 + 64
    assert parameters(Cnn()) == convolutions + 64 * 4 * 4 * 128 + 128 + 128 * 10 + 10 == 156_074
    assert sizes(Cnn(), 3, 32, 32) == [
        *[(16, 32, 32), (16, 16, 16)],
        *[(32, 16, 16), (32, 8, 8)],
        *[(64, 8, 8), (64, 4, 4)],
        *[(128,), (10,)],
    ]


def test_the_small_alexnet_has_the_tutorials_layers() -> None:
    assert parameters(AlexnetSmall()) == 23_272_266
    assert sizes(AlexnetSmall(), 3, 32, 32) == [
        *[(64, 16, 16), (64, 8, 8)],
        *[(192, 8, 8), (192, 4, 4)],
        *[(384, 4, 4), (256, 4, 4), (256, 4, 4), (256, 2, 2)],
        *[(4096,), (4096,), (10,)],
    ]


@pytest.mark.parametrize(("model", "places"), [(Cnn(), 1), (AlexnetSmall(dense=32), 2)])
def test_they_drop_out_while_training_only(model: nn.Module, places: int) -> None:
    images = torch.randn(4, 3, 32, 32)
    assert sum(isinstance(layer, nn.Dropout) for layer in model.modules()) == places
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (4, 33, 50), (3, 16, 16)])
def test_they_take_images_of_other_shapes(shape: tuple[int, int, int]) -> None:
    for model in (Cnn(shape, 7, width=4), AlexnetSmall(shape, 7, dense=16)):
        assert model(torch.randn(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize(("model", "least"), [(Cnn, 8), (AlexnetSmall, 16)])
def test_images_that_are_too_small_are_refused(model: type[Cnn] | type[AlexnetSmall], least: int) -> None:
    with pytest.raises(ConfigError) as caught:
        model((3, least - 1, 32))
    assert str(caught.value) == (
        f"images of 3 x {least - 1} x 32 (channels first) are too small for this network: expected at least "
        f"{least} x {least} pixels. Choose another model, or larger images."
    )


@pytest.mark.parametrize("model", [Cnn(dropout=0), AlexnetSmall(dropout=0, dense=64)])
def test_every_parameter_gets_a_gradient(model: nn.Module) -> None:
    model(torch.randn(8, 3, 32, 32)).square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
