"""Triton kernels of strided convolutions give torch's numbers: on a GPU, or interpreted where there is none."""

import pytest
import torch
import torch.nn.functional as F

from tutti.models import strided
from tutti.models.kernels import convolution, operators

ON_GPU = torch.cuda.is_available()
if ON_GPU and torch.cuda.get_device_capability()[0] < 9:
    pytest.skip("the kernels need a GPU with TMA", allow_module_level=True)

DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32  # triton's interpreter multiplies the bits of bfloat16
TOLERANCE = 0.01 if ON_GPU else 1e-5
SHAPES = [  # batch, the sides of the small volume, channels of the large one and of the small one
    (3, (2, 1, 4), 64, 128),
    (1, (2, 2, 2), 128, 128),
]


def made(seed: int, *shape: int) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    layout = torch.channels_last_3d if len(shape) == 5 else torch.preserve_format
    return values.to(DEVICE, DTYPE, memory_format=layout)


def volumes(batch: int, sides: tuple[int, ...], channels: int, out: int) -> tuple[torch.Tensor, ...]:
    """A large volume, a small one, and a weight between them."""
    large = made(1, batch, channels, *(2 * side for side in sides))
    return large, made(2, batch, out, *sides), made(3, out, channels, 4, 4, 4) / 64


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape and found.dtype == DTYPE
    assert found.is_contiguous(memory_format=torch.channels_last_3d)
    assert (found.double() - expected).norm() <= TOLERANCE * expected.norm()
    assert (found.double() - expected).abs().max() <= 4 * TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("shape", SHAPES)
def test_gather_is_a_convolution_with_its_activation(shape: tuple) -> None:
    large, _, weight = volumes(*shape)
    bias = made(4, len(weight))
    expected = F.leaky_relu(F.conv3d(large.double(), weight.double(), bias.double(), stride=2, padding=1))
    assert_close(torch.ops.tutti.conv_gather(large, weight, bias, 0.01), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_scatter_is_a_transposed_convolution_with_its_activation(shape: tuple) -> None:
    _, small, weight = volumes(*shape)
    bias = made(4, weight.shape[1])
    expected = F.relu(F.conv_transpose3d(small.double(), weight.double(), bias.double(), stride=2, padding=1))
    assert_close(torch.ops.tutti.conv_scatter(small, weight, bias, 0.0), expected)


@pytest.mark.parametrize("splits", [1, 3])
def test_weight_sums_over_all_positions_in_any_number_of_parts(splits: int) -> None:
    large, small, weight = volumes(*SHAPES[0])
    expected = torch.nn.grad.conv3d_weight(large.double(), weight.shape, small.double(), stride=2, padding=1)
    inner = [tensor.permute(0, 2, 3, 4, 1) for tensor in (small, large)]
    tiling = convolution.Tiling(64, 16, splits=splits)
    assert_close(convolution.weight_gradient(*inner, tiling).permute(0, 4, 1, 2, 3), expected)


@pytest.mark.parametrize(
    "products",
    [
        {"gather", "scatter", "weight"},
        pytest.param({"weight"}, marks=pytest.mark.slow),
        pytest.param({"scatter"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("slope", [1.0, 0.1])
@pytest.mark.parametrize("form", ["down", "convolution", "mixed"])
def test_a_layer_takes_the_products_of_kernels(
    form: str, slope: float, products: set, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, small, weight = volumes(*SHAPES[0])
    volume = large if form == "down" else small
    # Results are far from zero, where rounding would decide which side of the activation they are on.
    bias = 4 * made(4, len(weight) if form == "down" else weight.shape[1]).sign()

    def computed(takes: set) -> list[torch.Tensor]:
        monkeypatch.setattr(strided, "_kernel_products", lambda volume, weight: takes)
        leaves = [tensor.detach().requires_grad_() for tensor in (volume, weight, bias)]
        out = strided.down(*leaves, "convolution", slope) if form == "down" else strided.up(*leaves, form, slope)
        out.backward(small if form == "down" else large)
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    monkeypatch.setattr(strided, "_reduces_to_few", lambda volume: False)  # these volumes are small
    calls = []
    for name in ("gather", "scatter", "weight_gradient"):
        kernel = getattr(operators, name)
        monkeypatch.setattr(operators, name, lambda *given, k=kernel, n=name: (calls.append(n), k(*given))[1])
    for found, expected in zip(computed(products), computed(set()), strict=True):
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE * float(expected.abs().max()))
    used = {"gather", "scatter", "weight"} & products
    if form == "mixed" and len(products) < 3:
        used &= {"scatter"}
    assert sorted(calls) == sorted({"weight": "weight_gradient"}.get(name, name) for name in used)


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_few_channels_are_folded(needs_gradient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    large, small, weight = volumes(3, (2, 1, 4), 4, 64)
    monkeypatch.setattr(operators, "_PROCESSORS", 1)
    bias = made(4, 64)
    expected = F.leaky_relu(F.conv3d(large.double(), weight.double(), bias.double(), stride=2, padding=1), 0.1)

    def computed(folds: bool) -> list[torch.Tensor]:
        monkeypatch.setattr(strided, "_folds", lambda volume, weight: folds)
        leaves = [tensor.detach().requires_grad_() for tensor in (large, weight, bias)]
        leaves[0].requires_grad_(needs_gradient)
        out = strided.down(*leaves, "product", 0.1)
        assert_close(out.detach(), expected)
        out.backward(small)
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    for found, other in zip(computed(True), computed(False), strict=True):
        torch.testing.assert_close(found, other, rtol=TOLERANCE, atol=TOLERANCE * float(other.abs().max()))
