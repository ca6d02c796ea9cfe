"""The same run, whatever the number of ranks: equal sample ledgers, equal losses up to the order of sums."""

import struct
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import read_ledger, read_losses, run_ranks, train

from tutti.data.mnist import FILES, find_file, read_idx

# Losses of 1, 2 and 4 ranks differ by the order in which floats are added: after 66 steps by less than this.
TOLERANCE = 1e-5

DIGITS: dict[str, Any] = {
    "recipe": "same",
    "data": {"name": "digits", "shift": 1},
    "model": {"name": "small_cnn", "width": 8, "dropout": 0.3, "batch_norm": True},
    "optim": {"name": "adamw", "lr": 2e-3},
    "batch": {"global": 64, "micro": 16},
    "schedule": {"warmup_steps": 5, "decay": "cosine"},
    "epochs": 3,
    "log": {"every_steps": 3, "ledger": True, "tensorboard": False},
}


def run_on(ranks: int, values: dict[str, Any], out: Path) -> tuple[dict[int, list[int]], list[Any], list[float]]:
    answers = run_ranks(ranks, train, values | {"out": str(out / str(ranks))})
    for answer in answers[1:]:
        assert answer["weights"] == answers[0]["weights"], "ranks of one run hold different weights"
    folder = answers[0]["folder"]
    return read_ledger(folder), read_losses(folder), answers[0]["weights"]


def assert_same_run(values: dict[str, Any], out: Path) -> None:
    ledger, losses, weights = run_on(1, values, out)
    for ranks in (2, 4):
        other_ledger, other_losses, other_weights = run_on(ranks, values, out)
        assert other_ledger == ledger
        assert [loss[:2] for loss in other_losses] == [loss[:2] for loss in losses]
        assert [loss[2] for loss in other_losses] == pytest.approx([loss[2] for loss in losses], abs=TOLERANCE)
        assert other_weights == pytest.approx(weights, abs=10 * TOLERANCE)


@pytest.mark.ranks
def test_digits_with_augmentation_dropout_and_batch_norm(tmp_path: Path) -> None:
    assert_same_run(DIGITS, tmp_path)
    ledger = read_ledger(next((tmp_path / "1" / "same").iterdir()))
    assert len(ledger) == 66
    for epoch in range(3):
        ids = [i for step in range(22 * epoch + 1, 22 * epoch + 23) for i in ledger[step]]
        assert len(set(ids)) == len(ids) == 22 * 64
    assert ledger[1] != ledger[23], "every epoch has an order of its own"


@pytest.mark.ranks
def test_mnist_with_augmentation_and_dropout(tmp_path: Path, mnist_folder: Path) -> None:
    values = DIGITS | {
        "data": {"name": "mnist", "path": str(_first_images(mnist_folder, tmp_path / "mnist")), "shift": 2},
        "model": {"name": "mnist_torch"},
        "optim": {"name": "sgd", "lr": 0.05, "momentum": 0.5},
        "batch": {"global": 512, "micro": 64, "eval": 1000},
        "epochs": 1,
    }
    assert_same_run(values, tmp_path)


@pytest.mark.ranks
def test_without_micro_batches_a_deterministic_model_is_the_same_run(tmp_path: Path) -> None:
    model = {"name": "mlp", "hidden": [32], "dropout": 0.0}
    assert_same_run(DIGITS | {"model": model, "batch": {"global": 64}}, tmp_path)


@pytest.mark.ranks
def test_another_seed_is_another_run(tmp_path: Path) -> None:
    values = DIGITS | {"epochs": 1}
    first, second = run_on(1, values, tmp_path / "a"), run_on(1, values | {"seed": 7}, tmp_path / "b")
    assert first[0] != second[0]
    assert first[1][0] != second[1][0]


def _first_images(folder: Path, copy: Path) -> Path:
    """The first of MNIST's images, in files like its own."""
    copy.mkdir()
    for split, count in (("train", 3000), ("valid", 500)):
        for name, dimensions in zip(FILES[split], (3, 1), strict=True):
            content = read_idx(find_file(folder, name), dimensions)[:count]
            header = struct.pack(f">{1 + dimensions}i", 0x800 + dimensions, *content.shape)
            (copy / name).write_bytes(header + content.tobytes())
    return copy
