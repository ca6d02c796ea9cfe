"""metrics.jsonl: appended as it happens, readable after a crash, continued without doubles."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tutti.runs.metrics import LineLog, read_events, trim_events

EVENTS: list[dict[str, Any]] = [
    {"event": "start", "step": 0, "valid_loss": 2.3},
    {"event": "step", "step": 5, "train_loss": 1.5, "lr": 3e-4},
    {"event": "step", "step": 10, "train_loss": 1.25, "note": "line\nbreak \u2028 ü"},
    {"event": "epoch", "step": 10, "valid_loss": 1.0},
    {"event": "step", "step": 15, "train_loss": 0.5},
]


def write(path: Path, events: list[dict[str, Any]]) -> None:
    log = LineLog(path)
    for event in events:
        log.write(event)
    log.close()


def test_events_are_read_as_they_were_written_and_appended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, EVENTS[:2])
    write(path, EVENTS[2:])
    assert list(read_events(path)) == EVENTS
    assert len(path.read_text().split("\n")) == len(EVENTS) + 1


def test_an_event_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    log = LineLog(tmp_path / "metrics.jsonl")
    for count, event in enumerate(EVENTS, 1):
        log.write(event)
        assert list(read_events(tmp_path / "metrics.jsonl")) == EVENTS[:count]
    log.close()


def test_numbers_that_are_none_survive(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", [{"a": math.nan, "b": math.inf, "c": None}])
    (found,) = read_events(tmp_path / "metrics.jsonl")
    assert math.isnan(found["a"]) and found["b"] == math.inf and found["c"] is None


def test_a_file_that_is_not_there_has_no_events(tmp_path: Path) -> None:
    assert list(read_events(tmp_path / "absent")) == []
    trim_events(tmp_path / "absent", 3)
    assert not (tmp_path / "absent").exists()


def test_a_last_line_cut_anywhere_costs_that_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, EVENTS)
    whole = path.read_bytes()
    last = len(json.dumps(EVENTS[-1])) + 1
    for cut in range(2, last + 1):
        path.write_bytes(whole[:-cut])
        assert list(read_events(path)) == EVENTS[:-1], cut
    path.write_bytes(whole[:-1])
    assert list(read_events(path)) == EVENTS
    path.write_bytes(whole[:-4] + b"\0\0\0\0")
    assert list(read_events(path)) == EVENTS[:-1]


@pytest.mark.parametrize(("step", "kept"), [(0, 1), (4, 1), (5, 2), (9, 2), (10, 4), (15, 5), (99, 5)])
def test_what_came_after_a_step_is_taken_back(tmp_path: Path, step: int, kept: int) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [{"event": "note"}, *EVENTS])
    trim_events(path, step)
    assert list(read_events(path)) == [{"event": "note"}, *EVENTS[:kept]]
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_with_a_torn_line_is_continued_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, EVENTS)
    path.write_bytes(path.read_bytes()[:-9])
    trim_events(path, 10)
    write(path, EVENTS[-1:])
    assert list(read_events(path)) == EVENTS


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_costs_lines_and_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    log = LineLog(Path("/dev/full"))
    for event in EVENTS:
        log.write(event)
    log.close()
    assert capsys.readouterr().err.splitlines() == [
        "warning: /dev/full: No space left on device; lines are lost until it can be written"
    ]
