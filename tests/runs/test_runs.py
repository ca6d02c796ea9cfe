"""Run folders found again: in order, with the state they are really in."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tutti.runs.folder import RunFolder
from tutti.runs.listing import find_runs, summarise
from tutti.runs.metrics import LineLog
from tutti.runs.record import Record, read_record, state_of

HOST = platform.node()


def make_run(path: Path, **content: Any) -> RunFolder:
    path.mkdir(parents=True)
    folder = RunFolder(path)
    folder.record.write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def dead_process() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_runs_are_found_below_a_folder_in_the_order_in_which_they_started(tmp_path: Path) -> None:
    make_run(tmp_path / "digits" / "b", recipe="digits", started="2026-11-15T10:00:02+01:00", ranks=2, state="done")
    make_run(tmp_path / "mnist" / "keras" / "a", recipe="mnist/keras", started="2026-11-15T10:00:01+01:00")
    make_run(tmp_path / "digits" / "a-2", recipe="digits", started="2026-11-15T10:00:03+01:00")
    make_run(tmp_path / "digits" / "a", recipe="digits", started="2026-11-15T10:00:03+01:00")
    assert [run.folder.path.name for run in find_runs(tmp_path)] == ["a", "b", "a", "a-2"]
    assert [run.recipe for run in find_runs(tmp_path)] == ["mnist/keras", "digits", "digits", "digits"]
    assert [run.folder.path.name for run in find_runs(tmp_path, "digits")] == ["b", "a", "a-2"]
    assert find_runs(tmp_path, "mnist") == find_runs(tmp_path / "absent") == []


def test_the_order_holds_when_the_clocks_are_put_back(tmp_path: Path) -> None:
    make_run(tmp_path / "first", recipe="digits", started="2026-10-25T02:30:00+02:00")
    make_run(tmp_path / "second", recipe="digits", started="2026-10-25T02:10:00+01:00")
    assert [run.folder.path.name for run in find_runs(tmp_path)] == ["first", "second"]


def test_a_summary_shows_the_last_epoch(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", recipe="digits", started="x", ranks=4, state="done")
    log = LineLog(folder.metrics)
    log.write({"event": "start", "epoch": 0, "step": 0, "valid_accuracy": 0.1})
    log.write({"event": "epoch", "epoch": 1, "step": 5, "valid_accuracy": 0.5, "samples_per_second": 10.0})
    log.write({"event": "epoch", "epoch": 2, "step": 9, "valid_accuracy": 0.8, "valid_loss": 0.4, "train_loss": 0.3})
    log.write({"event": "step", "epoch": 3, "step": 10, "train_loss": 0.2, "valid_accuracy": 0.0})
    log.close()
    run = summarise(folder)
    assert run is not None
    assert (run.recipe, run.state, run.ranks, run.epochs) == ("digits", "done", 4, 2)
    assert run.metrics == {"valid_accuracy": 0.8, "valid_loss": 0.4}
    assert run.samples_per_second is None


def test_a_run_without_epochs_has_a_row_and_one_without_a_readable_record_has_none(tmp_path: Path) -> None:
    make_run(tmp_path / "young", recipe="digits", started="1", ranks=1, state="failed")
    for name, text in (("torn", '{"recipe": "dig'), ("list", "[]"), ("empty", "")):
        make_run(tmp_path / name).record.write_text(text)
    (run,) = find_runs(tmp_path)
    assert (run.folder.path.name, run.epochs, run.metrics, run.state) == ("young", 0, {}, "failed")
    assert read_record(tmp_path / "absent" / "record.json") is None


@pytest.mark.system
@pytest.mark.parametrize("state", ["done", "failed", "stopped"])
def test_a_run_that_has_ended_says_how(state: str, dead_process: int) -> None:
    content = {"state": state, "segments": [{"host": HOST, "process": dead_process}]}
    assert state_of(content) == state


@pytest.mark.system
def test_a_run_that_says_it_runs_is_believed_while_its_process_is_there(dead_process: int) -> None:
    def state(**segment: Any) -> str:
        return state_of({"state": "running", "segments": [{"host": HOST, "process": dead_process}, segment]})

    assert state(host=HOST, process=os.getpid()) == "running"
    assert state(host=HOST, process=1) == "running"  # not one's own, but there
    assert state(host=HOST, process=dead_process) == "interrupted"
    assert state(host=HOST) == "interrupted"
    assert state(host="elsewhere", process=dead_process) == "running"
    assert state_of({}) == "unknown"


@pytest.mark.system
def test_a_record_follows_a_run_through_its_segments(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    record = Record.open(path)
    record.start(recipe="digits")
    first = read_record(path)
    assert first and first["state"] == "running" == state_of(first)
    assert first["segments"][0]["process"] == os.getpid() and first["segments"][0]["host"] == HOST
    assert {"python", "torch", "numpy"} <= first["segments"][0]["versions"].keys()
    record.end("stopped", seconds=3.0)
    again = Record.open(path)
    again.start(recipe="digits")
    again.end("done", final={"loss": 0.1})
    content = read_record(path)
    assert content and state_of(content) == "done"
    assert content["started"] == first["started"]
    assert [segment["state"] for segment in content["segments"]] == ["stopped", "done"]
    assert (content["seconds"], content["final"]) == (3.0, {"loss": 0.1})


def test_predicted_and_measured_memory_are_side_by_side(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.json", {"recipe": "digits", "ranks": 2, "segments": []})
    record.note_memory()
    assert "memory" not in record.content
    record.note_memory(predicted_peak_bytes=3 << 30)
    record.end("finished")
    record.note_memory(measured_peak_bytes=2 << 30)
    record.write()
    found = summarise(RunFolder(tmp_path))
    assert found is not None
    assert found.memory == {"predicted_peak_bytes": 3 << 30, "measured_peak_bytes": 2 << 30}
