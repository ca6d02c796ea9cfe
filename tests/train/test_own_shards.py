"""Loops of one's own whose models are in shards: the same run as with whole models, killed and resumed exactly."""

import shutil
from pathlib import Path
from typing import Any

import own_shards_work as work
import pytest
import torch
from own_work import run_example
from rank_jobs import read_ledger, read_losses, run_ranks
from torch.utils._pytree import tree_leaves

from tutti.after.run import export, open_run
from tutti.checkpoint.store import read_kept
from tutti.errors import TrainingError

pytestmark = pytest.mark.ranks
EPOCHS, KILL_AT = {"gan": 6, "pinn": 10}, 9  # between checkpoints and within a log window
Trained = tuple[Path, list[dict[str, int]]]


def train(
    ranks: int, out: Path, shard: Any, name: str = "gan", resume: Path | None = None, killed: bool = False
) -> Trained:
    """Run an example; its folder, and how many parameters each rank holds."""
    kill_at = KILL_AT if killed else None
    arguments = (name, str(out), EPOCHS[name], str(resume) if resume else None, kill_at, shard, name == "pinn")
    counts = run_ranks(ranks, run_example, *arguments, expect_failure=killed)
    (folder,) = (out / name).iterdir()
    return folder, counts


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on one rank, without shards."""
    return train(1, tmp_path_factory.mktemp("whole"), "none")[0]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run on two ranks that was not interrupted."""
    return train(2, tmp_path_factory.mktemp("sharded"), "all")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on two ranks that were killed."""
    return train(2, tmp_path_factory.mktemp("killed"), "all", killed=True)[0]


def state_of(folder: Path) -> list[Any]:
    """All values in the last checkpoint, whole tensors as bytes."""
    checkpoints = folder / "checkpoints"
    state = read_kept(checkpoints / (checkpoints / "latest").read_text().strip(), alone=True)
    return [each.numpy().tobytes() if isinstance(each, torch.Tensor) else each for each in tree_leaves(state)]


def resumed(killed: Path, out: Path, ranks: int, shard: Any) -> Path:
    """The folder of a run that continues a copy of a killed one."""
    copy = Path(shutil.copytree(killed, out / killed.parent.name / killed.name))
    return train(ranks, out, shard, killed.parent.name, resume=copy)[0]


def assert_same_run(ours: Path, theirs: Path) -> None:
    assert read_ledger(ours) == read_ledger(theirs)
    found, wanted = read_losses(ours), read_losses(theirs)
    assert [row[:2] for row in found] == [row[:2] for row in wanted]
    assert [row[2] for row in found] == pytest.approx([row[2] for row in wanted], rel=2e-5)


def test_shards_are_the_same_run_and_a_rank_holds_its_part(whole: Path, sharded: Trained) -> None:
    folder, counts = sharded
    assert_same_run(folder, whole)
    number = counts[0]["all"]
    assert [each["all"] for each in counts] == [number, number]
    assert sum(each["held"] for each in counts) == number  # no element twice
    assert all(each["held"] == pytest.approx(number / 2, rel=0.01) for each in counts)


def test_replicas_of_shards_are_the_same_run(whole: Path, tmp_path: Path) -> None:
    folder, counts = train(4, tmp_path, 2)
    assert_same_run(folder, whole)
    assert sum(each["held"] for each in counts) == 2 * counts[0]["all"]


def test_a_killed_run_resumes_to_the_same_bits(sharded: Trained, killed: Path, tmp_path: Path) -> None:
    folder = resumed(killed, tmp_path, 2, "all")
    assert state_of(folder) == state_of(sharded[0])
    assert read_losses(folder) == read_losses(sharded[0])
    assert read_ledger(folder) == read_ledger(sharded[0])


@pytest.mark.parametrize(("ranks", "shard"), [(1, "none"), (2, "none"), (4, "all")])
def test_a_killed_run_resumes_on_another_layout(
    whole: Path, killed: Path, tmp_path: Path, ranks: int, shard: str
) -> None:
    assert_same_run(resumed(killed, tmp_path, ranks, shard), whole)


def test_a_run_without_shards_resumes_in_shards(whole: Path, tmp_path: Path) -> None:
    begun, _ = train(1, tmp_path / "whole", "none", killed=True)
    assert_same_run(resumed(begun, tmp_path, 2, "all"), whole)


def test_a_sharded_run_is_opened_and_exported(whole: Path, sharded: Trained, tmp_path: Path) -> None:
    ours, theirs = open_run(sharded[0]).weights("last"), open_run(whole).weights("last")
    assert {name: value.shape for name, value in ours.items()} == {name: value.shape for name, value in theirs.items()}
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-3, atol=1e-5)
    path, _ = export(open_run(sharded[0]), "torch", tmp_path / "gan.pt", "last", force=False)
    exported = torch.load(path, weights_only=True)
    assert {name: value.tolist() for name, value in exported.items()} == {k: v.tolist() for k, v in ours.items()}


def test_second_derivatives_are_the_same_run_where_the_step_is_not_of_lbfgs(tmp_path: Path) -> None:
    reference, _ = train(1, tmp_path / "whole", "none", "pinn")
    assert_same_run(train(2, tmp_path / "sharded", "all", "pinn")[0], reference)
    (error, *_) = run_ranks(2, run_example, "pinn", str(tmp_path), 1, None, None, "all", expect_failure=True)
    assert isinstance(error, TrainingError)
    assert str(error).startswith("run.keep(newton=...): L-BFGS with parallel.shard=all: expected an optimizer that upd")


@pytest.mark.parametrize(("ranks", "shard"), [(2, "all"), (4, 2)])
def test_gradients_of_shards_are_those_of_whole_models(tmp_path: Path, ranks: int, shard: Any) -> None:
    (wanted,) = run_ranks(1, work.train, str(tmp_path), "none", tuple(work.LOSSES))
    for found in run_ranks(ranks, work.train, str(tmp_path), shard, tuple(work.LOSSES)):
        for name in work.LOSSES:
            assert tree_leaves(found[name]) == pytest.approx(tree_leaves(wanted[name]), rel=1e-9, abs=1e-12), name


def test_passes_leave_gradients_in_what_they_name(tmp_path: Path) -> None:
    (wanted,) = run_ranks(1, work.passed, str(tmp_path), "none")
    assert wanted["judge_untouched"] and not any(wanted["judge"][2])
    ours = run_ranks(2, work.passed, str(tmp_path), "all")
    for found in ours:
        assert found["units"] == ["", "blocks.0", "blocks.2"]
        assert found["judge_untouched"] and found["in_shards"]
        assert found["reduced"] == 3  # the units of the one that is named
        for name in ("judge", "maker", "maker_twice", "parts", "steep"):
            assert tree_leaves(found[name]) == pytest.approx(tree_leaves(wanted[name]), rel=1e-9, abs=1e-12), name
    assert sum(found["held"][0] for found in ours) == ours[0]["held"][1]
    assert sorted(ours[0]["shared"] + ours[1]["shared"]) == [[0.0, 1.0], [2.0, 3.0, 4.0]]


def test_mistakes_with_shards_are_named(tmp_path: Path) -> None:
    found, *_ = run_ranks(4, work.mistakes, str(tmp_path))
    begins = {
        "lbfgs all": "TrainingError: run.keep(newton=...): L-BFGS with parallel.shard=all: expected an optimizer that ",
        "early all": "TrainingError: run.keep(sgd=...): SGD steps parameters that no kept model has, with parallel.sha",
        "penalty all": "TrainingError: run.backward(loss): the loss is in shards, as a sum over parameters is with par",
        "stale all": "TrainingError: a backward pass meets a forward pass from before a step of the optimizer, with pa",
        "three 3": "ConfigError: parallel.shard=3 on 4 ranks with the same layers: expected a divisor of 4.",
        "three some": "ConfigError: parallel.shard",
    }
    assert {key: found[key][: len(text)] for key, text in begins.items()} == begins
