"""A host of the tests gets no more of the cores than its share."""

import subprocess
import sys
from pathlib import Path

import pytest
import quotas

SPIN = """
import sys, time
open(sys.argv[1], "w").write("0")
began, used = time.monotonic(), time.process_time()
while time.monotonic() < began + 0.6:
    pass
print((time.process_time() - used) / (time.monotonic() - began))
"""


def test_a_process_has_its_share_of_a_core_and_no_more() -> None:
    if reason := quotas.unavailable():
        pytest.skip(reason)
    with quotas.shares(["host"], 0.2) as groups:
        folder = groups["host"].parent
        done = subprocess.run([sys.executable, "-c", SPIN, str(groups["host"])], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) < 0.3
    assert not Path(folder).exists()
