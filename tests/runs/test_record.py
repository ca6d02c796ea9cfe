"""The record of a run over its segments."""

from pathlib import Path

import pytest

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
