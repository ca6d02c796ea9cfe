"""A run that was trained by others between the choice of its checkpoint and the moment at which it is owned."""

import json
from pathlib import Path

import pytest
from conftest import command
from prepared import QUICK

from tutti.errors import FolderError
from tutti.runs.record import SEGMENTS_VARIABLE, check_segments, count_segments

RECIPE = ("train", "digits/mlp", "max_steps=4", "schedule.warmup_epochs=0", "checkpoint.every_steps=2")


def test_segments_that_were_added_are_refused(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    assert count_segments(record) == 0
    record.write_text(json.dumps({"segments": [{}, {}]}))
    check_segments(record, 2)
    with pytest.raises(FolderError, match=r"trained by other processes.*expected 1 segments in its record, found 2"):
        check_segments(record, 1)


@pytest.mark.system
def test_a_run_that_was_trained_meanwhile_is_not_trained_again_from_its_old_checkpoint(tmp_path: Path) -> None:
    done = command(str(QUICK / "tutti"), *RECIPE, cwd=tmp_path)
    assert done.code == 0, done.all
    [folder] = (tmp_path / "runs" / "digits" / "mlp").iterdir()
    old = str(folder / "checkpoints" / "step-000002")
    before = (folder / "record.json").read_text()
    words = [str(QUICK / "tutti"), *RECIPE, "--resume", old]
    refused = command(*words, cwd=tmp_path, **{SEGMENTS_VARIABLE: "0"})
    assert refused.code == 2, refused.all
    assert "was trained by other processes" in refused.err
    assert (folder / "record.json").read_text() == before
    (folder / ".record.json.2155").write_text("half of a rec")  # as of a rank that was killed
    assert command(*words, cwd=tmp_path).code == 0
    assert not (folder / ".record.json.2155").exists()
