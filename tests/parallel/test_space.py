"""Samples split in space: parts compute what the whole does, with its gradients, or the model is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_jobs import run_ranks
from space_work import CONVOLUTIONS, Flows, compare, compare_compiled
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tutti.errors import ConfigError
from tutti.parallel.space import whole
from tutti.parallel.space.halo import SpaceGrid
from tutti.parallel.space.marks import Parts, mark
from tutti.parallel.space.mode import SpaceMode, check_loss, check_space
from tutti.parallel.space.windows import transposed
from tutti.train.metrics import L1Loss

TOLERANCE = 1e-12


@pytest.mark.parametrize("parts", [(2,), (4,), (2, 2)])
@pytest.mark.ranks
def test_every_operator_on_parts_is_that_on_the_whole(parts: tuple[int, ...]) -> None:
    ranks = 2 if parts == (2,) else 4
    for found in run_ranks(ranks, compare, parts):
        assert len(found) > len(CONVOLUTIONS)
        assert {name: values for name, values in found.items() if max(values) > TOLERANCE} == {}


@pytest.mark.slow
@pytest.mark.ranks
def test_a_compiled_model_is_one_graph_and_the_same() -> None:
    for found in run_ranks(2, compare_compiled):
        assert {name: values for name, values in found.items() if max(values) > TOLERANCE} == {}


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0]


def check(model: nn.Module, shape: tuple[int, ...], parts: tuple[int, ...], compiles: bool = False) -> SpaceMode:
    mode = SpaceMode(SpaceGrid(parts, (0,) * len(parts)))
    check_space(model, mode, shape, torch.device("cpu"), compiles)
    return mode


REFUSED: dict[str, tuple[nn.Module, tuple[int, ...], tuple[int, ...], str]] = {
    "flatten": (
        nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(128, 2)),
        (1, 8, 8),
        (2,),
        r"flatten in 1 Flatten \(test_space.py:\d+\) needs the whole sample: expected what can be computed on "
        r"parts of a sample with parallel.space=2. Gather before it with tutti.parallel.space.whole\(tensor\), or set "
        r"parallel.space=1",
    ),
    "view": (Flows(lambda x: x.view(len(x), -1)), (1, 8, 8), (2,), r"view in Flows .* to \[2, 64\] mixes"),
    "dense over cells": (nn.Linear(8, 2), (1, 4, 8), (1, 2), "linear in Linear"),
    "attention": (Flows(lambda x: F.scaled_dot_product_attention(x, x, x)), (1, 8, 4), (2,), "scaled_dot_product"),
    "unfold": (Flows(lambda x: F.unfold(x, 2)), (1, 8, 8), (2,), "unfold in Flows"),
    "sum of one cut": (Flows(lambda x: x.sum(2)), (1, 8, 8), (2, 2), "over some of the dimensions that are cut"),
    "cells by number": (Flows(lambda x: x[:, :, 0]), (1, 8, 8), (2,), "indexing in Flows .* along dimension 2"),
    "random numbers": (Flows(torch.rand_like), (1, 8, 8), (2,), "rand_like in"),
    "function": (Flows(lambda x: Scaled.apply(x) + 1), (1, 8, 8), (2,), "the autograd.Function Scaled in Flows"),
    "too small": (nn.Conv2d(1, 1, 7, padding=3), (1, 8, 8), (4,), "conv2d with kernel .* since its parts"),
    "uneven": (nn.Conv2d(1, 1, 5), (1, 8, 8), (2,), "samples of 8 x 8 cells: conv2d with kernel"),
    "odd": (nn.Conv2d(1, 1, 1), (1, 9, 8), (2,), "samples of 1 x 9 x 8: 9 cells do not split into 2"),
    "no space": (nn.Linear(8, 1), (8,), (2,), "expected channels and then 1 dimensions in space"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_whole_is_refused_with_its_place(name: str) -> None:
    model, shape, parts, said = REFUSED[name]
    with pytest.raises(ConfigError, match=said):
        check(model, shape, parts)


def test_a_compiler_that_would_not_show_an_operator_is_refused() -> None:
    circular = nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular")
    for model in (Flows(lambda x: x * x.shape[2]), circular, Flows(lambda x: torch.relu_(2 * x)), Flows(whole)):
        check(model, (1, 8, 8), (2,))
        with pytest.raises(
            ConfigError, match=r"speed.compile with parallel.space=2: (.shape|pad|torch.relu_|whole) in"
        ):
            check(model, (1, 8, 8), (2,), compiles=True)
    check(Flows(lambda x: (x * x.size(2)).relu_()), (1, 8, 8), (2,), compiles=True)


def test_outputs_of_global_pooling_are_whole() -> None:
    assert not check(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), (1, 8, 8), (2, 2)).gives_parts


def test_a_check_changes_no_buffer() -> None:
    norm = nn.BatchNorm2d(1)
    check(norm, (1, 8, 8), (2,))
    assert norm.num_batches_tracked == 0 and norm.running_mean == 0


def test_a_loss_must_be_a_mean_over_cells() -> None:
    for loss in (F.l1_loss, nn.MSELoss(), L1Loss(0.5), lambda outputs, targets: outputs.no_such_method()):
        check_loss(loss, (2, 2))
    with pytest.raises(ConfigError, match="expected a loss that is a mean over cells"):
        check_loss(lambda outputs, targets: (outputs - targets).norm(), (2,))


def test_the_place_of_a_part_in_the_whole_is_known() -> None:
    mode = SpaceMode(SpaceGrid((2, 1, 2), (1, 0, 1)))
    part = mark(torch.zeros(2, 1, 2, 6, 4), (2, 4))
    assert mode.locate(part) == ((2, 1, 4, 6, 8), (0, 0, 2, 0, 4))
    assert mode.locate(torch.zeros(2, 3)) == ((2, 3), (0, 0))


def test_whole_tensors_are_left_as_they_are() -> None:
    tensor = torch.ones(3)
    assert whole(tensor) is tensor


@pytest.mark.parametrize(("kernel", "padding"), [(4, 1), (6, 2), (3, 1), (5, 2)])
def test_a_transposed_convolution_of_a_part_is_padded_no_more_than_its_layer(kernel: int, padding: int) -> None:
    """With more, oneDNN writes beyond its tensors, in bf16 and float32."""
    given: list[list[int]] = []

    def record(*args: Any) -> torch.Tensor:
        given.append(args[4])
        return torch.conv_transpose2d(*args)

    for place in range(4):
        parts = Parts(SpaceGrid((4,), (place,)))
        with FakeTensorMode():
            part = mark(torch.empty(1, 2, 4, 16), (2,))
            stride = 2 - kernel % 2
            out = transposed(parts, record, part, torch.empty(2, 3, kernel, kernel), None, stride, padding)
        assert out.shape == (1, 3, 4 * stride, 16 * stride)
    assert len(given) == 4 and max(max(each) for each in given) <= padding
