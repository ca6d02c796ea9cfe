"""Layers split over ranks: what is refused, and the same run as on one rank."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_runs import OneRank, assert_same
from parallel_work import split_gradients
from rank_jobs import run_ranks, train
from torch import nn

from tutti.config.layout import make_layout
from tutti.config.load import resolve_values
from tutti.config.schema import ParallelConfig
from tutti.errors import ConfigError
from tutti.models.transformer import GPT, ViT
from tutti.parallel.dropout import PartsByShape
from tutti.parallel.tensor import check_tensor

VALUES: dict[str, Any] = {
    "recipe": "tensor",
    "data": {"name": "text", "context": 8, "characters": 2900},
    "model": {"name": "gpt", "width": 32, "depth": 2, "heads": 4, "dropout": 0.1},
    "optim": {"name": "adam", "lr": 3e-3, "clip_norm": 0.5},
    "batch": {"global": 16, "micro": 8, "eval": 16},
    "epochs": 1,
    "max_steps": 20,
    "checkpoint": {"every_steps": 7, "every_epochs": None},
    "log": {"every_steps": 1, "ledger": True, "tensorboard": False},
}


class Broken(nn.Module):
    """A model with a plan that is wrong."""

    def __init__(self, plan: dict[str, str], is_shared: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self._plan = plan
        if is_shared:
            self.second.weight = self.first.weight

    def tensor_plan(self) -> dict[str, str]:
        return self._plan


@pytest.mark.parametrize(
    ("make", "degree", "said"),
    [
        (lambda: nn.Conv2d(1, 1, 3), 2, "parallel.tensor with Conv2d: expected a model with the method tensor_plan()"),
        (
            lambda: GPT(8, 4, width=12, heads=3, depth=1),
            2,
            "parallel.tensor=2 with 3 heads: expected a divisor of 3, since a rank has whole heads. "
            "Set parallel.tensor=1 or 3, or model.heads to a multiple of 2.",
        ),
        (lambda: ViT((1, 4, 4), 3, 2, width=12, heads=3, depth=1), 4, "parallel.tensor=4 with 3 heads"),
        (
            lambda: GPT(9, 4, width=8, heads=2, depth=1),
            2,
            "parallel.tensor=2 with embedding.tokens, which has 9 rows: expected a divisor of 9. "
            "Set parallel.tensor=1 or 3 or 9, or change the size of the layer to a multiple of 2.",
        ),
        (lambda: Broken({"first": "columns"}), 3, "parallel.tensor=3 with first, which has 4 columns"),
        (lambda: Broken({"third": "rows"}), 2, "Broken.tensor_plan() names 'third': expected the name of a module"),
        (
            lambda: Broken({"norm": "rows"}),
            2,
            "names norm, of type LayerNorm: expected an nn.Linear or an nn.Embedding",
        ),
        (
            lambda: Broken({"first": "halves"}),
            2,
            "has 'halves' for first: expected one of 'columns', 'gathered columns', ",
        ),
        (lambda: Broken({"first": "rows"}, is_shared=True), 2, "second.weight and first.weight are one parameter"),
    ],
)
def test_layers_that_cannot_be_split_are_refused(make: Callable[[], nn.Module], degree: int, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_tensor(make(), degree)


@pytest.mark.parametrize("other", [{"stages": 2}, {"space": 2}])
def test_kinds_that_do_not_go_together_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"parallel\..*: expected one of them"):
        resolve_values(VALUES | {"parallel": {"tensor": 2} | other})


@pytest.mark.parametrize("degree", [0, -1, 1.5, "all"])
def test_what_is_no_degree_is_refused(degree: Any) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.tensor"):
        resolve_values(VALUES | {"parallel": {"tensor": degree}})


def test_ranks_that_share_a_layer_are_on_one_host() -> None:
    assert make_layout(ParallelConfig(tensor=4), 8, local_size=4).tensor == 4
    with pytest.raises(ConfigError) as error:
        make_layout(ParallelConfig(tensor=4), 12, local_size=6)
    assert str(error.value) == (
        "parallel.tensor=4 with 6 ranks on a host: expected a divisor of 6, since the ranks that share a layer are on "
        "one host. Set parallel.tensor=2, or start a multiple of 4 ranks on each host."
    )


def test_parts_are_found_by_their_shapes() -> None:
    locate = PartsByShape({"a": {(8, 6, 32)}, "b": {(8, 4, 6, 6), (8, 6)}}, 2, 1)
    assert locate("a", (8, 6, 32)) == ((8, 6, 32), (0, 0, 0))
    assert locate("a", (8, 6, 16)) == ((8, 6, 32), (0, 0, 16))
    assert locate("b", (8, 2, 6, 6)) == ((8, 4, 6, 6), (0, 2, 0, 0))
    assert locate("b", (8, 3)) == ((8, 6), (0, 3))
    for shape in ((4, 6, 32), (8, 3, 16)):
        with pytest.raises(RuntimeError, match="the dropout layer a has an input of shape"):
            locate("a", shape)


@pytest.mark.ranks
def test_gradients_are_those_of_the_whole_model_on_every_rank() -> None:
    answers = run_ranks(2, split_gradients)
    expected = answers[0]["expected"]
    for answer in answers:
        assert answer["whole"].keys() == expected.keys()
        for name, gradient in answer["whole"].items():
            assert torch.allclose(gradient, expected[name], rtol=0, atol=1e-14), name
    first, second = (answer["own"] for answer in answers)
    assert {"first.weight", "blocks.0.scale", "blocks.1.out.bias"} <= first.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    whole = sum(each.nbytes for each in expected.values())
    assert all(answer["bytes"] < 0.7 * whole for answer in answers), "no rank keeps what others hold"


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    return OneRank(VALUES, tmp_path_factory.mktemp("one"))


RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "2": (2, {"tensor": 2, "recompute": "layers"}),
    "4": (4, {"tensor": 4}),
    "2 data x 2": (4, {"tensor": 2}),
    "2 data x 2, sharded": (4, {"tensor": 2, "shard": "all"}),
}
LONG = ("4", "2 data x 2")  # what they show is shown by the others too, on fewer ranks or with more


@pytest.mark.ranks
@pytest.mark.parametrize("run", [pytest.param(run, marks=[pytest.mark.slow] if run in LONG else []) for run in RUNS])
def test_split_layers_train_as_one_rank(one_rank: OneRank, tmp_path: Path, run: str) -> None:
    ranks, parallel = RUNS[run]
    answers = run_ranks(ranks, train, VALUES | {"parallel": parallel, "out": str(tmp_path)})
    one = one_rank.run()
    assert_same(answers[0]["folder"], one["folder"])
    held, shards = [len(answer["weights"]) for answer in answers], 2 if "shard" in parallel else 1
    parts = parallel["tensor"] * shards
    assert max(held) < 1.15 * len(one["weights"]) / parts, "norms and places are on every rank"


@pytest.mark.ranks
@pytest.mark.parametrize("optim", [{"name": "lamb", "lr": 0.01}, {"name": "sgd", "lr": 0.1}], ids=["lamb", "sgd"])
def test_dropout_and_parameters_among_split_layers(one_rank: OneRank, tmp_path: Path, optim: dict[str, Any]) -> None:
    values = {
        "data": {"name": "digits", "shift": 1},
        "model": {"name": "parallel_work:SplitNet"},
        "optim": optim,
        "max_steps": 8,
    }
    parallel = {"tensor": 2, "recompute": "layers"}
    folder = run_ranks(2, train, VALUES | values | {"parallel": parallel, "out": str(tmp_path)})[0]["folder"]
    assert_same(folder, one_rank.run(**values)["folder"])


@pytest.mark.ranks
def test_split_layers_in_half_precision(one_rank: OneRank, tmp_path: Path) -> None:
    half = {"precision": "fp16", "max_steps": 8}
    folder = run_ranks(2, train, VALUES | half | {"parallel": {"tensor": 2}, "out": str(tmp_path)})[0]["folder"]
    assert_same(folder, one_rank.run(**half)["folder"], tolerance=1e-3)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "sequence"])
def test_compiled_models(one_rank: OneRank, tmp_path: Path, kind: str) -> None:
    compiled = {"parallel": {kind: 2}, "speed": {"compile": True}, "out": str(tmp_path)}
    folder = run_ranks(2, train, VALUES | {"max_steps": 8} | compiled)[0]["folder"]
    assert_same(folder, one_rank.folder(max_steps=8))


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tensor x2": (2, {"tensor": 2}),
    "tensor 2 x shard 2": (4, {"tensor": 2, "shard": "all"}),
}
KILLED_AT = 17  # of 20 steps; the last checkpoint is of step 14


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("one", "tensor x2"),
        ("tensor 2 x shard 2", "one"),
        pytest.param("tensor x2", "one", marks=pytest.mark.slow),
        pytest.param("tensor x2", "tensor 2 x shard 2", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_resumes_on_another_layout(one_rank: OneRank, tmp_path: Path, before: str, after: str) -> None:
    ranks, parallel = LAYOUTS[before]
    values = VALUES | {"parallel": parallel, "out": str(tmp_path)}
    run_ranks(ranks, train, values, None, KILLED_AT, expect_failure=True)
    checkpoints = next((tmp_path / "tensor").iterdir()) / "checkpoints"
    latest = checkpoints / (checkpoints / "latest").read_text().strip()
    assert latest.name == "step-000014"
    ranks, parallel = LAYOUTS[after]
    resumed = run_ranks(ranks, train, VALUES | {"parallel": parallel, "out": str(tmp_path)}, str(latest))[0]
    assert_same(resumed["folder"], one_rank.run()["folder"])
