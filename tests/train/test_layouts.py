"""The same run on every layout of ranks: equal sample ledgers, equal losses up to the order of sums."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
from layout_runs import OneRank, assert_same
from rank_jobs import run_ranks, train

VALUES: dict[str, Any] = {
    "recipe": "layouts",
    "data": {"name": "digits", "shift": 1},
    "model": {"name": "small_cnn", "width": 8, "dropout": 0.3, "batch_norm": True},
    "optim": {"name": "adamw", "lr": 2e-3, "clip_norm": 1.0},
    "batch": {"global": 64, "micro": 8},
    "epochs": 1,
    "max_steps": 20,
    "checkpoint": {"every_epochs": None},
    "log": {"every_steps": 1, "ledger": True, "tensorboard": False},
}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    return OneRank(VALUES, tmp_path_factory.mktemp("one"))


def run_layout(ranks: int, parallel: dict[str, Any], out: Path, **values: Any) -> list[dict[str, Any]]:
    return run_ranks(ranks, train, VALUES | values | {"parallel": parallel, "out": str(out)})


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "shard"), [(2, "all"), (4, "all"), (4, 2)], ids=["2", "4", "2x2"])
def test_sharded_weights(one_rank: OneRank, tmp_path: Path, ranks: int, shard: str | int) -> None:
    answers = run_layout(ranks, {"shard": shard, "recompute": "layers"}, tmp_path)
    assert_same(answers[0]["folder"], one_rank.folder())
    whole = len(run_ranks(1, train, VALUES | {"max_steps": 1, "out": str(tmp_path / "whole")})[0]["weights"])
    copies = ranks // shard if isinstance(shard, int) else 1
    assert sum(len(answer["weights"]) for answer in answers) < 1.2 * whole * copies


LARS = {"name": "lars", "lr": 0.5}
LAMB = {"name": "lamb", "lr": 0.01}


@pytest.mark.ranks
@pytest.mark.parametrize("optim", [LARS, LAMB], ids=["lars", "lamb"])
def test_layerwise_optimizers_of_sharded_weights(one_rank: OneRank, tmp_path: Path, optim: dict[str, Any]) -> None:
    model = {"name": "mlp", "hidden": [32], "dropout": 0.0}
    answers = run_layout(2, {"shard": "all"}, tmp_path, optim=optim, model=model)
    assert_same(answers[0]["folder"], one_rank.folder(optim=optim, model=model))


PRECISIONS = [("bf16", 2e-3), ("fp16", 2e-4)]  # tolerances of losses about 2


@pytest.mark.ranks
@pytest.mark.parametrize(("precision", "tolerance"), PRECISIONS, ids=["bf16", "fp16"])
def test_half_precision_of_sharded_weights(one_rank: OneRank, tmp_path: Path, precision: str, tolerance: float) -> None:
    values: dict[str, Any] = {"precision": precision, "model": {"name": "mlp", "hidden": [32], "batch_norm": True}}
    answers = run_layout(2, {"shard": "all"}, tmp_path, **values)
    assert_same(answers[0]["folder"], one_rank.folder(**values), tolerance)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"shard": "all"}, {"space": 2}], ids=["shard", "space"])
def test_compiled_models(one_rank: OneRank, tmp_path: Path, parallel: dict[str, Any]) -> None:
    values: dict[str, Any] = RESUMED | {"max_steps": 8, "speed": {"compile": True}}
    answers = run_layout(2, parallel, tmp_path, **values)
    assert_same(answers[0]["folder"], one_rank.folder(**RESUMED, max_steps=8))


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "data x2": (2, {}),
    "shard x4": (4, {"shard": "all"}),
    "shard 2x2": (4, {"shard": 2}),
    "space x2": (2, {"space": 2}),
    "stages x2": (2, {"stages": 2}),
}
RESUMED = {
    "data": {"name": "digits", "shift": 1},
    "model": {"name": "rank_work:convolutions"},
    "checkpoint": {"every_steps": 7, "every_epochs": None},
}
KILLED_AT = 17  # of 22 steps an epoch; the last checkpoint is of step 14


class Killed:
    """Runs that died by SIGKILL in mid-epoch, by layout, each made once; every resume has a copy of its own."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def checkpoint(self, layout: str, copy: Path) -> Path:
        place = self._out / layout.replace(" ", "-")
        if not place.exists():
            ranks, parallel = LAYOUTS[layout]
            values = VALUES | RESUMED | {"parallel": parallel, "out": str(place)}
            run_ranks(ranks, train, values, None, KILLED_AT, expect_failure=True)
        shutil.copytree(place, copy)
        checkpoints = next((copy / "layouts").iterdir()) / "checkpoints"
        return checkpoints / (checkpoints / "latest").read_text().strip()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    return Killed(tmp_path_factory.mktemp("killed"))


# A circle: each layout is once the one before and once the one after.
CIRCLE = ("one", "space x2", "shard x4", "stages x2", "data x2", "shard 2x2", "one")
OTHERS = [
    ("one", "shard x4"),
    ("data x2", "stages x2"),
    ("shard x4", "data x2"),
    ("shard 2x2", "space x2"),
    ("space x2", "one"),
    ("stages x2", "space x2"),
]
PAIRS = [*itertools.pairwise(CIRCLE), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in OTHERS)]


@pytest.mark.ranks
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_run_resumes_on_another_layout(
    one_rank: OneRank, killed: Killed, tmp_path: Path, before: str, after: str
) -> None:
    checkpoint = killed.checkpoint(before, tmp_path / "runs")
    assert checkpoint.name == "step-000014"
    ranks, parallel = LAYOUTS[after]
    values = VALUES | RESUMED | {"parallel": parallel, "out": str(tmp_path / "runs")}
    resumed = run_ranks(ranks, train, values, str(checkpoint))[0]
    assert_same(resumed["folder"], one_rank.folder(**RESUMED))
