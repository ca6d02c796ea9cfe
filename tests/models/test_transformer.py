"""The transformers: shapes, numbers of parameters, what a token may see, and first weights by name."""

import pytest
import torch
from torch import nn

from tutti.errors import ConfigError
from tutti.models.transformer import GPT, ViT, gpt
from tutti.parallel.shard import find_units, init_parameters
from tutti.parallel.tensor import KINDS


def small_gpt(dropout: float = 0.0) -> GPT:
    return GPT(vocabulary=11, context=8, width=16, depth=2, heads=2, dropout=dropout)


def small_vit() -> ViT:
    return ViT((3, 8, 8), 5, patch=4, width=16, depth=2, heads=2)


def test_a_gpt_gives_scores_of_the_next_token_at_every_place() -> None:
    net = small_gpt()
    assert net(torch.randint(11, (3, 8))).shape == (3, 8, 11)
    assert net(torch.randint(11, (3, 5))).shape == (3, 5, 11)


def test_a_token_sees_those_before_it_alone() -> None:
    net, tokens = small_gpt(), torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = net(tokens), net(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(-1).all()


def test_a_gpt_takes_vocabulary_and_context_from_the_data_or_larger_ones() -> None:
    assert gpt((8,), 11, depth=1)(torch.randint(11, (1, 8))).shape == (1, 8, 11)
    assert gpt((8,), 11, vocabulary=20, context=9, depth=1)(torch.randint(20, (1, 9))).shape == (1, 9, 20)


def test_the_gpt_of_gpt2s_size_has_its_parameters() -> None:
    with torch.device("meta"):
        net = GPT(50_304, 1024, width=768, depth=12, heads=12)
    scores = 50_304 * 768  # not shared with the embedding
    assert sum(each.numel() for each in net.parameters()) - scores == 124_475_904


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 4, 12), (2, 8, 4, 4)])
def test_a_vit_takes_images_and_volumes(shape: tuple[int, ...]) -> None:
    net = ViT(shape, 5, patch=4, width=16, depth=1, heads=2)
    assert net(torch.randn(2, *shape)).shape == (2, 5)


@pytest.mark.parametrize(
    ("net", "inputs"), [(small_gpt(), torch.randint(11, (4, 8))), (small_vit(), torch.randn(4, 3, 8, 8))]
)
def test_a_transformer_is_the_chain_of_its_stages(net: nn.Module, inputs: torch.Tensor) -> None:
    hidden = inputs
    for name in net.stages():
        hidden = net.get_submodule(name)(hidden)
    assert torch.equal(hidden, net(inputs))
    held = [parameter for name in net.stages() for parameter in net.get_submodule(name).parameters()]
    assert [id(each) for each in held] == [id(each) for each in net.parameters()]
    assert find_units(net) == list(net.blocks)


@pytest.mark.parametrize("net", [small_gpt(), small_vit()])
def test_every_parameter_gets_a_gradient(net: nn.Module) -> None:
    inputs = torch.randint(11, (4, 8)) if isinstance(net, GPT) else torch.randn(4, 3, 8, 8)
    net(inputs).square().mean().backward()
    assert all(each.grad is not None and each.grad.any() for each in net.parameters())


def test_the_plan_for_tensor_parallel_names_linear_layers_and_the_table_of_tokens() -> None:
    for net in (small_gpt(), small_vit()):
        for name, kind in net.tensor_plan().items():
            assert isinstance(net.get_submodule(name), nn.Linear | nn.Embedding)
            assert kind in KINDS


def test_first_weights_depend_on_the_seed_and_the_name_alone() -> None:
    first, second, other = small_gpt(), GPT(11, 8, width=16, depth=3, heads=2), small_gpt()
    for net, seed in ((first, 7), (second, 7), (other, 8)):
        init_parameters(net, seed)
    deeper, others = dict(second.named_parameters()), dict(other.named_parameters())
    shared = {name: value for name, value in first.named_parameters() if "out" not in name and "down" not in name}
    assert all(torch.equal(value, deeper[name]) for name, value in shared.items())
    random = {name for name, value in first.named_parameters() if not torch.equal(value, others[name])}
    assert random == {name for name, _ in first.named_parameters() if "bias" not in name and "norm" not in name}
    assert not torch.equal(deeper["blocks.0.mlp.up.weight"], deeper["blocks.1.mlp.up.weight"])


def test_first_weights_are_small_and_the_ends_of_branches_smaller() -> None:
    net = GPT(50, 64, width=64, depth=8, heads=2)
    init_parameters(net, 0)
    assert net.blocks[0].mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert net.blocks[0].mlp.down.weight.std().item() == pytest.approx(0.005, rel=0.03)
    loss = nn.functional.cross_entropy(net(torch.randint(50, (4, 64))).flatten(0, 1), torch.randint(50, (256,)))
    assert loss.item() == pytest.approx(torch.tensor(50.0).log().item(), abs=0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: GPT(4, 4, width=10, heads=4),
            r"model\.width=10: expected a multiple of model\.heads=4\. Set model\.width=8\.",
        ),
        (
            lambda: gpt((3, 8, 8), 10),
            r"model\.name='gpt' with samples of shape \(3, 8, 8\): expected sequences of tokens",
        ),
        (lambda: gpt((8,), 10, vocabulary=9), r"model\.vocabulary=9: expected at least the 10 of the data"),
        (lambda: gpt((8,), 10, context=4), r"model\.context=4: expected at least the 8 of the data"),
        (lambda: ViT((3, 9, 8), 10), r"samples of shape \(3, 9, 8\) and model\.patch=4: expected images or volumes"),
        (lambda: ViT((64,), 10), r"samples of shape \(64,\) and model\.patch=4: expected images or volumes"),
    ],
)
def test_what_does_not_fit_is_refused(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
