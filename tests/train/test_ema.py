"""Averaged weights: the same on every layout of ranks, evaluated beside the trained ones, saved and resumed exactly."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import Tutti
from rank_jobs import run_ranks, train
from torch import nn

import tutti as package
from tutti.config.check import check_parts
from tutti.config.layout import Layout
from tutti.config.load import resolve_values
from tutti.errors import ConfigError
from tutti.parallel.mesh import Mesh
from tutti.train.ema import AveragedWeights

VALUES: dict[str, Any] = {
    "recipe": "ema",
    "data": {"name": "digits", "shift": 1},
    "model": {"name": "small_cnn", "width": 8, "dropout": 0.3, "batch_norm": True},
    "optim": {"name": "adamw", "lr": 2e-3},
    "batch": {"global": 64, "micro": 8},
    "epochs": 1,
    "ema": {"decay": 0.9},
    "checkpoint": {"every_steps": 7, "keep": 9},
    "log": {"every_steps": 11, "tensorboard": False},
}
DECAY, LAST = 0.9, "step-000022"


def read_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint, whole, by key."""
    reader = dcp.FileSystemReader(checkpoint)
    found = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in reader.read_metadata().state_dict_metadata.items()
        if key.startswith(("ema.", "model."))
    }
    with warnings.catch_warnings():  # of torch, about reading without other ranks
        warnings.simplefilter("ignore")
        dcp.load(found, storage_reader=reader)
    return found


def read_averages(folder: Path, checkpoint: str = LAST) -> dict[str, torch.Tensor]:
    found = read_state(folder / "checkpoints" / checkpoint)
    return {key: value for key, value in found.items() if key.startswith("ema.")}


def valid_results(folder: Path) -> list[dict[str, float]]:
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in event.items() if key.startswith("valid_")} for event in events]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(1, train, VALUES | {"out": str(tmp_path_factory.mktemp("one"))})[0]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(2, {}), (2, {"shard": "all"}), pytest.param(4, {"shard": 2}, marks=pytest.mark.slow)],
    ids=["data", "shard", "shard 2x2"],
)
def test_averages_are_the_same_on_every_layout_and_resume_on_another(
    one_rank: dict[str, Any], tmp_path: Path, ranks: int, parallel: dict[str, Any]
) -> None:
    values = VALUES | {"out": str(tmp_path), "parallel": parallel}
    folder = run_ranks(ranks, train, values)[0]["folder"]
    expected = read_averages(one_rank["folder"])
    assert_close(read_averages(folder), expected)
    whole, *_, last = valid_results(folder)
    assert whole["valid_loss_ema"] == whole["valid_loss"]
    assert last["valid_loss_ema"] != last["valid_loss"]
    assert last == pytest.approx(valid_results(one_rank["folder"])[-1], abs=1e-4)

    if not parallel:
        return
    # From the middle, on one rank, and from one rank on this layout.
    run_ranks(1, train, VALUES | {"out": str(tmp_path)}, str(folder / "checkpoints" / "step-000014"))
    assert_close(read_averages(folder), expected)
    run_ranks(ranks, train, values, str(folder / "checkpoints" / "step-000014"))
    assert_close(read_averages(folder), expected)


@pytest.mark.ranks
@pytest.mark.slow
def test_averages_are_the_same_with_samples_split_in_space(tmp_path: Path) -> None:
    values = VALUES | {"model": {"name": "rank_work:convolutions"}}
    one = run_ranks(1, train, values | {"out": str(tmp_path / "one")})[0]["folder"]
    two = run_ranks(2, train, values | {"out": str(tmp_path / "two"), "parallel": {"space": 2}})[0]["folder"]
    assert read_averages(two).keys() == read_averages(one).keys()
    for key, value in read_averages(two).items():
        torch.testing.assert_close(value, read_averages(one)[key], atol=2e-5, rtol=1e-4)
    assert valid_results(two)[-1] == pytest.approx(valid_results(one)[-1], abs=1e-4)


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert any("running_mean" in key for key in ours)
    for key, value in ours.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, theirs[key], atol=2e-5, rtol=1e-4)


@pytest.mark.ranks
def test_resumed_on_the_same_ranks_averages_and_results_are_equal_to_the_bit(
    one_rank: dict[str, Any], tmp_path: Path
) -> None:
    run_ranks(1, train, VALUES | {"out": str(tmp_path)}, None, 17, expect_failure=True)
    [folder] = (tmp_path / "ema").iterdir()
    resumed = run_ranks(1, train, VALUES | {"out": str(tmp_path)}, str(folder / "checkpoints" / "step-000014"))[0]
    assert resumed["results"] == one_rank["results"]
    assert resumed["weights"] == one_rank["weights"]
    ours, theirs = read_averages(folder), read_averages(one_rank["folder"])
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.ranks
def test_a_checkpoint_without_averages_is_refused_and_one_with_them_resumes_without(
    one_rank: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = str(one_rank["folder"] / "checkpoints" / LAST)
    plain = VALUES | {"ema": None, "out": str(tmp_path)}
    assert run_ranks(1, train, plain, checkpoint)[0]["weights"] == one_rank["weights"]
    folder = run_ranks(1, train, plain | {"max_steps": 7})[0]["folder"]
    with pytest.raises(ConfigError, match=r"ema with checkpoint .*, which holds no averaged weights"):
        run_ranks(1, train, VALUES | {"out": str(tmp_path)}, str(folder / "checkpoints" / "step-000007"))


def test_an_average_follows_its_formula_in_fp32_and_leaves_the_model_as_it_was() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 2, dtype=torch.bfloat16), nn.BatchNorm1d(2))
    average = AveragedWeights(model, DECAY, Mesh(Layout(1), 0, torch.device("cpu")))
    expected = {name: value.clone() for name, value in average.state.items()}
    for step in range(3):
        with torch.no_grad():
            for value in (*model.parameters(), model[1].running_mean):
                value.add_(step + 1)
        average.update()
        now = dict(model.named_parameters()) | dict(model.named_buffers())
        expected = {name: DECAY * value + (1 - DECAY) * now[name].float() for name, value in expected.items()}
    assert {name: value.dtype for name, value in average.state.items()} == dict.fromkeys(expected, torch.float32)
    for name, value in average.state.items():
        torch.testing.assert_close(value, expected[name])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with average.in_use():
        torch.testing.assert_close(model[1].running_mean, expected["1.running_mean"])
        torch.testing.assert_close(model[0].weight, expected["0.weight"].bfloat16())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ema": {"decay": 1.0}}, "ema.decay=1.0"),
        ({"ema": {"decay": 0.9}, "framework": "keras", "batch": {"global": 64}}, "ema.decay=0.9 with framework=keras"),
        ({"parallel": {"stages": 2}}, "ema.decay=0.9 with parallel.stages=2: averaged weights exist with data"),
        ({"parallel": {"tensor": 2}}, "ema.decay=0.9 with parallel.tensor=2"),
        ({"ema": None, "checkpoint": {"best": "loss_ema"}}, "checkpoint.best='loss_ema': expected one of"),
    ],
)
def test_averages_that_cannot_be_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_parts(resolve_values(VALUES | values), 1)


def test_metrics_of_averages_decide_best_and_the_end() -> None:
    wish = {"checkpoint": {"best": "loss_ema"}, "stop_at": {"valid_accuracy_ema": 0.9}}
    check_parts(resolve_values(VALUES | wish), 1)


@pytest.mark.ranks
@pytest.mark.parametrize("parallel", [{}, {"shard": "all"}], ids=["data", "shard"])
def test_averages_are_evaluated_exported_and_opened(tmp_path: Path, tutti: Tutti, parallel: dict[str, Any]) -> None:
    values = VALUES | {"out": str(tmp_path), "parallel": parallel}
    values |= {"checkpoint": {"best": "loss_ema"}, "max_steps": 22}
    folder = run_ranks(2, train, values)[0]["folder"]
    found = read_state(folder / "checkpoints" / LAST)
    opened = package.open_run(folder)
    weights, trained = opened.weights(ema=True), opened.weights()
    assert weights.keys() == trained.keys() == opened.model(ema=True).state_dict().keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, found.get(f"ema.{name}", found[f"model.{name}"]), rtol=0, atol=0)
        torch.testing.assert_close(trained[name], found[f"model.{name}"], rtol=0, atol=0)
    told = tutti("evaluate", str(folder), "--ema", "-n", "2", "--json")
    assert json.loads(told.out)["metrics"] == {
        name: value for name, value in opened.results.items() if name.endswith("_ema")
    }
    told = tutti("export", str(folder), "--to", "torch", "--out", "model.pt")
    assert "note: the checkpoint is the best by checkpoint.best=loss_ema, of averaged weights, which --ema takes" in (
        told.err
    )
    told = tutti("export", str(folder), "--to", "torch", "--ema", "--out", "averages.pt")
    assert told.code == 0 and "step 22 (best), averaged weights" in told.out
    exported = torch.load(tmp_path / "averages.pt", weights_only=True)
    assert all(torch.equal(value, weights[name]) for name, value in exported.items())
