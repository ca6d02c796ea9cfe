"""Loops of one's own: the same run on any number of ranks, killed and resumed exactly."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import own_work as work
import pytest
import torch
from conftest import Tutti
from rank_jobs import read_ledger, read_losses, run_ranks
from torch.utils._pytree import tree_leaves

import tutti
from tutti.after.apply import apply
from tutti.after.evaluate import check_split
from tutti.after.run import export, open_run
from tutti.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.ranks
# Killed between checkpoints and within a log window; of the second, in the part that L-BFGS steps.
EXAMPLES = {"gan": {"epochs": 6, "kill_at": 9}, "pinn": {"epochs": 24, "kill_at": 23}}
Runs = dict[int, Path]


def run(ranks: int, name: str, out: Path, resume: Path | None = None, killed: bool = False) -> Path:
    """Run an example; its folder."""
    asked = EXAMPLES[name]
    kill_at = asked["kill_at"] if killed else None
    arguments = (name, str(out), asked["epochs"], str(resume) if resume else None, kill_at)
    run_ranks(ranks, work.run_example, *arguments, expect_failure=killed)
    (folder,) = (out / name).iterdir()
    return folder


@pytest.fixture(scope="module", params=["gan", "pinn"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def whole(name: str, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The folders of runs that were not interrupted, by their numbers of ranks."""
    return {ranks: run(ranks, name, tmp_path_factory.mktemp(f"{name}-{ranks}")) for ranks in (1, 2, 4)}


def state_of(folder: Path) -> list[Any]:
    """All values in the last checkpoint, tensors as bytes."""
    checkpoints = folder / "checkpoints"
    state = torch.load(checkpoints / (checkpoints / "latest").read_text().strip() / "state.pt", weights_only=True)
    return [each.numpy().tobytes() if isinstance(each, torch.Tensor) else each for each in tree_leaves(state)]


def folder_log(folder: Path) -> str:
    return (folder / "logs" / "rank-0.log").read_text()


def assert_same_losses(ours: Path, theirs: Path) -> None:
    found, wanted = read_losses(ours), read_losses(theirs)
    assert [row[:2] for row in found] == [row[:2] for row in wanted]
    assert [row[2] for row in found] == pytest.approx([row[2] for row in wanted], rel=2e-5)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_same_samples_and_losses_on_any_number_of_ranks(whole: Runs, ranks: int) -> None:
    assert read_ledger(whole[ranks]) == read_ledger(whole[1])
    assert_same_losses(whole[ranks], whole[1])


def test_a_killed_run_resumes_to_the_same_bits_on_its_ranks(name: str, whole: Runs, tmp_path: Path) -> None:
    killed = run(2, name, tmp_path, killed=True)
    resumed = run(2, name, tmp_path, resume=killed)
    assert state_of(resumed) == state_of(whole[2])
    assert read_losses(resumed) == read_losses(whole[2])
    assert read_ledger(resumed) == read_ledger(whole[2])


def test_a_killed_run_resumes_on_other_ranks(name: str, whole: Runs, tmp_path: Path) -> None:
    killed = run(4, name, tmp_path, killed=True)
    resumed = run(1, name, tmp_path, resume=killed)
    assert read_ledger(resumed) == read_ledger(whole[1])
    assert_same_losses(resumed, whole[1])


def test_a_run_is_opened_with_the_modules_of_its_script(name: str, whole: Runs) -> None:
    opened, state = open_run(whole[2]), state_of(whole[2])
    applied = (opened.checkpoint("last"), "none.npy", Path("none_out.npy"))
    weights = opened.weights("last")
    assert all(value.numpy().tobytes() in state for value in weights.values())
    with pytest.raises(ConfigError, match=f"was trained by the script {name}, which makes its models itself"):
        opened.model("last")
    for command in (partial(export, opened, "onnx", None, "last", False), partial(apply, opened, *applied)):
        with pytest.raises(ConfigError, match=f"trained by the script {name}, .* --to safetensors writes the weights"):
            command()
    with pytest.raises(ConfigError, match=f"trained by the script {name}, in a loop of its own, which alone knows"):
        check_split(opened.config, "valid")
    shape = {key: list(value.shape) for key, value in weights.items()}
    begin = "generator" if name == "gan" else "network"
    first, *_ = (key for key in shape if key.startswith(begin) and key.endswith("weight"))
    assert shape[first] == ([64, 4] if name == "gan" else [32, 1])


TWO_RUNS = """
import sys, torch, tutti
from torch import nn
samples = torch.utils.data.TensorDataset(torch.ones(8, 1), torch.ones(8, 1))
for name, epochs, resume in (("first", 1, None), ("second", 2, sys.argv[1] if sys.argv[1:] else None)):
    with tutti.start(name, samples, batch=4, epochs=epochs, resume=resume) as run:
        line = run.model(nn.Linear(1, 1))
        run.keep(line=line)
        for inputs, _ in run.batches():
            run.log(loss=run.backward(line(inputs).mean(), line))
            if resume:
                raise ValueError("a mistake of the script")
"""


def test_every_run_of_a_script_has_a_folder_of_its_own_which_is_named(tutti: Tutti, tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO_RUNS)
    done = tutti("run", "-n", "2", "two.py")
    assert done.code == 0, done.all
    (first,), (second,) = ([*(tmp_path / "runs" / name).iterdir()] for name in ("two", "second"))
    assert [open_run(each).record["recipe"] for each in (first, second)] == ["first", "second"]
    assert [open_run(each).checkpoints[-1].step for each in (first, second)] == [2, 4]
    first, second = first.relative_to(tmp_path), second.relative_to(tmp_path)
    assert done.out.endswith(f"run folder: {first}\nrun folder: {second}\nlogs of the script: {first}/logs\n")
    failed = tutti("run", "-n", "2", "two.py", f"{second}/checkpoints/step-000002")
    assert failed.code == 1 and "ValueError: a mistake of the script" in failed.err
    assert f"run folder: {second}\nlogs of the script: runs/two/" in failed.err
    assert (open_run(tmp_path / second).record["state"]) == "failed"


def test_gradients_are_averaged_and_absent_ones_stay_absent() -> None:
    assert run_ranks(2, work.averaged) == [[[3.0] * 3, [3.0] * 2, None, [1.0]], [[3.0] * 3, [3.0] * 2, None, [2.0]]]


def test_validation_is_shared_by_the_ranks_and_written_with_its_epoch(tmp_path: Path) -> None:
    first, second = run_ranks(2, work.validated, str(tmp_path))
    assert sorted(first[0][:4] + second[0][:4]) == [float(number) for number in range(8)]
    assert first[1] == second[1] == [3.5, 3.5]
    rows = [json.loads(line) for line in (first[2] / "metrics.jsonl").read_text().splitlines()]
    assert [row["valid_loss"] for row in rows if row["event"] == "epoch"] == [3.5, 3.5]


def test_mistakes_of_a_script_are_named(tmp_path: Path) -> None:
    (found,) = run_ranks(1, work.mistakes, str(tmp_path))
    begins = {
        "nothing_kept": "TrainingError: the loop begins with nothing to save: expected run.keep(model=..., optim",
        "no_loss": "TrainingError: step 1 ended without a loss: expected run.log(loss=...) in every step.",
        "other_names": "TrainingError: run.log(loss, value2): expected the values of the steps before, loss, value1.",
        "kept_late": "TrainingError: run.keep(...) after the first batch: expected it before the loop.",
        "epoch_early": "TrainingError: run.log_epoch(...) within an epoch: expected it where run.ends_epoch is true.",
        "no_models": "TrainingError: run.backward(loss) without models: expected those whose gradients are averaged.",
        "no_state": "TrainingError: run.keep(number=...): int has no state_dict() and load_state_dict(): expected a",
        "too_early": "TrainingError: the loop has not begun: expected this within `for batch in run.batches():`.",
        "not_finite": "DivergedError: the loss is nan at step 1 (epoch 1) on rank 0, whose batch holds samples ",
        "staged": "ConfigError: parallel.stages=2 with parallel.shard: expected one of them.",
        "tensor": "ConfigError: parallel.tensor=2 with a loop of your own: expected models that the script steps, ",
        "noise": "ConfigError: log.noise_scale=true with a loop of your own: expected models that the script steps, ",
        "best": "TrainingError: the epoch of step 1 ended without valid_loss, which checkpoint.best, stop_at or ",
        "batch": "ConfigError: a global batch of 9 is larger than the 8 training samples",
        "no_batch": "ConfigError: batch.global=0 (start()): expected a number greater than 0.",
        "not_one_number": "TrainingError: run.log: loss is of the shape [2, 1]: expected one real number. Give a mean ",
        "no_number": "TrainingError: run.log: loss is 'small': expected one real number.",
        "taken_name": "TrainingError: run.log: the name lr is one that every line of metrics.jsonl may have: expected",
        "taken_epoch": "TrainingError: run.log_epoch: the name train_loss is one that every line of metrics.jsonl may ",
        "many_losses": "TrainingError: run.backward(loss): the loss is of the shape [2, 1]: expected a tensor of one ",
        "no_module": "TrainingError: run.backward(loss, Parameter): expected modules whose gradients are averaged. ",
        "no_model": "TrainingError: run.model(3): expected a torch.nn.Module",
        "no_share": "TrainingError: run.share(data, batch=-1): expected 1 or more samples",
        "many_averages": "TrainingError: run.average: value is of the shape [2]: expected one real number.",
        "precision": "ConfigError: precision=bf16 with a loop of your own: the script chooses it with torch.autocast. ",
        "compile": "ConfigError: speed.compile=true with a loop of your own: call compile() of each model where it is ",
        "buckets": "ConfigError: ddp.bucket_mb=5.0 with a loop of your own: run.backward averages gradients. Leave ddp",
        "optim": "ConfigError: tutti.start(optim=...): expected other keys of a recipe; the script makes its optimizer",
        "metrics": "ConfigError: tutti.start(metrics=...): expected other keys of a recipe; the script computes them, ",
    }
    assert {key: found[key][: len(text)] for key, text in begins.items()} == begins
    for unused in ("no_state", "no_model", "too_early", "many_averages"):
        assert not (tmp_path / unused).exists()


@pytest.mark.parametrize("logs", [True, False])
def test_a_loop_that_is_left_ends_its_run_with_a_checkpoint(tmp_path: Path, logs: bool) -> None:
    """The step in which it is left counts where it was logged."""
    first, second = run_ranks(2, work.leave, str(tmp_path), 5, logs)
    assert first[0] == second[0] == (6 if logs else 5)
    record = first[1]
    assert (record["state"], record["ended_by"]) == ("finished", "script")
    (folder,) = (tmp_path / "left").iterdir()
    losses = [row[2] for row in read_losses(folder)]
    assert losses == [0.0, 2.0, 1.5, *([4.5] if logs else [])]
    assert f"stopped after step {first[0]} of 12: the script has left its loop" in folder_log(folder)


@pytest.mark.parametrize(
    ("resume", "said"),
    [
        ("latest", "no run of 'own' in 'runs' has a checkpoint. Start one without resume, or give the path of a run"),
        ("nowhere", "resume='nowhere': no such folder. Give a run folder or one of its checkpoints/step-*."),
        (".", "resume='.' is neither a run folder nor a checkpoint inside one."),
    ],
)
def test_a_checkpoint_that_a_script_asks_for_in_vain_is_told_by_its_argument(
    resume: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        tutti.start("own", torch.utils.data.TensorDataset(torch.zeros(4, 1)), batch=2, epochs=1, resume=resume)
    assert str(caught.value).startswith(said)


def test_processes_that_read_samples_are_a_keyword(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = torch.utils.data.TensorDataset(torch.zeros(4, 1), torch.zeros(4, 1))
    assert tutti.start("own", samples, batch=2, epochs=1, workers=2).config.data.workers == 2
    monkeypatch.setattr("tutti.train.torch.run_rank", lambda framework, config, placement: config)
    options: dict[str, Any] = {"optim": {"name": "sgd", "lr": 0.1}, "batch": {"global": 2}, "epochs": 1}
    config: Any = tutti.fit(torch.nn.Linear(1, 1), samples, data={"workers": 2}, **options)
    assert (config.data.workers, config.data.name) == (2, "torch.utils.data.dataset:TensorDataset")
    for given, said in (
        ({"metrics": ["accuracy"]}, r"^metrics=\['accuracy'\]: expected functions by their names"),
        ({"loss": "mse"}, r"^loss='mse': expected a function of outputs and targets, or a module"),
    ):
        with pytest.raises(ConfigError, match=said):
            tutti.fit(torch.nn.Linear(1, 1), samples, **given, **options)
