"""Muon: its formula, which parameters it updates, and what updates the others."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

from tutti.config.framework import check_framework
from tutti.config.load import resolve, resolve_values
from tutti.config.options import AdamWOptions
from tutti.errors import ConfigError
from tutti.models.cifar_fast import CifarFast
from tutti.models.small import Mlp
from tutti.models.transformer import GPT
from tutti.optim import muon
from tutti.optim.muon import Muon, find_hidden, orthogonalize
from tutti.optim.optimizers import build_optimizer

VALUES: dict[str, Any] = {
    "recipe": "muon",
    "data": {"name": "digits"},
    "model": {"name": "mlp"},
    "batch": {"global": 64},
    "epochs": 1,
}
RATES = (0.1, 0.05, 0.2)


def configure(**optim: Any) -> Any:
    return resolve_values(VALUES | {"optim": {"name": "muon", "lr": 0.02, **optim}}).optim


def take_steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], seed: int = 1) -> None:
    """A step for each rate, with the same random gradients for a seed."""
    random = torch.Generator().manual_seed(seed)
    for lr in RATES:
        for group in optimizer.param_groups:
            group["lr"] = lr
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=random)
        optimizer.step()


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (7, 7)], ids=["wide", "tall", "square"])
@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False, "momentum": 0.6}, {"weight_decay": 0.1, "ns_steps": 3}], ids=str
)
@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
def test_matrices_move_as_in_torch(shape: tuple[int, int], options: dict[str, Any], rule: str) -> None:
    first = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ours, theirs = nn.Parameter(first.clone()), nn.Parameter(first.clone())
    take_steps(Muon([ours], lr=1.0, ns_precision="bf16", adjust_lr=rule, **options), [ours])
    take_steps(torch.optim.Muon([theirs], lr=1.0, adjust_lr_fn=rule, **({"weight_decay": 0.0} | options)), [theirs])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3 * max(RATES))


def test_singular_values_come_near_one() -> None:
    matrices = torch.randn(3, 30, 20, generator=torch.Generator().manual_seed(2))
    found = orthogonalize(matrices, 5)
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    exact = left @ right
    assert torch.linalg.svdvals(found).sub(1).abs().max() < 0.35
    assert (found * exact).sum() / exact.square().sum() > 0.85
    assert orthogonalize(torch.zeros(1, 3, 4), 5).equal(torch.zeros(1, 3, 4))


def test_kernels_are_matrices_and_a_vector_is_one_column() -> None:
    kernel, bias = nn.Parameter(torch.zeros(6, 2, 3, 3)), nn.Parameter(torch.zeros(5))
    flat, column = nn.Parameter(torch.zeros(6, 18)), nn.Parameter(torch.zeros(5, 1))
    take_steps(Muon([kernel, bias], lr=1.0), [kernel, bias])
    take_steps(Muon([flat, column], lr=1.0), [flat, column])
    torch.testing.assert_close(kernel.flatten(1), flat)
    torch.testing.assert_close(bias, column.flatten())
    channels_last = nn.Parameter(torch.zeros(6, 2, 3, 3).to(memory_format=torch.channels_last))
    take_steps(Muon([channels_last], lr=1.0), [channels_last])
    other = nn.Parameter(torch.zeros(6, 2, 3, 3))
    take_steps(Muon([other], lr=1.0), [other])
    torch.testing.assert_close(channels_last, other)


def test_matrices_of_one_shape_move_as_each_alone() -> None:
    first = torch.randn(3, 8, 9, generator=torch.Generator().manual_seed(3))
    together = [nn.Parameter(each.clone()) for each in first]
    take_steps(Muon(together, lr=1.0), together)
    random = torch.Generator().manual_seed(1)
    gradients = [[torch.randn(8, 9, generator=random) for _ in first] for _ in RATES]
    for index, start in enumerate(first):
        alone = nn.Parameter(start.clone())
        optimizer = Muon([alone], lr=1.0)
        for lr, given in zip(RATES, gradients, strict=True):
            optimizer.param_groups[0]["lr"], alone.grad = lr, given[index]
            optimizer.step()
        torch.testing.assert_close(together[index], alone)


def test_normalized_weights_have_one_norm_before_their_step() -> None:
    weight, bias = nn.Parameter(torch.full((4, 9), 7.0)), nn.Parameter(torch.full((3,), 7.0))
    optimizer = Muon([weight, bias], lr=1e-6, normalize=True)
    weight.grad, bias.grad = torch.ones(4, 9), torch.ones(3)
    optimizer.step()
    assert weight.norm().item() == pytest.approx(2.0, abs=1e-4)
    assert bias[0].item() == pytest.approx(7.0, abs=1e-4)
    optimizer.param_groups[0]["lr"] = 0.0  # as where a checkpoint makes an empty state
    with torch.no_grad():
        weight.fill_(5.0)
    optimizer.step()
    assert weight.equal(torch.full((4, 9), 5.0))


@pytest.mark.parametrize("others", ["sgd", "adam", "adamw"])
def test_the_rate_of_others_changes_in_proportion(others: str) -> None:
    torch.manual_seed(4)
    model = Mlp((4,), 3, hidden=(8, 8))
    given = {"name": others, "lr": 0.004, "weight_decay": 0.1}
    optimizer = build_optimizer(configure(others=given), model)
    names = [name for name, _ in model.named_parameters() if name != "layers.3.weight"]
    twin = copy.deepcopy(model)
    apart = [twin.get_parameter(name) for name in names]
    plain = build_optimizer(resolve_values(VALUES | {"optim": given}).optim, nn.ParameterList(apart))
    ratio = given["lr"] / 0.02
    random = torch.Generator().manual_seed(1)
    for lr in RATES:
        optimizer.param_groups[0]["lr"], plain.param_groups[0]["lr"] = lr, lr * ratio
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=random)
            twin.get_parameter(name).grad = parameter.grad.clone()
        optimizer.step()
        plain.step()
    assert all(model.get_parameter(name).equal(twin.get_parameter(name)) for name in names)
    assert not model.get_parameter("layers.3.weight").equal(twin.get_parameter("layers.3.weight"))


def test_one_state_holds_all_and_goes_on_bit_by_bit() -> None:
    torch.manual_seed(5)
    whole = Mlp((4,), 3, hidden=(8, 8))
    config = configure(others={"name": "adamw", "lr": 0.01})
    optimizer = build_optimizer(config, whole)
    assert len(optimizer.param_groups) == 1
    take_steps(optimizer, list(whole.parameters()))
    assert len(optimizer.state) == len(list(whole.parameters()))
    resumed = copy.deepcopy(whole)
    other = build_optimizer(config, resumed)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for model, steps in ((whole, optimizer), (resumed, other)):
        take_steps(steps, list(model.parameters()), seed=2)
    assert all(a.equal(b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_hidden_weights_are_between_the_first_and_the_last_layer() -> None:
    assert find_hidden(Mlp((4,), 3, hidden=(8, 8))) == {"layers.3.weight"}
    transformer = find_hidden(GPT(vocabulary=11, context=8, width=8, depth=1, heads=2))
    assert transformer == {
        f"blocks.0.{name}.weight" for name in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    }
    convolutions = find_hidden(CifarFast(widths=(4, 4, 4)))
    assert convolutions == {f"blocks.{index}.{name}.weight" for index in range(3) for name in ("first", "second")}


class Tied(nn.Module):
    """A model whose scores have the weights of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.scores = nn.Linear(4, 5)
        self.scores.weight = self.embedding.weight
        self.extra = nn.Linear(4, 5)


class Named(Tied):
    """A model that names its hidden weights."""

    names: tuple[str, ...] = ("extra.weight",)

    def hidden_weights(self) -> list[str]:
        return list(self.names)


def test_models_name_their_hidden_weights_and_shared_ones_are_not_hidden() -> None:
    assert find_hidden(Tied()) == {"attention.in_proj_weight", "attention.out_proj.weight"}
    assert find_hidden(Named()) == {"extra.weight"}
    wrong = Named()
    wrong.names = ("extra.bias",)
    expected = re.escape("Named.hidden_weights() names 'extra.bias', of 1 dimension(s): expected parameters of Named")
    with pytest.raises(ConfigError, match=expected):
        find_hidden(wrong)
    wrong.names = ("extra.wait",)
    with pytest.raises(ConfigError, match=re.escape("'extra.wait', which is no parameter")):
        find_hidden(wrong)


@pytest.mark.parametrize(
    ("model", "optim", "expected"),
    [
        (
            Mlp((4,), 3, hidden=(8,)),
            {"others": {"name": "sgd", "lr": 0.1}},
            "optim.name='muon' with Mlp, which has no matrix for it: expected a trained linear layer or convolution "
            "between its first and its last layer",
        ),
        (
            nn.LayerNorm(4),
            {},
            "optim.name='muon' with LayerNorm, which has no matrix for it: expected a trained weight",
        ),
        (
            Mlp((4,), 3),
            {"others": {"name": "sgd", "lr": 0.1, "nesterov": True}},
            "optim.others: SGD failed with ValueError: Nesterov momentum requires a momentum",
        ),
    ],
    ids=["no hidden layer", "no matrix", "options of others"],
)
def test_what_muon_cannot_train_is_refused(model: nn.Module, optim: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        build_optimizer(configure(**optim), model)


@pytest.mark.parametrize(
    ("optim", "expected"),
    [
        (
            {"others": {"name": "sgdd", "lr": 1.0}},
            "optim.others.name='sgdd' (fit()): expected one of sgd, adam, adamw.",
        ),
        (
            {"others": {"name": "lars", "lr": 1.0}},
            "optim.others.name='lars' (fit()): expected one of sgd, adam, adamw.",
        ),
        ({"others": "sgd"}, "optim.others='sgd' (fit()): expected a group of keys."),
        ({"others": {"name": "adam"}}, "optim.others.lr is missing: set it in the recipe"),
        ({"others": {"name": "adam", "lr": -1.0}}, "optim.others.lr=-1.0 (fit()): expected a number greater than 0."),
        ({"others": {"name": "adam", "lr": 1.0, "bettas": 1}}, "unknown key 'optim.others.bettas' (fit()): expected"),
        ({"others": {"name": "adam", "lr": 1.0, "clip_norm": 2.0}}, "expected none. Set optim.clip_norm=2"),
        ({"momentum": -0.5}, "optim.momentum=-0.5 (fit()): expected a number greater than or equal to 0."),
        ({"ns_steps": 0}, "optim.ns_steps=0 (fit()): expected a number greater than or equal to 1."),
        ({"adjust_lr": "adamw"}, "optim.adjust_lr='adamw' (fit()): expected 'original' or 'match_rms_adamw'."),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_wrong_options_are_named_with_their_fix(optim: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        configure(**optim)


def test_another_optimizer_of_others_drops_the_options_of_the_first() -> None:
    config = resolve("cifar10/muon", ["optim.others={name: adamw, lr: 0.001}", "optim.momentum=0.9"]).config.optim
    assert config.options() == configure(lr=0.24, momentum=0.9, ns_steps=3, normalize=True).options()
    assert config.model_dump()["others"] == AdamWOptions(lr=0.001).model_dump()
    assert resolve("cifar10/muon", ["optim.others=null"]).config.optim.model_dump()["others"] is None


def test_keras_has_it_not_and_says_so() -> None:
    values = VALUES | {"optim": {"name": "muon", "lr": 1.0}, "framework": "keras"}
    expected = re.escape("optim.name='muon' does not exist in framework=keras: expected sgd, adam, adamw.")
    with pytest.raises(ConfigError, match=expected):
        check_framework(resolve_values(values))


@pytest.mark.parametrize("normalize", [False, True])
def test_compiled_updates_are_those_of_uncompiled_ones_at_every_rate(normalize: bool) -> None:
    shapes = ((16, 8, 3, 3), (32, 16, 3, 3), (32, 16, 3, 3))
    compiled = torch.compile(muon._move, backend="aot_eager", dynamic=False, fullgraph=True)
    found = []
    for move in (muon._move, compiled):
        generator = torch.Generator().manual_seed(1)
        weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        optimizer = Muon(weights, 0.24, momentum=0.6, ns_steps=3, normalize=normalize, weight_decay=0.01)
        optimizer._move = move
        for lr in (0.24, 0.1, 0.0):
            optimizer.param_groups[0]["lr"] = lr
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()
        found.append(weights)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
