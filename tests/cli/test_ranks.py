"""How a launcher ends when its ranks have: with their exit code, their message, and the state in the record."""

import json
from pathlib import Path

import pytest

from tutti.cli.ranks import finish
from tutti.ranks.failures import Failure
from tutti.runs.folder import RunFolder
from tutti.runs.record import Record


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run folder whose record says that the run was interrupted."""
    folder = RunFolder(tmp_path)
    folder.record.write_text(json.dumps({"segments": [{}], "state": "interrupted"}))
    return folder


@pytest.mark.parametrize(("code", "state"), [(75, "interrupted"), (2, "failed"), (1, "failed"), (76, "failed")])
def test_a_launcher_ends_as_its_ranks_did(
    run: RunFolder, capsys: pytest.CaptureFixture[str], code: int, state: str
) -> None:
    failure = Failure(1, "n1", 0.0, code, "stopped on SIGTERM after step 3 of 9", said=True, consequence=False)
    with pytest.raises(SystemExit) as ended:
        finish(run, failure)
    assert ended.value.code == code, "what decides whether a scheduler starts the run again"
    assert Record.open(run.record).content["state"] == state
    told = capsys.readouterr().err
    assert failure.text in told
    assert f"run folder: {run.path}" in told


def test_a_launcher_whose_ranks_succeeded_continues(run: RunFolder) -> None:
    finish(run, None)
    assert Record.open(run.record).content["state"] == "interrupted"
