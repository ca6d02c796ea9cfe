"""Convolutions that halve and double a volume: every form gives torch's numbers, forward and backward."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tutti.models import strided
from tutti.models.strided import Form, down, overlap_add, up, windows

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
DOWN_FORMS: list[Form] = ["convolution", "product"]
UP_FORMS: list[Form] = ["convolution", "product", "mixed"]
CASES: list[tuple[bool, Form]] = [*((False, form) for form in DOWN_FORMS), *((True, form) for form in UP_FORMS)]
CHANNELS = [(1, 1), (4, 3), (3, 5)]
LAYOUTS = [torch.contiguous_format, torch.channels_last_3d]


def made(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def given(doubles: bool, inputs: int, outputs: int, batch: int = 3) -> list[torch.Tensor]:
    """A volume of unequal sides with its weight and bias."""
    size = (2, 1, 3) if doubles else (4, 2, 6)
    weight = (inputs, outputs) if doubles else (outputs, inputs)
    return [made(1, batch, inputs, *size), made(2, *weight, 4, 4, 4), made(3, outputs)]


def computed(layer: Layer, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output and the gradients of all that goes in, for a gradient that differs from place to place."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = layer(*leaves)
    out.backward(made(4, *out.shape).to(out.dtype))
    grads = [leaf.grad for leaf in leaves]
    assert all(grad is not None for grad in grads)
    return [out.detach(), *(grad for grad in grads if grad is not None)]


def torchs(doubles: bool) -> Layer:
    function = F.conv_transpose3d if doubles else F.conv3d
    return lambda volume, weight, bias: function(volume, weight, bias, stride=2, padding=1)


def ours(doubles: bool, form: Form) -> Layer:
    function = up if doubles else down
    return lambda volume, weight, bias: function(volume, weight, bias, form)


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-12) -> None:
    for name, one, other in zip(("output", "volume", "weight", "bias"), found, expected, strict=True):
        torch.testing.assert_close(
            one, other, rtol=tolerance, atol=tolerance * float(other.abs().max()), msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("inputs", "outputs"), CHANNELS)
@pytest.mark.parametrize(("doubles", "form"), CASES)
def test_every_form_gives_the_numbers_of_torch(
    doubles: bool, form: Form, inputs: int, outputs: int, layout: torch.memory_format
) -> None:
    volume, weight, bias = given(doubles, inputs, outputs)
    expected = computed(torchs(doubles), [volume, weight, bias])
    laid_out = [tensor.to(memory_format=layout) for tensor in (volume, weight)]
    assert_equal(computed(ours(doubles, form), [*laid_out, bias]), expected)


@pytest.mark.parametrize(("doubles", "form"), CASES)
def test_a_volume_without_a_gradient_leaves_that_of_the_weight(doubles: bool, form: Form) -> None:
    """The first layer of a network sees data, which needs none."""
    volume, weight, bias = given(doubles, 4, 2)
    expected = computed(torchs(doubles), [volume, weight, bias])
    weight.requires_grad_()
    out = ours(doubles, form)(volume, weight, bias)
    out.backward(made(4, *out.shape))
    torch.testing.assert_close(weight.grad, expected[2], rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("size", [(2, 2, 2), (2, 4, 6)])
def test_overlap_add_is_the_transpose_of_windows(size: tuple[int, int, int]) -> None:
    volume = made(1, 3, *size, 2)
    cells = [side // 2 for side in size]
    rows = made(2, 3, *cells, 4, 4, 4, 2)
    assert windows(volume).shape == rows.shape
    assert overlap_add(rows).shape == volume.shape
    torch.testing.assert_close((windows(volume) * rows).sum(), (volume * overlap_add(rows)).sum(), rtol=1e-13, atol=0)


def test_a_window_holds_the_places_around_two_cells_and_zeros_outside() -> None:
    volume = torch.arange(1.0, 65).view(1, 4, 4, 4, 1)
    found = windows(volume)[0, ..., 0]
    assert torch.equal(found[1, 0, 1, :3, 1:, :3], volume[0, 1:, :3, 1:, 0])
    assert not found[1, 0, 1, 3].any() and not found[1, 0, 1, :, 0].any() and not found[1, 0, 1, :, :, 3].any()
    counted = overlap_add(torch.ones(1, 2, 2, 2, 4, 4, 4, 1))[0, ..., 0]
    assert counted[0, 0].tolist() == [1, 2, 2, 1] and counted[1, 1].tolist() == [4, 8, 8, 4]


@pytest.mark.parametrize(("doubles", "form"), CASES)
def test_autocast_is_heard(doubles: bool, form: Form) -> None:
    tensors = [tensor.float() for tensor in given(doubles, 4, 3)]
    expected = computed(ours(doubles, form), tensors)
    with torch.autocast("cpu", torch.bfloat16):
        out, *grads = computed(ours(doubles, form), tensors)
    assert out.dtype == torch.bfloat16
    assert [grad.dtype for grad in grads] == [torch.float32] * 3, "gradients have the precision of what they are for"
    assert_equal([out.float(), *grads], expected, tolerance=0.02)
    assert not torch.equal(out.float(), expected[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's compiler warns of torch
@pytest.mark.parametrize(
    ("backend", "forms"),
    [
        # The layouts that its assertions look at, which takes ten seconds; other forms would take a minute.
        pytest.param("inductor", ["convolution", "convolution"], marks=[pytest.mark.ranks, pytest.mark.slow]),
        ("aot_eager", ["convolution", "convolution", "product", "mixed"]),
    ],
)
def test_compiled_forms_give_the_same_numbers(backend: str, forms: list[Form]) -> None:
    """In one graph and channels-last format, where the compiler of torch assumes a wrong layout of gradients."""

    def chain(volume: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        bias = weights[0].new_ones(4)
        out = down(volume, weights[0], bias, "product" if "product" in forms else "convolution")
        out = down(out.relu(), weights[1], bias, forms[0])
        for weight, form in zip(weights[2:], forms[1:], strict=True):
            out = up(out.relu(), weight, bias, form)
        return out

    weights = [made(seed, 4, 4, 4, 4, 4) / 8 for seed in range(2, len(forms) + 3)]
    tensors = [t.to(memory_format=torch.channels_last_3d) for t in (made(1, 2, 4, 4, 4, 4), *weights)]
    compiled = torch.compile(chain, backend=backend, dynamic=False, fullgraph=True)
    for one, other in zip(computed(compiled, tensors), computed(chain, tensors), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("doubles", [False, True])
def test_sums_over_few_cells_as_products_give_the_numbers_of_torch(
    doubles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strided, "_reduces_to_few", lambda volume: True)  # on a GPU by the size of the volume
    volume, weight, bias = given(doubles, 4, 3)
    laid_out = [each.to(memory_format=torch.channels_last_3d) for each in (volume, weight)]

    def ours(volume: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.ops.tutti.strided_convolution(volume, weight, bias, 1.0, doubles)

    assert_equal(computed(ours, [*laid_out, bias]), computed(torchs(doubles), [*laid_out, bias]))
