"""Waiting for processes that were started here."""

import os
import subprocess
from pathlib import Path

import pytest

from tutti.launch.supervisor import LocalProcess, end_processes, wait_for_any

pytestmark = pytest.mark.system


@pytest.mark.parametrize("count", [1, 2])
def test_a_wait_for_processes_ends_with_the_first_of_them_or_at_its_deadline(tmp_path: Path, count: int) -> None:
    started = [LocalProcess(["sleep", "1000"], tmp_path / "log", os.environ) for _ in range(count)]
    try:
        assert wait_for_any(started, seconds=0.2) == []
        with pytest.raises(subprocess.TimeoutExpired):
            started[0].wait(0.01)
        started[-1].terminate()
        assert wait_for_any(started, seconds=600) == [started[-1]]
        assert (started[-1].wait(), started[-1].wait(1.0)) == (-15, -15)
    finally:
        end_processes(started)
