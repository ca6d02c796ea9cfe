"""Files of a run that are damaged in any way are read as far as they are good, or refused by name."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from damage import changed, damaged, damaged_json, many, read_or_refuse
from hypothesis import given
from hypothesis import strategies as st
from run_folders import make_run

from tutti.errors import FolderError
from tutti.launch.cluster.status import Progress
from tutti.ranks.failures import Failure, leave_note, read_notes
from tutti.report.runs import read_run
from tutti.runs.folder import RunFolder
from tutti.runs.jobs import Attempt, JobRecord, newest_step, read_job
from tutti.runs.journal import rewind
from tutti.runs.listing import find_run, find_runs, name_runs
from tutti.runs.metrics import LineLog, read_all_events, read_events, trim_events
from tutti.runs.record import Record, read_record, state_of, summarise_epochs

EVENTS: list[dict[str, Any]] = [
    {"event": "start", "step": 0, "epoch": 0, "valid_loss": 2.3},
    {"event": "step", "step": 5, "epoch": 1, "loss": 1.5, "seconds": 0.5, "samples_per_second": 10.0},
    {"event": "step", "step": 10, "epoch": 1, "loss": 1.25, "seconds": 0.5, "samples_per_second": 11.0},
    {"event": "epoch", "step": 10, "epoch": 1, "train_loss": 1.3, "valid_loss": 1.0, "seconds": 1.0},
    {"event": "step", "step": 15, "epoch": 2, "loss": 0.5, "seconds": 0.5, "samples_per_second": 12.0},
]
LINES = [json.dumps(event).encode() + b"\n" for event in EVENTS]
WHOLE = b"".join(LINES)
JOB = JobRecord(
    "slurm", "site", "digits", {"nodes": 2}, 3, "job.sh", "2026-11-15", ids=["7"], attempts=[Attempt("7", "now", 0, 5)]
)
# No line of these is an event: none begins with a brace, and a line break is followed by more of them.
GARBAGE = st.binary(min_size=1, max_size=40).map(lambda some: b"\xff" + some.replace(b"\n", b"\n\xfe"))


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@many(60)
@given(tail=GARBAGE)
def test_a_run_with_random_bytes_after_its_metrics_goes_on_from_any_step(metrics: Path, tail: bytes) -> None:
    for step, kept in ((5, 2), (10, 4), (15, 5)):
        metrics.write_bytes(WHOLE + tail)
        assert list(read_events(metrics)) == EVENTS
        assert read_all_events(metrics) == EVENTS
        trim_events(metrics, step)
        log = LineLog(metrics)
        log.write({"event": "step", "step": 99})
        log.close()
        assert read_all_events(metrics) == [*EVENTS[:kept], {"event": "step", "step": 99}]


@pytest.mark.parametrize(
    "tail", [b"\xff\xfe\x00", b"\0" * 512, b'{"event": "st', b"5\n", b"null\n[]\n", b'{"step": "x"}\n', b"[" * 9999]
)
def test_a_tail_that_is_no_event_is_left_out(metrics: Path, tail: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    metrics.write_bytes(WHOLE + tail)
    assert list(read_events(metrics)) == EVENTS
    rewind(RunFolder(metrics.parent), 10)
    assert metrics.read_bytes() == b"".join(LINES[:4])
    assert capsys.readouterr().err == ""


def test_a_damaged_line_in_the_middle_is_named(metrics: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics.write_bytes(LINES[0] + b"\xff\xfe\n" + b"".join(LINES[1:]))
    before = metrics.read_bytes()
    assert list(read_events(metrics)) == EVENTS
    assert capsys.readouterr().err == f"warning: {metrics}: line 2 is damaged and left out\n"
    for strict in (read_all_events, lambda path: trim_events(path, 10)):
        with pytest.raises(FolderError) as caught:
            strict(metrics)
        assert str(caught.value) == (
            f"{metrics}: line 2 is damaged, and good lines follow: expected one JSON object in each line. "
            "Restore the file, or remove what is damaged from it."
        )
    assert metrics.read_bytes() == before
    trim_events(metrics, 0)  # what follows is not kept
    assert metrics.read_bytes() == LINES[0]
    metrics.write_bytes(b"?\n" * 20 + LINES[0])
    with pytest.raises(FolderError, match=r"lines 1, 2, 3, 4, 5, 6, 7, 8 and 12 more are damaged"):
        read_all_events(metrics)


@many(150)
@given(content=damaged(WHOLE))
def test_damaged_metrics_are_read_or_refused(metrics: Path, content: bytes) -> None:
    metrics.write_bytes(content)
    shown = list(read_events(metrics))
    summarise_epochs(metrics, 2)
    Progress(RunFolder(metrics.parent), "step-000003", 0).has_trained()
    found = read_or_refuse(lambda: read_all_events(metrics), metrics)
    assert found is None or found == shown
    if read_or_refuse(lambda: trim_events(metrics, 10) or True, metrics):
        assert read_all_events(metrics) == [event for event in shown if event.get("step", 0) <= 10]


@many(150)
@given(place=st.integers(0, 4), data=st.data())
def test_events_with_other_values_are_read_or_refused(metrics: Path, place: int, data: st.DataObject) -> None:
    folder = RunFolder(metrics.parent)
    line = json.dumps(data.draw(changed(EVENTS[place]))).encode() + b"\n"
    metrics.write_bytes(b"".join([*LINES[:place], line, *LINES[place + 1 :]]))
    read_run(folder)
    summarise_epochs(metrics, 1)
    read_or_refuse(lambda: read_all_events(metrics), metrics)
    read_or_refuse(lambda: trim_events(metrics, 10), metrics)
    read_or_refuse(lambda: read_all_events(metrics), metrics)


@many(150)
@given(data=st.data())
def test_a_damaged_record_hides_one_run_and_no_other(tmp_path: Path, data: st.DataObject) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    if not good.exists():
        make_run(good)
        make_run(bad)
        (bad / "whole").write_bytes((bad / "record.json").read_bytes())
    whole = json.loads((bad / "whole").read_text())
    (bad / "record.json").write_bytes(data.draw(damaged_json(whole)))
    found = find_runs(tmp_path)
    assert good in [run.folder.path for run in found]
    named = name_runs(run.folder for run in found)
    assert len(named) == len(found)
    assert find_run(str(good), tmp_path).path == good
    content = read_record(bad / "record.json")
    if content is not None:
        state_of(content)
    read_run(RunFolder(bad))


def test_a_damaged_record_is_told_once_and_kept_when_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for function in ("commit", "hardware"):  # which ask other processes
        monkeypatch.setattr(f"tutti.runs.record.{function}", lambda: None)
    path = tmp_path / "record.json"
    path.write_bytes(b'{"state": "running", "segments": [')
    Record.open(path)
    record = Record.open(path)
    assert capsys.readouterr().err.count(f"warning: {path} is damaged and left out: ") == 1
    record.start(device="cpu")
    assert (tmp_path / "record.json.damaged").read_bytes() == b'{"state": "running", "segments": ['
    content = read_record(path)
    assert content is not None and content["state"] == "running" and len(content["segments"]) == 1


@many(150)
@given(content=damaged_json(dataclasses.asdict(JOB)))
def test_a_damaged_job_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    folder = RunFolder(tmp_path)
    folder.job.write_bytes(content)
    job = read_or_refuse(lambda: read_job(folder), folder.job)
    if job is not None:
        job.write(folder)
        again = read_job(folder)
        assert again == job or any(map(math.isnan, _floats(dataclasses.asdict(again))))


@many(60)
@given(content=damaged(b"step-000120\n"))
def test_a_damaged_pointer_to_the_newest_checkpoint_counts_as_a_step_or_as_none(tmp_path: Path, content: bytes) -> None:
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir(exist_ok=True)
    (folder.checkpoints / "latest").write_bytes(content)
    assert isinstance(newest_step(folder), int)
    progress = Progress.now(folder)
    assert not progress.has_saved() and not progress.has_trained()


@many(60)
@given(data=st.data())
def test_a_damaged_note_of_a_failure_is_left_out(tmp_path: Path, data: st.DataObject) -> None:
    good = Failure(0, "n1", 1.0, 2, "text", True, False)
    leave_note(tmp_path, good)
    (tmp_path / "failure-1.json").write_bytes(data.draw(damaged_json(dataclasses.asdict(good))))
    found = read_notes(tmp_path)
    assert found[0] == good and len(found) <= 2 and all(isinstance(each.exit_code, int) for each in found)


def _floats(value: Any) -> list[float]:
    if isinstance(value, dict | list):
        return [each for part in (value.values() if isinstance(value, dict) else value) for each in _floats(part)]
    return [value] if isinstance(value, float) else []
