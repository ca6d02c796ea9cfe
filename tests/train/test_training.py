"""What training does besides being the same run: ragged evaluation, precision, clipping, bad losses, records."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Tutti
from rank_jobs import run_ranks, train

pytestmark = pytest.mark.ranks

VALUES: dict[str, Any] = {
    "recipe": "small",
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": [32]},
    "optim": {"name": "adam", "lr": 3e-3},
    "batch": {"global": 60, "eval": 7},
    "epochs": 1,
    "log": {"every_steps": 5, "tensorboard": False},
}


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_validation_sample_counts_once_at_any_number_of_ranks(tmp_path: Path) -> None:
    """360 samples, 7 at a time: no number of ranks divides evenly, and the means must not notice."""
    by_ranks = []
    for ranks in (1, 2, 3, 4):
        folder = run_ranks(ranks, train, VALUES | {"out": str(tmp_path / str(ranks))})[0]["folder"]
        by_ranks.append(events(folder)[0])
    for start in by_ranks:
        assert start["valid_accuracy"] == by_ranks[0]["valid_accuracy"]
        assert start["valid_loss"] == pytest.approx(by_ranks[0]["valid_loss"], abs=1e-6)
        assert (start["valid_accuracy"] * 360) % 1 == pytest.approx(0, abs=1e-9)


def test_the_loss_before_the_first_step_is_told(tmp_path: Path) -> None:
    told = events(run_ranks(2, train, VALUES | {"out": str(tmp_path)})[0]["folder"])
    assert told[0]["event"] == "start"
    assert told[0]["step"] == 0
    assert told[0]["train_loss"] == pytest.approx(math.log(10), abs=0.3)
    assert told[1]["event"] == "step"
    assert told[1]["loss"] == pytest.approx(told[0]["train_loss"], abs=1e-6), "the first step starts from that loss"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_learns_as_well(tmp_path: Path, precision: str) -> None:
    values = VALUES | {"out": str(tmp_path), "precision": precision, "epochs": 5}
    assert run_ranks(2, train, values)[0]["results"]["valid_accuracy"] > 0.9


def test_clipping_bounds_the_step(tmp_path: Path) -> None:
    """With plain SGD at rate 1 a step moves the weights by the norm of the gradient, at most the clip."""
    optim = {"name": "sgd", "lr": 1.0}
    data = {"name": "synthetic", "shape": [8], "classes": 4, "train": 60, "valid": 8}
    moved = {}
    for clip in (None, 1e-3):
        values = VALUES | {"out": str(tmp_path / str(clip)), "data": data, "optim": optim | {"clip_norm": clip}}
        start = run_ranks(1, train, values | {"optim": {"name": "sgd", "lr": 1e-30}})[0]["weights"]
        end = run_ranks(1, train, values)[0]["weights"]
        moved[clip] = math.dist(start, end)
    assert moved[1e-3] == pytest.approx(1e-3, rel=1e-2)
    assert moved[None] > 0.01


def test_without_communication_ranks_drift_apart(tmp_path: Path) -> None:
    apart = run_ranks(2, train, VALUES | {"out": str(tmp_path), "ddp": {"communicate": False}})
    assert apart[0]["weights"] != apart[1]["weights"]


def test_buckets_and_buffers_are_options_that_change_no_result(tmp_path: Path) -> None:
    model = {"name": "small_cnn", "width": 8}
    plain = run_ranks(2, train, VALUES | {"out": str(tmp_path / "a"), "model": model})[0]
    ddp = {"bucket_mb": 0.01, "broadcast_buffers": False, "find_unused_parameters": True}
    other = run_ranks(2, train, VALUES | {"out": str(tmp_path / "b"), "model": model, "ddp": ddp})[0]
    assert other["weights"] == pytest.approx(plain["weights"], abs=1e-5)


@pytest.mark.parametrize("ranks", [2, 3])
def test_swapping_gradients_directly_changes_no_result(tmp_path: Path, ranks: int) -> None:
    results = [
        run_ranks(ranks, train, VALUES | {"out": str(tmp_path / name), "ddp": ddp})[0]["weights"]
        for name, ddp in (
            ("direct", {}),
            ("all-reduce", {"direct": False}),
            ("several buckets", {"bucket_mb": 0.002}),  # the last one directly, the others not
        )
    ]
    assert results[1] == pytest.approx(results[0], abs=1e-5)
    assert results[2] == pytest.approx(results[0], abs=1e-5)


def test_channels_last_is_another_layout_of_the_same_run(tmp_path: Path) -> None:
    values = VALUES | {"model": {"name": "small_cnn", "width": 8}}
    plain = run_ranks(2, train, values | {"out": str(tmp_path / "a")})[0]
    other = run_ranks(2, train, values | {"out": str(tmp_path / "b"), "speed": {"channels_last": True}})[0]
    assert other["weights"] == pytest.approx(plain["weights"], abs=1e-4)


def test_a_loss_that_is_no_number_stops_with_step_rank_and_samples(tutti: Tutti, tmp_path: Path) -> None:
    (tmp_path / "poison.py").write_text(
        "import torch\n"
        "from tutti.data.builtin import digits\n"
        "class Poisoned:\n"
        "    def __init__(self, split, sample):\n"
        "        self.data, self.sample = digits(split), sample\n"
        "        self.input_shape, self.num_classes = (1, 8, 8), 10\n"
        "    def __len__(self):\n"
        "        return len(self.data)\n"
        "    def batch(self, ids, draws):\n"
        "        inputs, targets = self.data.batch(ids, draws)\n"
        "        if draws is not None:\n"
        "            inputs[ids == self.sample] = float('nan')\n"
        "        return inputs, targets\n"
    )
    from tutti.data.order import permutation

    order = permutation(1437, 42, 0).tolist()
    place = 7 * 64 + 40  # step 8, the second rank's half
    done = tutti(
        "train", "digits/mlp", "-n", "2", "data.name=poison:Poisoned", f"data.sample={order[place]}",
        "batch.micro=null", "log.every_steps=10", "checkpoint.every_steps=5",
    )  # fmt: skip
    assert done.code == 1
    samples = ", ".join(map(str, order[7 * 64 + 32 : 7 * 64 + 40]))
    assert f"the loss is nan at step 8 (epoch 1) on rank 1, whose batch holds samples {samples}, ..." in done.err
    assert done.err.count("the loss is nan") == 1
    assert "Traceback" not in done.all
    folder = next((tmp_path / "runs" / "digits" / "mlp").iterdir())
    assert json.loads((folder / "record.json").read_text())["state"] == "failed"
    assert (folder / "checkpoints" / "latest").read_text() == "step-000005\n", "nothing bad was saved"


def test_a_run_leaves_a_whole_folder(tutti: Tutti, tmp_path: Path) -> None:
    done = tutti("train", "digits", "-n", "2", "epochs=2")
    assert done.code == 0, done.all
    folder = next((tmp_path / "runs" / "digits").iterdir())
    assert folder.name.endswith("_n2")
    assert {"config.yaml", "record.json", "metrics.jsonl", "tensorboard", "checkpoints", "logs", "curves.png"} == {
        path.name for path in folder.iterdir()
    }
    record = json.loads((folder / "record.json").read_text())
    assert record["state"] == "finished"
    assert record["segments"][0]["launch_line"].endswith("train digits -n 2 epochs=2")
    assert record["segments"][0]["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert record["plan"]["gradient_bytes"] == 4 * record["plan"]["parameters"]
    assert record["results"] == {k: v for k, v in events(folder)[-1].items() if k.startswith(("train_", "valid_"))}
    assert f"run folder: {folder.relative_to(tmp_path)}" in done.out
    listed = tutti("runs").out.splitlines()[-1].split()
    assert listed[:4] == ["digits", "finished", "2", "2"]
    again = tutti("train", str(folder / "config.yaml"), "-n", "2", "out=again")
    assert again.code == 0, again.all
    strip = ("time", "seconds", "samples_per_second", "_share")
    first, second = (
        [{k: v for k, v in event.items() if not k.endswith(strip)} for event in events(next(path.glob("digits/*")))]
        for path in (tmp_path / "runs", tmp_path / "again")
    )
    assert first == second, "config.yaml is the same run again"
