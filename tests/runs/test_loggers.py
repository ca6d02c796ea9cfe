"""Loggers are given each event once, and none of them can end or stall a run."""

import json
import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from read_loggers import read_csv, read_tensorboard
from small_config import small_config
from waiting import wait_until

from tutti.config.check import check_loggers
from tutti.config.load import change
from tutti.errors import ConfigError
from tutti.runs.folder import RunFolder
from tutti.runs.journal import Journal, Screen, rewind
from tutti.runs.logger_process import Target, flatten, name_numbers, pass_on
from tutti.runs.loggers import LoggerError, LoggerProcess
from tutti.runs.metrics import Event, read_all_events


def made_folder(path: Path) -> RunFolder:
    folder = RunFolder(path)
    for each in (folder.logs, folder.checkpoints):
        each.mkdir(parents=True)
    folder.config.write_text(f"recipe: made\nout: {path}\noptim: {{lr: 0.5}}\n")
    return folder


def journal_of(folder: RunFolder, *to: str, commits_all: bool = False) -> Journal:
    return Journal(folder, Screen(100, 10, 1), to, commits_all)


def write_steps(journal: Journal, *steps: int, offset: float = 0.0) -> None:
    for step in steps:
        journal.write("step", step=step, epoch=1, loss=step / 10 + offset, lr=0.5)


class Rows:
    """A logger in memory, for the rules of what is passed on."""

    def __init__(self, taken: int = 0) -> None:
        self.taken, self.runs, self.ended = taken, [[{}] * taken], ""

    def begin_again(self) -> None:
        self.runs.append([])
        self.taken = 0

    def log(self, events: Any) -> None:
        self.runs[-1] += events
        self.taken += len(events)

    def end(self, ended: str) -> None:
        self.ended = ended

    def describe(self) -> str:
        return "rows"


def pass_all(target: Target, path: Path, size: int, *messages: dict[str, Any]) -> list[int]:
    return list(pass_on(target, path, size, messages))


def test_events_are_passed_on_once_and_as_far_as_they_are_durable(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"event": "step", "step": step}) + "\n" for step in range(5)]
    path.write_text("".join(lines))
    sizes = [sum(map(len, lines[:count])) for count in range(6)]
    rows = Rows(taken=1)
    assert pass_all(rows, path, sizes[2], {"size": sizes[2]}, {"size": sizes[4]}) == [sizes[2], sizes[2], sizes[4]]
    assert [event.get("step") for event in rows.runs[0]] == [None, 1, 2, 3]
    assert (len(rows.runs), rows.ended) == (1, "killed")
    rows = Rows(taken=3)  # it has an event that the run, resumed from an earlier checkpoint, has given up
    pass_all(rows, path, sizes[2], {"size": sizes[5], "ended": "finished"})
    assert [event["step"] for event in rows.runs[1]] == [0, 1, 2, 3, 4]
    assert rows.ended == "finished"


def test_numbers_of_an_epoch_have_names_of_their_own() -> None:
    step: Event = {"event": "step", "step": 5, "epoch": 1, "loss": 0.5, "seconds": 2.0, "time": 9.0}
    epoch: Event = {
        "event": "epoch",
        "step": 5,
        "epoch": 1,
        "valid_loss": 0.25,
        "seconds": 7.0,
        "ranks": 2,
        "more": None,
    }
    assert name_numbers(step) == {"loss": 0.5, "seconds": 2.0}
    assert name_numbers(epoch) == {"valid_loss": 0.25, "epoch_seconds": 7.0}
    assert dict(flatten({"a": {"b": 1, "c": {}}, "d": [1]})) == {"a.b": 1, "a.c": {}, "d": [1]}


def test_a_csv_file_follows_new_keys_and_a_resume(tmp_path: Path) -> None:
    folder = made_folder(tmp_path / "run")
    journal = journal_of(folder, "csv")
    write_steps(journal, 1, 2)
    journal.write("epoch", step=2, epoch=1, valid_loss=math.nan)
    write_steps(journal, 3)
    journal.close()
    rows = read_csv(folder.path)
    assert [row["step"] for row in rows] == ["1", "2", "2", "3"]
    assert (rows[2]["valid_loss"], "loss" in rows[2]) == ("nan", False)
    rewind(folder, 1)
    journal = journal_of(folder, "csv")
    write_steps(journal, 2, offset=5.0)
    journal.close()
    assert [(row["step"], row["loss"]) for row in read_csv(folder.path)] == [("1", "0.1"), ("2", "5.2")]


def test_a_logger_that_fails_is_left_out_and_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made_folder(tmp_path / "run")
    (folder.path / "metrics.csv").mkdir()
    journal = journal_of(folder, "csv", "tensorboard")
    write_steps(journal, 1, 2)
    journal.close()
    said = capsys.readouterr().out
    assert said.count("warning: log.to: csv has failed: IsADirectoryError") == 1
    assert said.count("warning") == 1
    assert [event["step"] for event in read_all_events(folder.metrics)] == [1, 2]
    assert read_tensorboard(folder.path)["step/loss"] == [(1, pytest.approx(0.1)), (2, pytest.approx(0.2))]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_that_is_not_installed_is_refused_before_the_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti.config.check.find_spec", lambda package: None)
    config = change(small_config(), [f"log.to=[csv, {name}]"])
    message = rf"log.to=\['csv', '{name}'\] needs the package {name}, .* pip install 'tutti-train\[{name}\]'"
    with pytest.raises(ConfigError, match=message):
        check_loggers(config)
    check_loggers(small_config())


def test_the_names_of_loggers_are_checked_and_tensorboard_has_a_switch() -> None:
    assert change(small_config(), []).log.loggers == ("tensorboard",)
    assert change(small_config(), ["log.to=[csv, csv]"]).log.loggers == ("csv",)
    assert change(small_config(), ["log.to=[csv, tensorboard]", "log.tensorboard=false"]).log.loggers == ("csv",)
    with pytest.raises(ConfigError, match=r"log.to.0='wandbb'.*: expected .*'wandb'.* Did you mean 'wandb'\?"):
        change(small_config(), ["log.to=[wandbb]"])


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.system
def test_a_logger_that_hangs_delays_the_end_for_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_server: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", silent_server)
    folder = made_folder(tmp_path / "run")
    before = journal_of(folder)
    write_steps(before, 1)
    before.close()
    hung = LoggerProcess("mlflow", folder, end_seconds=0.2, stall_seconds=0.0)
    environ = Path(f"/proc/{hung._process.pid}/environ")  # empty for a moment, in which the kernel starts the program
    variables = wait_until(environ.read_bytes, lambda: "the logger has no environment", hung._process)
    assert b"MLFLOW_DISABLE_TELEMETRY=true" in variables.split(b"\0")
    assert hung.commit() == []
    with pytest.raises(LoggerError, match=r"it has not finished within 0\.2 s"):
        hung.close()
    stalled = LoggerProcess("mlflow", folder, stall_seconds=0.0)
    stalled.commit()
    with pytest.raises(LoggerError, match="it has not answered for 0 s"):
        stalled.write({})
    assert stalled._process.poll() is not None


@pytest.mark.system
def test_a_logger_that_is_killed_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made_folder(tmp_path / "run")
    journal = journal_of(folder, "mlflow", commits_all=True)
    write_steps(journal, 1)
    process = journal._loggers["mlflow"]._process  # pyright: ignore
    (folder.logs / "mlflow.log").write_text("INFO: all is well\n")
    process.kill()
    process.wait()
    write_steps(journal, 2, 3)
    journal.close()
    said = capsys.readouterr().out
    reason = f"its process was ended by signal 9 (Killed) (more in {folder.logs / 'mlflow.log'})"
    assert said.count(f"warning: log.to: mlflow has failed: {reason}. The run continues without it.") == 1
    assert said.count("warning") == 1
    assert [event["step"] for event in read_all_events(folder.metrics)] == [1, 2, 3]


@pytest.mark.system
def test_wandb_in_a_folder_that_cannot_be_written_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = made_folder(tmp_path / "run")
    (folder.path / "wandb").write_text("a file in the place of its folder")
    journal = journal_of(folder, "wandb", commits_all=True)
    write_steps(journal, 1)
    journal._loggers["wandb"]._process.wait(300)  # pyright: ignore
    write_steps(journal, 2)
    journal.close()
    said = capsys.readouterr().out
    assert said.count("warning: log.to: wandb has failed: NotADirectoryError: ") == said.count("warning") == 1
    assert [event["step"] for event in read_all_events(folder.metrics)] == [1, 2]


@pytest.mark.system
def test_what_a_logger_raises_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://store")
    folder = made_folder(tmp_path / "run")
    journal = journal_of(folder, "mlflow", commits_all=True)
    write_steps(journal, 1)
    process = journal._loggers["mlflow"]._process  # pyright: ignore
    process.wait(300)
    write_steps(journal, 2, 3)
    journal.close()
    said = capsys.readouterr().out
    assert said.count("log.to: mlflow has failed: ") == said.count("warning") == 1
    assert "nowhere" in said
    assert str(folder.logs / "mlflow.log") in said
    assert len(read_all_events(folder.metrics)) == 3


@pytest.mark.system
@pytest.mark.slow
def test_wandb_without_a_network_costs_the_logger_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    folder = made_folder(tmp_path / "run")
    journal = journal_of(folder, "wandb", commits_all=True)
    write_steps(journal, 1)
    journal.close()
    assert capsys.readouterr().out.count("warning: log.to: wandb has failed: ") == 1
    assert len(read_all_events(folder.metrics)) == 1
    assert os.path.exists(folder.logs / "wandb.log")
