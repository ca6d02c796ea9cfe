"""When the allocation ends."""

import stat
from datetime import datetime
from pathlib import Path

import pytest

from tutti.errors import LaunchError
from tutti.ranks.hang_detection import allocation_end, end_time


def test_the_job_script_is_asked_before_slurm() -> None:
    assert allocation_end({"TUTTI_JOB_ENDS": "1000", "SLURM_JOB_END_TIME": "2000"}) == 1000
    assert allocation_end({"SLURM_JOB_END_TIME": "2000"}) == 2000
    assert allocation_end({}) is None


def test_a_time_that_is_no_number_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"TUTTI_JOB_ENDS='soon': expected seconds since the epoch"):
        allocation_end({"TUTTI_JOB_ENDS": "soon"})


@pytest.mark.system
def test_slurm_is_asked_where_no_variable_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "scontrol"
    fake.write_text("#!/bin/sh\necho JobId=$4 StartTime=2026-01-01T00:00:00 EndTime=2026-01-02T03:04:05 Deadline=N/A\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert allocation_end({"SLURM_JOB_ID": "7"}) == datetime(2026, 1, 2, 3, 4, 5).timestamp()
    fake.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert allocation_end({"SLURM_JOB_ID": "7"}) is None


def test_a_job_without_a_limit_has_no_end() -> None:
    assert end_time("JobId=7 EndTime=Unknown") is None
