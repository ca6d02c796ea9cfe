"""The benchmark of slow links runs to its verdict; what it measures is for quiet machines."""

import json
import sys
from pathlib import Path

import pytest
import slurm
from conftest import REPOSITORY, command

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("slurm"), pytest.mark.slow]


def test_exposed_communication_and_all_reduces_are_measured_on_the_same_nodes(tmp_path: Path) -> None:
    if reason := slurm.unavailable():
        pytest.skip(reason)
    program = str(REPOSITORY / "benchmarks" / "slow_links.py")
    options = ["--rate", "1gbit", "--batch", "2", "--repeat", "1", "--keep", "kept", "--out", "found.json"]
    done = command(sys.executable, program, *options, cwd=tmp_path)
    assert done.code in (0, 1), done.all
    assert "exposed within 15% of an all-reduce" in done.out, done.all
    found = json.loads((tmp_path / "found.json").read_text())
    assert [(row["per_rank_batch"], row["nodes"]) for row in found["points"]] == [
        (batch, nodes) for batch in (2, 4) for nodes in (1, 2, 4)
    ]
    measured = [row for row in found["points"] if row["nodes"] > 1]
    assert all(row["gradient_bytes"] == 19_891_240 and row["all_reduce_seconds"] > 0.1 for row in measured)
    assert (tmp_path / "kept" / "report.html").exists()
