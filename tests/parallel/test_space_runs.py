"""Training on parts of samples: the same run as on one rank, through the whole of `tutti train`."""

from pathlib import Path
from typing import Any

import pytest
from layout_runs import assert_same
from rank_jobs import run_ranks, train

COMMON: dict[str, Any] = {
    "recipe": "space",
    "epochs": 3,
    "max_steps": 20,
    "log": {"every_steps": 1, "ledger": True, "tensorboard": False},
}
NBODY: dict[str, Any] = COMMON | {
    "data": {
        "name": "nbody",
        "source": "synthetic",
        "crop": 16,
        "box": 24,
        "train_samples": 32,
        "valid_samples": 5,
    },
    "model": {"name": "unet3d", "width": 4, "depth": 4},
    "loss": {"name": "l1"},
    "metrics": ["torch.nn.functional:mse_loss"],
    "optim": {"name": "adam", "lr": 1e-3, "clip_norm": 0.5},
    "batch": {"global": 4, "micro": 2},
}
IMAGES: dict[str, Any] = COMMON | {
    "data": {"name": "digits", "shift": 1},
    "model": {"name": "rank_work:convolutions", "batch_norm": True},
    "optim": {"name": "adam", "lr": 2e-3, "clip_norm": 1.0},
    "batch": {"global": 64, "micro": 16},
    "epochs": 1,
}


def run_on(ranks: int, values: dict[str, Any], out: Path, **parallel: Any) -> Path:
    return run_ranks(ranks, train, values | {"out": str(out), "parallel": parallel})[0]["folder"]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_on(1, NBODY, tmp_path_factory.mktemp("one"))


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "[2,1,1]": (2, {"space": [2, 1, 1]}),
    "[2,2,1]": (4, {"space": [2, 2, 1]}),
    "data x space": (4, {"space": 2}),
    "data x space, sharded and computed again": (4, {"space": [1, 2], "shard": "all", "recompute": "layers"}),
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "data x space" else ()) for name in LAYOUTS]
)
def test_the_unet_on_parts_of_crops_is_the_same_run(one_rank: Path, tmp_path: Path, name: str) -> None:
    ranks, parallel = LAYOUTS[name]
    assert_same(run_on(ranks, NBODY, tmp_path, **parallel), one_rank)


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "space"), [(2, 2), (4, [1, 2])], ids=["2", "2 data x 2 space"])
def test_classification_with_dropout_and_batch_norm_is_the_same_run(
    tmp_path: Path, ranks: int, space: int | list[int]
) -> None:
    one = run_on(1, IMAGES, tmp_path / "one")
    assert_same(run_on(ranks, IMAGES, tmp_path / "parts", space=space), one)
