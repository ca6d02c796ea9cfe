"""Recipes with a training step of the user's own: the same run as the script, on any ranks, killed and resumed."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import own_work as work
import pytest
import torch
from conftest import REPOSITORY, Tutti
from rank_jobs import read_ledger, read_losses, run_ranks
from small_config import small_config
from torch import nn

from tutti.after.run import open_run
from tutti.bench.measure import Variant, check
from tutti.cli.ranks import begun_run
from tutti.config.load import change, load
from tutti.config.recipes import read_yaml
from tutti.errors import CheckpointError, ConfigError, TrainingError
from tutti.memory.prediction import predict
from tutti.optim.optimizers import build_optimizers
from tutti.train.metrics import StepValues
from tutti.train.own_step import check_optimizers

RECIPE = REPOSITORY / "examples" / "gan.yaml"
EPOCHS, KILL_AT = 6, 9  # between checkpoints and within a log window
Trained = dict[str, Any]


def train(ranks: int, out: Path, resume: Path | None = None, kill_at: int | None = None) -> Trained:
    values = {"out": str(out), "epochs": EPOCHS, "ema": {"decay": 0.9}, "schedule": {"decay": "cosine"}}
    arguments = (values, str(resume) if resume else None, kill_at)
    return run_ranks(ranks, work.train_recipe, *arguments, expect_failure=kill_at is not None)[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Trained]:
    """Runs that were not interrupted, by their numbers of ranks."""
    return {ranks: train(ranks, tmp_path_factory.mktemp(f"on-{ranks}")) for ranks in (1, 2)}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on 2 ranks that were killed."""
    out = tmp_path_factory.mktemp("killed")
    train(2, out, kill_at=KILL_AT)
    (folder,) = (out / "gan").iterdir()
    return folder


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def newest(folder: Path) -> Path:
    checkpoints = folder / "checkpoints"
    return checkpoints / (checkpoints / "latest").read_text().strip()


def validated(folder: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in each.items() if k.startswith("valid")} for each in events(folder)]


@pytest.mark.ranks
def test_the_same_run_on_two_ranks(whole: dict[int, Trained]) -> None:
    assert read_ledger(whole[2]["folder"]) == read_ledger(whole[1]["folder"])
    ours, theirs = read_losses(whole[2]["folder"]), read_losses(whole[1]["folder"])
    assert [row[2] for row in ours] == pytest.approx([row[2] for row in theirs], rel=2e-5)
    for found, wanted in zip(validated(whole[2]["folder"]), validated(whole[1]["folder"]), strict=True):
        assert found == pytest.approx(wanted, rel=2e-4)
    assert set(validated(whole[1]["folder"])[0]) == {"valid_loss", "valid_loss_ema"}
    step = next(each for each in events(whole[1]["folder"]) if each["event"] == "step")
    assert {"loss", "critic", "lr"} <= set(step)


@pytest.mark.ranks
def test_the_recipe_is_the_same_run_as_the_script(tmp_path: Path) -> None:
    values = {"out": str(tmp_path / "recipe"), "epochs": 2}
    ours = run_ranks(1, work.train_recipe, values)[0]["folder"]
    run_ranks(1, work.run_example, "gan", str(tmp_path), 2)
    (theirs,) = (tmp_path / "gan").iterdir()
    assert read_ledger(ours) == read_ledger(theirs)
    steps = [
        [(each["loss"], each["critic"]) for each in events(folder) if each["event"] == "step"]
        for folder in (ours, theirs)
    ]
    assert steps[0] == steps[1]
    assert len(steps[0]) == 3


@pytest.mark.ranks
def test_a_killed_run_resumes_to_the_same_bits(whole: dict[int, Trained], killed: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(killed, tmp_path / "gan" / killed.name))
    resumed = train(2, tmp_path, newest(copy))
    assert resumed["weights"] == whole[2]["weights"]
    assert read_losses(copy) == read_losses(whole[2]["folder"])
    assert read_ledger(copy) == read_ledger(whole[2]["folder"])
    assert validated(copy) == validated(whole[2]["folder"])
    states = [torch.load(newest(each) / "optimizers.pt", weights_only=True) for each in (copy, whole[2]["folder"])]
    assert str(states[0]) == str(states[1])


@pytest.mark.ranks
def test_a_killed_run_resumes_on_one_rank(whole: dict[int, Trained], killed: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(killed, tmp_path / "gan" / killed.name))
    resumed = train(1, tmp_path, newest(copy))
    assert read_ledger(copy) == read_ledger(whole[1]["folder"])
    assert resumed["weights"] == pytest.approx(whole[1]["weights"], rel=1e-3, abs=1e-5)


@pytest.mark.ranks
def test_a_run_is_evaluated_and_opened_as_any_other(whole: dict[int, Trained], tutti: Tutti) -> None:
    folder = whole[2]["folder"]
    done = tutti("evaluate", str(folder), "-n", "1", PYTHONPATH=str(RECIPE.parent))
    assert done.code == 0, done.all
    assert f"valid loss {validated(folder)[-1]['valid_loss']:.4f}" in done.out
    weights = open_run(folder).weights("last")
    assert list(weights["generator.0.weight"].shape) == [64, 4]
    assert list(weights["critic.0.weight"].shape) == [64, 2]


def test_a_run_finds_the_modules_of_its_recipe_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    (tmp_path / "record.json").write_text(json.dumps({"segments": [{"python_path": f"{RECIPE.parent}:/absent"}]}))
    begun_run(tmp_path, None)
    assert str(RECIPE.parent) in sys.path and "/absent" not in sys.path
    assert str(RECIPE.parent) in os.environ["PYTHONPATH"].split(os.pathsep)


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("parallel.shard=all", "every rank holds whole models"),
        ("parallel.recompute=layers", "every rank holds whole models"),
        ("batch.micro=4", "the function gets the whole batch of its rank, and may split it"),
        ("precision=bf16", "the function chooses it with torch.autocast"),
        ("optim.clip_norm=1.0", "the function clips with torch.nn.utils.clip_grad_norm_ after run.backward"),
        ("speed.compile=true", "call compile() of each model where it is made"),
        ("log.noise_scale=true", "only the function knows the gradients of its step"),
        ("ddp.find_unused_parameters=true", "run.backward averages gradients"),
    ],
)
def test_what_has_no_meaning_is_refused_with_the_way_out(override: str, instead: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(str(RECIPE), override)
    key = override.partition("=")[0]
    assert str(refused.value) == (
        f"{override} with step=gan_recipe:step: {instead}. Leave {key} out, or leave step out."
    )


def test_commands_that_take_a_step_apart_refuse_it() -> None:
    config = load(str(RECIPE))
    with pytest.raises(ConfigError, match=r"^step=gan_recipe:step cannot be measured in parts: expected a recipe w"):
        check([Variant("base", (), config)], 1, 5, 20.0)
    with pytest.raises(ConfigError, match=r"^step=gan_recipe:step: expected a recipe without step, whose memory"):
        predict(config, 1)
    with pytest.raises(ConfigError, match=r"^step=gan_recipe:step with framework=keras: steps of your own exist in t"):
        change(small_config(), ["framework=keras", "step=gan_recipe:step"])


def test_options_of_a_step_are_overridden_beside_its_name() -> None:
    config = load(str(RECIPE), "step.weight=0.5")
    assert config.step is not None
    assert (config.step.name, config.step.options()) == ("gan_recipe:step", {"weight": 0.5})
    other = change(config, ["step=elsewhere:step"]).step
    assert other is not None and (other.name, other.options()) == ("elsewhere:step", {})
    assert read_yaml(RECIPE)["step"] == "gan_recipe:step"
    with pytest.raises(ConfigError, match=r"'gan_recipe': expected module:function, a training step of your own"):
        load(str(RECIPE), "step=gan_recipe")


def test_optimizers_are_made_for_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(RECIPE.parent)])
    config, model = load(str(RECIPE)), nn.ModuleDict({"generator": nn.Linear(1, 1), "critic": nn.Linear(1, 1)})
    assert set(build_optimizers(config.optim, model)) == {"make", "judge"}
    lbfgs = change(config, ["optim={name: torch.optim:LBFGS, lr: 0.5}"]).optim
    assert isinstance(build_optimizers(lbfgs, model), torch.optim.LBFGS)
    with pytest.raises(
        ConfigError, match=r"^optim\.name='types:SimpleNamespace' gave a SimpleNamespace: expected an op"
    ):
        build_optimizers(change(config, ["optim={name: 'types:SimpleNamespace', lr: 0.5}"]).optim, model)


def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path: Path) -> None:
    torch.save({"make": {}, "judge": {}}, tmp_path / "optimizers.pt")
    check_optimizers(tmp_path, {"judge": 1, "make": 2})
    with pytest.raises(CheckpointError, match=r"holds the optimizers judge, make, and this run has optimizer\. Resume"):
        check_optimizers(tmp_path, nn.Linear(1, 1))


@pytest.mark.ranks
def test_a_step_without_a_loss_is_named(tmp_path: Path) -> None:
    values = {"out": str(tmp_path), "step": "own_work:step_without_loss"}
    (error,) = run_ranks(1, work.train_recipe, values, expect_failure=True)
    assert str(error) == (
        "step.name='own_work:step_without_loss' returned {'critic': 1.0} in step 1: expected the loss, or a mapping "
        "from names to values with loss among them."
    )


def test_values_of_steps_beside_those_of_validation() -> None:
    values = StepValues(("loss", "accuracy"), 4, torch.device("cpu"))
    values.add({"loss": torch.tensor(2.0), "critic": 1.0}, "the step returned")
    values.add({"loss": torch.tensor(4.0), "critic": 3.0}, "the step returned")
    assert values.names == ("loss", "accuracy", "critic")
    assert values.totals().tolist() == [24.0, 0.0, 16.0, 8.0, 0.0, 8.0]
    saved = values.totals().tolist()
    values.put(saved, is_first=False)
    assert values.totals().tolist() == [0.0] * 6
    values.put(saved, is_first=True)
    assert values.totals().tolist() == saved
    with pytest.raises(TrainingError, match=r"^the step returned\(loss\): expected the values of the steps before, lo"):
        values.add({"loss": 1.0}, "the step returned")
