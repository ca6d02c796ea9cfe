"""Sequences split over ranks: what is refused, and the same run as on one rank."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_runs import assert_same
from rank_jobs import run_ranks, train
from torch import nn

from tutti.config.load import resolve_values
from tutti.config.plan import make_plan
from tutti.data.text import text
from tutti.errors import ConfigError
from tutti.models.transformer import GPT, ViT
from tutti.parallel.sequence import gives_parts
from tutti.train.metrics import CrossEntropy
from tutti.train.sequence import check_sequences

TOLERANCE = 1e-5
CPU = torch.device("cpu")
TEXT: dict[str, Any] = {
    "recipe": "sequence",
    "data": {"name": "text", "context": 8, "characters": 2900},
    "model": {"name": "gpt", "width": 32, "depth": 2, "heads": 4, "dropout": 0.1},
    "optim": {"name": "adam", "lr": 3e-3, "clip_norm": 0.5},
    "batch": {"global": 16, "micro": 8, "eval": 16},
    "metrics": ["accuracy"],
    "epochs": 1,
    "checkpoint": {"every_steps": 7, "every_epochs": None},
    "log": {"every_steps": 1, "ledger": True, "tensorboard": False},
}
IMAGES: dict[str, Any] = TEXT | {
    "data": {"name": "digits", "shift": 1},
    "model": {"name": "vit", "patch": 2, "width": 16, "depth": 1, "heads": 2, "dropout": 0.1},
    "batch": {"global": 64, "micro": 16},
    "max_steps": 8,
}


def check(model: nn.Module, parts: int, loss: Callable[..., torch.Tensor] | None = None, **values: Any) -> None:
    config = resolve_values(TEXT | {"parallel": {"sequence": parts}} | values)
    plan = make_plan(config, parts, 300)
    check_sequences(config, plan, model, loss or CrossEntropy(), text("train", context=12, characters=2900), CPU)


def small(heads: int = 4) -> GPT:
    return GPT(vocabulary=32, context=12, width=12 * heads, depth=1, heads=heads)


def test_a_transformer_can_be_split_by_places() -> None:
    check(small(), 4)
    assert gives_parts(small())
    assert not gives_parts(ViT((1, 8, 8), 10, 4, width=8, depth=1, heads=2)), "the classes are of whole images"


def summed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")


class Planned(GPT):
    """A GPT with a plan that is wrong."""

    def __init__(self, plan: dict[str, str]) -> None:
        super().__init__(vocabulary=32, context=12, width=8, depth=1, heads=2)
        self._plan = plan

    def sequence_plan(self) -> dict[str, str]:
        return self._plan


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: check(nn.Conv1d(1, 1, 3), 2),
            "parallel.sequence with Conv1d: expected a model with the method sequence_plan()",
        ),
        (
            lambda: check(small(), 8),
            "parallel.sequence=8 with 12 places: expected a divisor of 12. "
            "Set parallel.sequence=1 or 2 or 3 or 4 or 6 or 12, or another number of places.",
        ),
        (lambda: check(small(), 6), "parallel.sequence=6 with 4 heads: expected a divisor of 4."),
        (lambda: check(small(), 2, summed), "expected a loss that is a mean over places"),
        (
            lambda: check(Planned({"embedding": "halves"}), 2),
            "has 'halves' for embedding: expected one of 'cut', ",
        ),
        (
            lambda: check(Planned({"first": "cut"}), 2),
            "Planned.sequence_plan() names 'first': expected the ",
        ),
        *(
            (
                lambda other=other: resolve_values(TEXT | {"parallel": {"sequence": 2, other: 2}}),
                f"with parallel.{'sequence' if other == 'space' else other}: expected one of them",
            )
            for other in ("space", "stages", "tensor")
        ),
        (lambda: resolve_values(TEXT | {"parallel": {"sequence": 0}}), "parallel.sequence"),
    ],
)
def test_what_cannot_be_split_by_places_is_refused(call: Callable[[], None], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        call()


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(1, train, TEXT | {"out": str(tmp_path_factory.mktemp("one"))})[0]


RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "2": (2, {"sequence": 2, "recompute": "layers"}),
    "4": (4, {"sequence": 4}),
    "2 data x 2": (4, {"sequence": 2}),
    "2 data x 2, sharded": (4, {"sequence": 2, "shard": "all"}),
}


@pytest.mark.ranks
@pytest.mark.parametrize("run", RUNS)
def test_split_sequences_train_as_one_rank(one_rank: dict[str, Any], tmp_path: Path, run: str) -> None:
    ranks, parallel = RUNS[run]
    parts = run_ranks(ranks, train, TEXT | {"parallel": parallel, "out": str(tmp_path)})[0]
    assert_same(parts["folder"], one_rank["folder"])


@pytest.mark.ranks
def test_classes_of_whole_images_are_those_of_one_rank(tmp_path: Path) -> None:
    one = run_ranks(1, train, IMAGES | {"out": str(tmp_path / "one")})[0]
    parts = run_ranks(2, train, IMAGES | {"parallel": {"sequence": 2}, "out": str(tmp_path / "parts")})[0]
    assert_same(parts["folder"], one["folder"])


@pytest.mark.ranks
def test_a_killed_run_resumes_on_one_rank(one_rank: dict[str, Any], tmp_path: Path) -> None:
    values = TEXT | {"out": str(tmp_path)}
    run_ranks(2, train, values | {"parallel": {"sequence": 2}}, None, 17, expect_failure=True)
    checkpoints = next((tmp_path / "sequence").iterdir()) / "checkpoints"
    latest = checkpoints / (checkpoints / "latest").read_text().strip()
    assert latest.name == "step-000014"
    assert_same(run_ranks(1, train, values, str(latest))[0]["folder"], one_rank["folder"])
