"""Ranks try what is suggested in one meeting, keep what helps and write it down."""

import json
from pathlib import Path

import pytest
import tune_work
from conftest import Tutti
from ranks import run_ranks

from tutti.bench.tune import Asked, Budget
from tutti.config.load import resolve


@pytest.fixture
def sleepy(tmp_path: Path) -> Path:
    """A recipe that is bound by reading."""
    path = tmp_path / "sleepy.yaml"
    path.write_text(tune_work.RECIPE)
    return path


def test_a_budget_is_spent_when_the_longest_of_the_last_rungs_would_pass_it() -> None:
    now = [0.0]
    budget = Budget(100.0, lambda: now[0])
    for end, spent in [(10.0, False), (45.0, False), (66.0, True)]:
        now[0] = end
        budget.lap()
        assert budget.is_spent is spent


def test_a_budget_forgets_a_first_rung_that_was_long() -> None:
    now = [0.0]
    budget = Budget(100.0, lambda: now[0])
    for now[0] in (50.0, 52.0, 54.0):
        budget.lap()
    assert not budget.is_spent
    now[0] = 56.0
    budget.lap()
    now[0] = 97.0
    assert not budget.is_spent


@pytest.mark.parametrize(("minutes", "seconds"), [(0.01, 0.5), (1.0, 3.0), (5.0, 15.0), (60.0, 15.0)])
def test_rungs_are_measured_shorter_under_a_small_budget(minutes: float, seconds: float) -> None:
    assert Asked("digits", (), minutes, (), None).seconds == seconds


@pytest.mark.ranks
def test_loader_processes_are_found_kept_and_written(sleepy: Path, tmp_path: Path) -> None:
    written = tmp_path / "fast.yaml"
    found = run_ranks(2, tune_work.climb, str(sleepy), str(tmp_path / "runs"), str(written))
    assert [each["kept"] for each in found] == [{"data.workers": "4"}] * 2
    assert found[0]["gain"] == found[1]["gain"] > 1.02
    assert [each["shown"] for each in found] == [["as it is", "data.workers=4"], []]
    for path in (written, found[0]["folder"] / "tuned.yaml"):
        assert resolve(str(path)).config.data.workers == 4
    result = json.loads((found[0]["folder"] / "tune.json").read_text())
    assert [rung["kept"] for rung in result["rungs"]] == [True, True]
    assert [each["name"] for each in result["measurements"]] == ["as it is", "data.workers=4"]
    assert json.loads((found[0]["folder"] / "record.json").read_text())["state"] == "finished"


@pytest.mark.ranks
def test_what_cannot_be_measured_is_told_by_all_ranks_the_same(sleepy: Path, tmp_path: Path) -> None:
    overrides = [("batch.per_rank=40",), ("data.milliseconds=slow",), ("data.worker=1",)]
    first, second = run_ranks(2, tune_work.fail, str(sleepy), str(tmp_path / "runs"), overrides)
    assert first == second
    assert first[0].startswith("a global batch of 80 is larger than the 64 training samples")
    assert "Sleepy failed with TypeError" in first[1]
    assert "Sleepy takes no such option" in first[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digits", "--minutes", "0"], "--minutes 0: expected a number above 0. Try 5."),
        (["digits", "--minutes", "nan"], "--minutes nan: expected a number above 0. Try 5."),
        (
            ["digits", "--allow", "precison"],
            "--allow precison: expected one of precision, batch. Did you mean 'precision'?",
        ),
        (["digits", "framework=keras"], "framework=keras cannot be tuned: expected torch. Set framework=torch."),
        (["digits", "--write", "there.yaml"], "--write there.yaml: a file that tutti tune did not write is there."),
        (["digits", "optim.lrr=1"], "unknown key 'optim.lrr'"),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(
    words: list[str], message: str, tutti: Tutti, tmp_path: Path
) -> None:
    (tmp_path / "there.yaml").write_text("extends: digits\n")
    done = tutti("tune", *words)
    assert done.code == 2
    assert message in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["there.yaml"]
