"""The record of a run over its segments."""

import platform
from pathlib import Path
from typing import Any

import pytest

from tutti.errors import Cause, ConfigError, DivergedError, RankLost
from tutti.runs.record import Record, read_record


@pytest.mark.system
def test_how_a_segment_has_ended_stays_with_it(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    record = Record(path)
    record.start(ranks=2)
    record.end("failed", failure="rank 1 was killed")
    again = Record.open(path)
    assert again.content["failure"] == "rank 1 was killed"
    again.start(ranks=2)
    assert again.content["state"] == "running" and "failure" not in again.content
    again.end("finished", ended_by="epochs")
    content = read_record(path)
    assert content is not None and "failure" not in content
    first, second = content["segments"]
    assert (first["state"], first["failure"]) == ("failed", "rank 1 was killed")
    assert (second["state"], second["ended_by"]) == ("finished", "epochs")


class OutOfMemoryError(RuntimeError):
    """As torch calls its own."""


def diverged() -> DivergedError:
    error = DivergedError("the loss is nan at step 7 on rank 1.\nMore lines.")
    error.rank, error.step = 1, 7
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            diverged(),
            {
                "failure": "the loss is nan at step 7 on rank 1.",
                "cause": "diverged",
                "failed_rank": 1,
                "failed_step": 7,
            },
        ),
        (ConfigError("x"), {"failure": "x", "cause": "configuration"}),
        (RankLost("x"), {"failure": "x", "cause": "rank_lost"}),
        (
            OutOfMemoryError("20 GiB\nfree: 1"),
            {"failure": "OutOfMemoryError: 20 GiB", "cause": "out_of_memory", "failed_rank": 0, "failed_host": "here"},
        ),
        (KeyboardInterrupt(), {"failure": "KeyboardInterrupt: ", "cause": "interrupted"}),
        (OSError("x"), {"failure": "OSError: x", "cause": "error", "failed_rank": 0, "failed_host": "here"}),
    ],
)
def test_a_failure_is_recorded_with_its_cause(
    error: BaseException, expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "node", lambda: "here")
    monkeypatch.setattr("tutti.runs.record.commit", lambda: None)
    record = Record(tmp_path / "record.json", {"segments": [{}]})
    record.fail(error, step=9)
    content = read_record(record.path)
    assert content is not None
    assert {key: value for key, value in content.items() if key.startswith(("fail", "cause"))} == expected
    assert content["step"] == 9
    assert expected.items() <= content["segments"][-1].items()
    record.start()
    assert not expected.keys() & record.content.keys()


def test_a_record_without_a_cause_gets_one_from_its_text() -> None:
    content = read_record(Path(__file__).parent / "golden" / "record_without_cause.json")
    assert content is not None
    assert content["cause"] == Cause.DIVERGED
    assert content["failure"].startswith("TrainingError: the loss is nan at step 2")
