"""Residual networks: published sizes and parameter names, stems and initialisation."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tutti.errors import ConfigError
from tutti.models.resnet import BasicBlock, Bottleneck, ResNet, ResNetSmall, count_layers, resnet18, resnet34, resnet50


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.fixture
def meta() -> torch.device:
    """Models without memory, where only their shapes are looked at."""
    return torch.device("meta")


@pytest.mark.parametrize(
    ("make", "layers", "count"),
    [(resnet18, 18, 11_689_512), (resnet34, 34, 21_797_672), (resnet50, 50, 25_557_032)],
)
def test_the_standard_networks_have_the_published_sizes(
    make: Callable[..., ResNet], layers: int, count: int, meta: torch.device
) -> None:
    with meta:
        model = make()
        assert (count_layers(model), parameters(model)) == (layers, count)
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
        fewer = make(num_classes=10)
        assert parameters(fewer) == count - 990 * (model.fc.in_features + 1)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            resnet18,
            {
                "conv1.weight": (64, 3, 7, 7),
                "bn1.running_mean": (64,),
                "layer1.0.conv1.weight": (64, 64, 3, 3),
                "layer1.1.bn2.weight": (64,),
                "layer2.0.conv1.weight": (128, 64, 3, 3),
                "layer2.0.downsample.0.weight": (128, 64, 1, 1),
                "layer2.0.downsample.1.num_batches_tracked": (),
                "layer4.1.conv2.weight": (512, 512, 3, 3),
                "fc.weight": (1000, 512),
                "fc.bias": (1000,),
            },
        ),
        (
            resnet50,
            {
                "conv1.weight": (64, 3, 7, 7),
                "layer1.0.conv1.weight": (64, 64, 1, 1),
                "layer1.0.downsample.0.weight": (256, 64, 1, 1),
                "layer1.2.conv1.weight": (64, 256, 1, 1),
                "layer2.0.conv2.weight": (128, 128, 3, 3),
                "layer3.5.conv3.weight": (1024, 256, 1, 1),
                "layer4.0.downsample.1.running_var": (2048,),
                "layer4.2.bn3.bias": (2048,),
                "fc.weight": (1000, 2048),
            },
        ),
    ],
)
def test_weights_are_named_as_torchvision_names_them(
    make: Callable[..., ResNet], expected: dict[str, tuple[int, ...]], meta: torch.device
) -> None:
    with meta:
        state = make().state_dict()
    assert {name: tuple(state[name].shape) for name in expected} == expected
    assert len(state) == {resnet18: 122, resnet50: 320}[make]  # torchvision's numbers of entries
    absent = {resnet18: ["layer1.0.downsample.0.weight"], resnet50: ["layer1.1.downsample.0.weight"]}[make]
    assert not state.keys() & {*absent, "conv1.bias"}


@pytest.mark.parametrize(
    ("stem", "size", "shapes"),
    [
        ("imagenet", 224, [(64, 112, 112), (64, 56, 56), (256, 56, 56), (512, 28, 28), (1024, 14, 14), (2048, 7, 7)]),
        ("small", 32, [(64, 32, 32), (64, 32, 32), (256, 32, 32), (512, 16, 16), (1024, 8, 8), (2048, 4, 4)]),
    ],
)
def test_the_small_stem_keeps_the_size_of_images(
    stem: str, size: int, shapes: list[tuple[int, ...]], meta: torch.device
) -> None:
    found = []
    with meta:
        model = resnet50(10, stem)  # pyright: ignore[reportArgumentType]
        for name in ("conv1", "maxpool", "layer1", "layer2", "layer3", "layer4"):
            module = model.get_submodule(name)
            module.register_forward_hook(lambda _, __, output: found.append(tuple(output.shape[1:])))
        assert model(torch.empty(2, 3, size, size)).shape == (2, 10)
    assert found == shapes


def test_an_unknown_stem_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"stem='tiny': expected 'imagenet' \(.*\) or 'small'"):
        resnet18(stem="tiny")  # pyright: ignore[reportArgumentType]


def test_the_stride_of_a_bottleneck_is_in_its_3x3_convolution() -> None:
    blocks = [block for block in resnet50().modules() if isinstance(block, Bottleneck)]
    strides = [(block.conv1.stride[0], block.conv2.stride[0], block.conv3.stride[0]) for block in blocks]
    assert strides == [(1, 2 if index in (3, 7, 13) else 1, 1) for index in range(16)]


@pytest.mark.parametrize("make", [resnet18, resnet50])
@pytest.mark.parametrize("zero", [True, False])
def test_blocks_begin_as_their_shortcuts_when_asked_to(make: Callable[..., ResNet], zero: bool) -> None:
    model = make(10, "small", zero_init_last=zero).eval()
    blocks = [block for block in model.modules() if isinstance(block, BasicBlock | Bottleneck)]
    for block in (blocks[1], blocks[-1]):
        images = torch.rand(1, block.conv1.in_channels, 8, 8)
        assert torch.equal(block(images), images) is zero


def test_convolutions_begin_with_the_variance_of_their_outputs() -> None:
    weight = resnet18().get_parameter("layer4.0.conv1.weight")
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)


def test_the_small_network_has_26_layers_of_equal_widths() -> None:
    model = ResNetSmall()
    assert count_layers(model) == 26
    blocks = [block for block in model.modules() if isinstance(block, Bottleneck)]
    widths = [(block.conv1.out_channels, block.conv2.out_channels, block.conv3.out_channels) for block in blocks]
    assert widths == [(width,) * 3 for width in (64, 64, 128, 128, 256, 256, 512, 512)]
    projects = [isinstance(block.downsample, nn.Sequential) for block in blocks]
    assert projects == 4 * [True, False]
    assert [block.conv2.stride[0] for block in blocks] == [1, 1, 2, 1, 2, 1, 2, 1]
    norms = 2 * 64 + sum(2 * (3 * 2 + 1) * width for width in (64, 128, 256, 512))
    convolutions = 9 * 3 * 64
    for inputs, width in ((64, 64), (64, 128), (128, 256), (256, 512)):
        convolutions += 2 * inputs * width + 3 * width * width + 2 * 9 * width * width
    assert parameters(model) == convolutions + norms + 512 * 10 + 10


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 9, 14)])
def test_the_small_network_takes_images_of_other_shapes(shape: tuple[int, int, int]) -> None:
    assert ResNetSmall(shape, 7)(torch.randn(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize(
    "make", [ResNetSmall, lambda: resnet18(10, "small", False), lambda: resnet50(10, "small", False)]
)
def test_every_parameter_gets_a_gradient(make: Callable[[], nn.Module]) -> None:
    model = make()
    model(torch.randn(4, 3, 32, 32)).square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("make", [ResNetSmall, lambda: resnet18(10, "small")])
def test_a_few_steps_learn_a_batch_by_heart(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, images, labels = make(), torch.randn(10, 3, 16, 16), torch.arange(10)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(15):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    assert nn.functional.cross_entropy(model(images), labels) < 0.5


@pytest.mark.parametrize("size", [(64, 96), (50, 64)])
def test_a_folded_stem_gives_the_same_outputs_and_gradients(size: tuple[int, int]) -> None:
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.manual_seed(0)
    model = resnet18(num_classes=5).double().eval()
    found = []
    for fold in (False, True):
        model.fold = fold
        model.zero_grad()
        outputs = model(images.to(memory_format=torch.channels_last))
        outputs.square().sum().backward()
        assert model.conv1.weight.grad is not None
        found.append((outputs.detach(), model.conv1.weight.grad.clone()))
    for plain, folded in zip(*found, strict=True):
        torch.testing.assert_close(folded, plain, rtol=1e-9, atol=1e-12 * float(plain.abs().max()))
