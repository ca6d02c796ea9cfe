"""Ranks try suggested changes in one session, keep those that help, and write a recipe."""

import json
from pathlib import Path

import pytest
import tune_work
from conftest import REPOSITORY, Tutti, command
from prepared import PYTHON
from rank_jobs import run_ranks

from tutti.bench.tune import Budget, TuneRequest
from tutti.cli.main import app
from tutti.config.load import resolve
from tutti.errors import ConfigError


@pytest.fixture
def sleepy(tmp_path: Path) -> Path:
    """A recipe that is bound by data loading."""
    path = tmp_path / "sleepy.yaml"
    path.write_text(tune_work.RECIPE)
    return path


def test_a_budget_is_spent_when_the_longest_of_the_last_changes_would_exceed_it() -> None:
    now = [0.0]
    budget = Budget(100.0, lambda: now[0])
    for end, spent in [(10.0, False), (45.0, False), (66.0, True)]:
        now[0] = end
        budget.lap()
        assert budget.is_spent is spent


def test_a_budget_forgets_a_first_change_that_took_long() -> None:
    now = [0.0]
    budget = Budget(100.0, lambda: now[0])
    for end, spent in [(60.0, True), (62.0, True), (64.0, True), (66.0, False), (99.0, True)]:
        now[0] = end
        budget.lap()
        assert budget.is_spent is spent


@pytest.mark.parametrize(("minutes", "seconds"), [(0.01, 0.5), (1.0, 3.0), (5.0, 15.0), (60.0, 15.0)])
def test_changes_are_measured_for_less_time_under_a_small_budget(minutes: float, seconds: float) -> None:
    assert TuneRequest("digits", (), minutes, (), None).seconds == seconds


@pytest.mark.system
def test_loader_processes_are_found_kept_and_written(sleepy: Path, tmp_path: Path) -> None:
    words = (str(sleepy), str(tmp_path / "runs"), str(tmp_path / "fast.yaml"))
    done = command(PYTHON, tune_work.__file__, *words, cwd=tmp_path, PYTHONPATH=str(REPOSITORY / "tests"))
    assert done.code == 0, done.all
    found = json.loads(done.out.splitlines()[-1])
    assert found["kept"] == {"data.workers": "4"}
    assert found["gain"] > 1.02
    assert found["shown"] == ["as it is", "data.workers=4"]
    folder = Path(found["folder"])
    for path in (tmp_path / "fast.yaml", folder / "tuned.yaml"):
        assert resolve(str(path)).config.data.workers == 4
    result = json.loads((folder / "tune.json").read_text())
    assert [change["kept"] for change in result["rungs"]] == [True, True]
    assert [each["name"] for each in result["measurements"]] == ["as it is", "data.workers=4"]
    assert json.loads((folder / "record.json").read_text())["state"] == "finished"


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_tune_and_print_the_changes(sleepy: Path, tutti: Tutti, tmp_path: Path) -> None:
    done = tutti("tune", sleepy.name, "-n", "2", "--minutes", "0.6", PYTHONPATH=str(REPOSITORY / "tests"))
    assert done.code == 0, done.all
    assert "data.workers=4:" in done.out
    assert "times as fast as sleepy.yaml" in done.out
    (folder,) = (tmp_path / "runs" / "tune" / "sleepy").iterdir()
    assert (folder / "tune.png").read_bytes().startswith(b"\x89PNG")
    shown = tutti("show", str(folder / "tuned.yaml"), PYTHONPATH=str(REPOSITORY / "tests"))
    assert shown.code == 0, shown.all
    assert "tuned.yaml [base]" in shown.out


@pytest.mark.ranks
def test_what_cannot_be_measured_is_the_same_error_on_all_ranks(sleepy: Path, tmp_path: Path) -> None:
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
        (
            ["digits", "framework=keras", "batch.micro=null"],
            "framework=keras cannot be tuned: expected torch. Set framework=torch.",
        ),
        (["digits", "--write", "there.yaml"], "--write there.yaml: a file that tutti tune did not write is there."),
        (["digits", "optim.lrr=1"], "unknown key 'optim.lrr'"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there.yaml").write_text("extends: digits\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        app(["tune", *words], standalone_mode=False)
    assert message in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["there.yaml"]


@pytest.mark.system
def test_bad_input_is_one_message_and_leaves_nothing(tutti: Tutti, tmp_path: Path) -> None:
    done = tutti("tune", "digits", "-n", "2", "--allow", "btach")
    assert done.code == 2
    assert done.all == "error: --allow btach: expected one of precision, batch. Did you mean 'batch'?\n"
    assert not list(tmp_path.iterdir())
