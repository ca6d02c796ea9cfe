"""A rank that is about to end when another signal comes."""

import sys
from pathlib import Path

import pytest
from conftest import command

ENDING = """
import os, signal
from tutti.cli.ranks import as_rank
from tutti.errors import Interrupted
from tutti.ranks.placement import Placement

def work():
    try:
        raise Interrupted("stopped on SIGINT after step 2 of 22,000.")
    finally:
        os.kill(os.getpid(), signal.SIGTERM)

as_rank(Placement("none"), work, STOPPED)
"""


@pytest.mark.system
@pytest.mark.parametrize("stopped", ["None", "lambda name: Interrupted(f'stopped on {name} before the first step.')"])
def test_a_second_signal_at_the_end_does_not_replace_the_reason(stopped: str, tmp_path: Path) -> None:
    done = command(sys.executable, "-c", ENDING.replace("STOPPED", stopped), cwd=tmp_path)
    assert (done.code, done.err.strip()) == (75, "stopped on SIGINT after step 2 of 22,000.")
