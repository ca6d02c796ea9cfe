"""Muon on every layout of ranks: the losses of one rank, and resuming on another layout."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from layout_runs import OneRank, assert_same
from rank_jobs import run_ranks, train

pytestmark = [pytest.mark.xdist_group("muon"), pytest.mark.ranks]
WITH_ADAMW = {"name": "muon", "lr": 0.02, "clip_norm": 1.0, "others": {"name": "adamw", "lr": 2e-3}}
WITH_SGD = {"name": "muon", "lr": 0.02, "weight_decay": 0.1, "others": {"name": "sgd", "lr": 0.05, "momentum": 0.9}}
NORMALIZED = WITH_SGD | {"normalize": True, "ns_steps": 3}
ALONE = {"name": "muon", "lr": 0.02, "adjust_lr": "match_rms_adamw", "nesterov": False}
VALUES: dict[str, Any] = {
    "recipe": "muon",
    "data": {"name": "digits", "shift": 1},
    "model": {"name": "rank_work:convolutions"},
    "optim": WITH_ADAMW,
    "batch": {"global": 64, "micro": 16},
    "schedule": {"warmup_steps": 4, "decay": "cosine"},
    "epochs": 1,
    "max_steps": 20,
    "checkpoint": {"every_steps": 7, "every_epochs": None},
    "log": {"every_steps": 1, "ledger": True, "tensorboard": False},
}
TEXT: dict[str, Any] = {
    "data": {"name": "text", "context": 8, "characters": 8000},
    "model": {"name": "gpt", "width": 32, "depth": 2, "heads": 4, "dropout": 0.1},
    "max_steps": 6,
    "metrics": [],
}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    return OneRank(VALUES, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize(
    ("ranks", "parallel", "values"),
    [
        (2, {}, {"optim": ALONE}),
        (2, {"shard": "all"}, {"optim": NORMALIZED}),
        pytest.param(4, {"shard": "all"}, {}, marks=pytest.mark.slow),
        (4, {"shard": 2}, {"optim": WITH_SGD}),
        pytest.param(2, {"space": 2}, {}, marks=pytest.mark.slow),
        (2, {"stages": 2}, {"optim": ALONE}),
        (4, {"tensor": 2, "shard": "all"}, TEXT | {"optim": NORMALIZED}),
    ],
    ids=["data 2", "shard 2", "shard 4", "shard 2x2", "space", "stages", "tensor x shard"],
)
def test_losses_are_those_of_one_rank(
    one_rank: OneRank, tmp_path: Path, ranks: int, parallel: dict[str, Any], values: dict[str, Any]
) -> None:
    answers = run_ranks(ranks, train, VALUES | values | {"parallel": parallel, "out": str(tmp_path)})
    assert_same(answers[0]["folder"], one_rank.folder(**values))


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "data x2": (2, {}),
    "shard x4": (4, {"shard": "all"}),
    "shard 2x2": (4, {"shard": 2}),
    "stages x2": (2, {"stages": 2}),
}
KILLED_AT = 17  # of 20 steps; the last checkpoint is of step 14


@pytest.mark.parametrize(
    ("before", "afterwards"),
    [
        ("shard x4", ("stages x2", "data x2")),
        pytest.param("stages x2", ("shard 2x2", "one"), marks=pytest.mark.slow),
    ],
    ids=["shard x4", "stages x2"],
)
def test_a_killed_run_resumes_on_another_layout(
    one_rank: OneRank, tmp_path: Path, before: str, afterwards: tuple[str, ...]
) -> None:
    ranks, parallel = LAYOUTS[before]
    killed = tmp_path / "killed"
    values = VALUES | {"parallel": parallel, "out": str(killed)}
    run_ranks(ranks, train, values, None, KILLED_AT, expect_failure=True)
    for after in afterwards:
        runs = tmp_path / after.replace(" ", "-")
        shutil.copytree(killed, runs)
        checkpoints = next((runs / "muon").iterdir()) / "checkpoints"
        latest = checkpoints / (checkpoints / "latest").read_text().strip()
        assert latest.name == "step-000014"
        ranks, parallel = LAYOUTS[after]
        resumed = run_ranks(ranks, train, VALUES | {"parallel": parallel, "out": str(runs)}, str(latest))[0]
        assert_same(resumed["folder"], one_rank.folder())


def test_a_run_resumes_bit_by_bit(one_rank: OneRank, tmp_path: Path) -> None:
    values = VALUES | {"optim": NORMALIZED, "out": str(tmp_path)}
    whole = one_rank.run(optim=NORMALIZED)
    shutil.copytree(whole["folder"].parent.parent, tmp_path, dirs_exist_ok=True)
    checkpoint = tmp_path / "muon" / whole["folder"].name / "checkpoints" / "step-000014"
    resumed = run_ranks(1, train, values, str(checkpoint))[0]
    assert resumed["weights"] == whole["weights"]


def test_steps_in_float16_are_scaled(one_rank: OneRank, tmp_path: Path) -> None:
    half = {"precision": "fp16", "max_steps": 8}
    answers = run_ranks(2, train, VALUES | half | {"parallel": {"shard": "all"}, "out": str(tmp_path)})
    assert_same(answers[0]["folder"], one_rank.folder(**half), tolerance=1e-3)
