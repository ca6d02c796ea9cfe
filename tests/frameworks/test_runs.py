"""Recipes in Keras and TensorFlow on one rank and on two: they learn, agree, resume, and are the networks of torch."""

import json
import shutil
from pathlib import Path
from typing import Any

import frameworks_work as work
import numpy as np
import pytest
from conftest import Tutti
from frameworks_names import MODELS, OPTIMIZERS
from prepared import TENSORFLOW
from rank_jobs import read_ledger, run_ranks

from tutti.config.load import load
from tutti.config.plan import make_plan
from tutti.data.order import make_order

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.xdist_group("tensorflow"),  # one worker makes the runs that all look at
]
FRAMEWORKS = ("keras", "tensorflow")
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of two ranks came to."""
    return run_ranks(2, work.on_two_ranks, tmp_path_factory.mktemp("two"), modules=TENSORFLOW)


@pytest.fixture(scope="module")
def one(two: Found, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one rank came to."""
    folders = (two[0][name]["folder"] for name in ("keras_plain", "keras_lively"))
    return run_ranks(1, work.on_one_rank, tmp_path_factory.mktemp("one"), *folders, modules=TENSORFLOW)[0]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def assert_close(ours: list[np.ndarray], theirs: list[np.ndarray], tolerance: float) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "name", [f"{f}_{k}" for f in FRAMEWORKS for k in ("lively", "resumed", "plain")] + ["keras_fp16"]
)
def test_weights_are_the_same_bits_on_all_ranks(two: Found, name: str) -> None:
    for mine, other in zip(two[0][name]["weights"], two[1][name]["weights"], strict=True):
        assert mine.tobytes() == other.tobytes()


@pytest.mark.parametrize("name", [f"{f}_{k}" for f in FRAMEWORKS for k in ("lively", "plain")] + ["keras_fp16"])
def test_the_loss_falls(two: Found, name: str) -> None:
    folder = two[0][name]["folder"]
    [start] = events(folder, "start")
    last = events(folder, "epoch")[-1]
    assert last["valid_loss"] < 0.8 * start["valid_loss"]
    assert last["valid_accuracy"] > start["valid_accuracy"] + 0.2


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_run_resumed_in_mid_epoch_ends_as_an_uninterrupted_one(two: Found, framework: str) -> None:
    whole, resumed = two[0][f"{framework}_lively"], two[0][f"{framework}_resumed"]
    assert_close(resumed["weights"], whole["weights"], 1e-6)
    assert read_ledger(resumed["folder"]) == read_ledger(whole["folder"])
    for kind in ("start", "step", "epoch"):
        ours, theirs = events(resumed["folder"], kind), events(whole["folder"], kind)
        for key in ("step", "epoch", "loss", "accuracy", "lr", "train_loss", "valid_loss", "valid_top5"):
            values = [event.get(key, 0) for event in theirs]
            assert [event.get(key, 0) for event in ours] == pytest.approx(values, rel=1e-5), (kind, key)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_order_is_the_one_that_the_recipe_names(two: Found, framework: str) -> None:
    for kind, name in (("lively", "keyed"), ("plain", "stored")):
        folder = two[0][f"{framework}_{kind}"]["folder"]
        config = load(str(folder / "config.yaml"), f"data.shuffle={name}")
        order = make_order(config, make_plan(config, 2, 1437), None)
        assert read_ledger(folder) == {step + 1: order.global_ids(step).tolist() for step in range(44)}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_run_that_reaches_its_target_stops_there_on_all_ranks(two: Found, framework: str) -> None:
    first, second = (each[f"{framework}_target"] for each in two)
    folder = first["folder"]
    record = json.loads((folder / "record.json").read_text())
    accuracies = [epoch["valid_accuracy"] for epoch in events(folder, "epoch")]
    assert accuracies[-1] >= 0.85 > max(accuracies[:-1])
    assert (record["state"], record["ended_by"]) == ("finished", "stop_at")
    assert record["step"] == first["step"] == second["step"] == 22 * len(accuracies)
    assert first["results"] == second["results"] == record["results"]
    assert (folder / "metrics.jsonl").read_text() == first["told"]  # resumed, it has nothing left to do
    assert_close(first["resumed"], first["weights"], 0.0)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_run_that_no_longer_improves_ends_at_the_same_epoch_also_when_resumed(two: Found, framework: str) -> None:
    first, second = (each[f"{framework}_patience"] for each in two)
    assert first["results"] == second["results"]
    for folder in (first["folder"], first["resumed"]):
        record = json.loads((folder / "record.json").read_text())
        assert (record["state"], record["ended_by"], record["step"]) == ("finished", "stop_early", 44)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_run_stopped_by_a_signal_saves_at_one_step_and_resumes(two: Found, framework: str) -> None:
    whole, [first, second] = two[0][f"{framework}_plain"], [each[f"{framework}_stopped"] for each in two]
    assert first["text"] == second["text"]
    assert first["text"].startswith(f"stopped on SIGUSR1 after step {first['step']} of 44. Resume with: tutti train ")
    assert 9 <= first["step"] < 44
    assert_close(first["weights"], whole["weights"], 1e-6)
    assert read_ledger(first["folder"]) == read_ledger(whole["folder"])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_ranks_learn_what_one_does(two: Found, one: dict[str, Any], framework: str) -> None:
    name = f"{framework}_plain"
    assert_close(two[0][name]["weights"], one[name]["weights"], 1e-4)
    assert read_ledger(two[0][name]["folder"]) == read_ledger(one[name]["folder"])
    for kind in ("start", "step", "epoch"):
        for ours, theirs in zip(events(two[0][name]["folder"], kind), events(one[name]["folder"], kind), strict=True):
            for key in theirs.keys() & {"loss", "accuracy", "lr", "train_loss", "valid_loss", "valid_accuracy", "top5"}:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-3), (kind, key)


def test_fit_and_the_tape_learn_the_same(two: Found) -> None:
    for kind in ("lively", "plain"):
        assert_close(two[0][f"keras_{kind}"]["weights"], two[0][f"tensorflow_{kind}"]["weights"], 1e-4)


def noise(folder: Path) -> dict[int, tuple[float, float]]:
    return {e["step"]: (e["gradient_square"], e["gradient_variance"]) for e in events(folder, "noise")}


@pytest.mark.parametrize("kind", ["lively", "plain"])
def test_fit_and_the_tape_measure_the_same_gradient_noise(two: Found, kind: str) -> None:
    by_fit, by_tape = (noise(two[0][f"{framework}_{kind}"]["folder"]) for framework in FRAMEWORKS)
    assert list(by_fit) == [10, 20, 30, 40]
    for step, (square, variance) in by_fit.items():
        assert by_tape[step] == pytest.approx((square, variance), rel=1e-2, abs=1e-3)
        assert variance > 0 and square + variance / 64 > 0
    biased = [event.get("biased") for event in events(two[0][f"keras_{kind}"]["folder"], "noise")]
    assert biased == [["batch norm"] if kind == "lively" else None] * 4


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_resumed_run_has_every_measured_step_once(two: Found, framework: str) -> None:
    whole, resumed = (noise(two[0][f"{framework}_{kind}"]["folder"]) for kind in ("lively", "resumed"))
    assert list(resumed) == list(whole)
    for step, pair in whole.items():
        assert resumed[step] == pytest.approx(pair, rel=1e-3, abs=1e-4)


def test_the_gradient_noise_has_no_scale_of_half_precision(two: Found) -> None:
    half, single = (noise(two[0][f"keras_{kind}"]["folder"])[10] for kind in ("fp16", "plain"))
    assert half == pytest.approx(single, rel=0.3)


def test_a_run_of_two_ranks_resumes_on_one(two: Found, one: dict[str, Any]) -> None:
    assert_close(one["fewer_ranks"]["weights"], two[0]["keras_plain"]["weights"], 1e-4)
    record = json.loads((one["fewer_ranks"]["folder"] / "record.json").read_text())
    assert [segment["ranks"] for segment in record["segments"]] == [2, 1]
    assert [epoch["ranks"] for epoch in record["history"]] == [2, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "saves"), [("jax", "11"), ("torch", "11")])
def test_the_command_resumes_with_another_backend(
    two: Found, backend: str, saves: str, tmp_path: Path, tutti: Tutti
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(two[0]["keras_plain"]["folder"], copy)
    checkpoint = str(copy / "checkpoints" / f"step-{work.CUT_AT:06d}")
    words = [f"backend={backend}", f"checkpoint={{every_steps: {saves}, every_epochs: null, best: null}}"]
    done = tutti("train", str(copy / "config.yaml"), "-n", "2", "--resume", checkpoint, *words)
    assert done.code == 0, done.all
    assert f"in Keras on {backend}" in done.out
    assert "oneDNN" not in done.err
    assert len(list(copy.glob("checkpoints/step-000044/model.keras"))) == 1
    results = json.loads((copy / "record.json").read_text())["results"]
    assert results == pytest.approx(two[0]["keras_plain"]["results"], rel=1e-3)


def test_a_checkpoint_of_keras_is_refused_in_torch(two: Found, tutti: Tutti) -> None:
    folder = two[0]["keras_plain"]["folder"]
    words = ("framework=torch", "log.noise_scale=false")
    done = tutti("train", str(folder / "config.yaml"), *words, "--resume", str(folder))
    assert done.code == 2
    assert "was made with framework=keras, which framework=torch cannot read" in done.err


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_run_folder_holds_what_torch_runs_leave(two: Found, framework: str) -> None:
    folder = two[0][f"{framework}_lively"]["folder"]
    record = json.loads((folder / "record.json").read_text())
    assert record["state"] == "finished"
    assert record["segments"][0]["framework"] == framework
    assert record["best"]["valid_accuracy"]["value"] == max(e["valid_accuracy"] for e in record["history"])
    assert record["seconds_per_epoch"] > 0
    assert record["images_per_second"]["mean"] > 0
    assert f"framework: {framework}" in (folder / "config.yaml").read_text()
    steps = events(folder, "step")
    assert [event["step"] for event in steps] == [1, 7, 14, 21, 22, 28, 35, 42, 44]
    for key in ("loss", "accuracy", "top5", "lr", "samples_per_second", "seconds", "data_seconds", "data_share"):
        assert all(key in event for event in steps)
    latest = (folder / "checkpoints" / "latest").read_text().strip()
    manifest = json.loads((folder / "checkpoints" / latest / "manifest.json").read_text())
    assert manifest["step"] == 44
    assert sorted(manifest["files"]) == ["model.keras", "optimizer.npz"]
    assert (folder / "checkpoints" / "best").is_file()


def test_some_steps_are_traced(one: dict[str, Any]) -> None:
    assert list((one["profiled"]["folder"] / "profile").rglob("*.xplane.pb"))


def test_a_loss_that_is_no_number_ends_the_run_with_its_step(one: dict[str, Any]) -> None:
    kind, text = one["bad_rate"]
    assert kind == "DivergedError"
    assert text.startswith(("the loss is nan at step ", "the loss is inf at step "))
    assert "Lower optim.lr" in text


@pytest.mark.parametrize(("place", "name"), list(enumerate(MODELS)))
def test_a_network_is_the_same_in_keras_and_torch(one: dict[str, Any], place: int, name: str) -> None:
    found = one["models"][place]
    ours, theirs = found["parameters"]
    assert ours == theirs
    assert found["size"] > 0.01
    assert found["distance"] < 1e-4 * max(1.0, found["size"])


@pytest.mark.parametrize(("place", "name"), list(enumerate(OPTIMIZERS)))
def test_an_optimizer_steps_as_torchs_does_while_the_rate_changes(one: dict[str, Any], place: int, name: str) -> None:
    assert one["optimizers"][place] < 1e-5


def test_cross_entropy_is_torchs_with_and_without_smoothing(one: dict[str, Any]) -> None:
    for expected, found in one["losses"]:
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_run_with_an_optimizer_of_keras_ends_after_max_steps(one: dict[str, Any], framework: str) -> None:
    folder = one[f"{framework}_short"]["folder"]
    record = json.loads((folder / "record.json").read_text())
    assert (record["step"], record["ended_by"]) == (30, "max_steps")
    assert (folder / "checkpoints" / "latest").read_text() == "step-000030\n"
    losses = [event["loss"] for event in events(folder, "step")]
    assert losses[-1] < 0.8 * losses[0]
    assert len(events(folder, "epoch")) == 1  # of 22 steps


def test_an_optimizer_that_is_none_of_keras_is_refused(one: dict[str, Any]) -> None:
    assert "expected a class of optimizers of Keras, for example keras.optimizers:RMSprop" in one["wrong_optimizer"]
    assert "optim: RMSprop failed with ValueError: Argument(s) not recognized: {'rhoo': 0.8}" in one["wrong_option"]


def test_a_run_is_evaluated_exported_and_begun_with(one: dict[str, Any]) -> None:
    run, after = one["keras_plain"], one["after"]
    last = events(run["folder"], "epoch")[-1]
    assert after["evaluated"] == {name: last[name] for name in ("valid_loss", "valid_accuracy", "valid_top5")}
    for mine, other, again in zip(run["weights"], after["exported"], after["weights"], strict=True):
        assert mine.tobytes() == other.tobytes() == again.tobytes()
    [start] = events(after["begun"], "start")
    assert start["valid_loss"] == pytest.approx(last["valid_loss"], rel=1e-6)
    record = json.loads((after["begun"] / "record.json").read_text())["init"]
    assert len(record["loaded"]) == len(run["weights"]) and record["missing"] == []


def test_a_run_is_applied_to_bytes_numbers_and_images(one: dict[str, Any]) -> None:
    found = one["applied"]
    assert [found["ends"][name][0] for name in ("raw", "floats", "images")] == [0, 0, 0], found["ends"]
    for name, count in (("raw", 70), ("floats", 70), ("images", 3)):
        np.testing.assert_allclose(found["written"][name], found["expected"][:count], atol=1e-5)


def test_inputs_that_a_network_of_keras_does_not_take_are_refused(one: dict[str, Any]) -> None:
    code, said = one["applied"]["ends"]["large"]
    assert code == 2 and "small_cnn fails for inputs of the shape [2, 1, 9, 9]" in said, said
    assert "large" not in one["applied"]["written"]
