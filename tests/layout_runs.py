"""Runs on layouts of ranks, held against the same run on one rank."""

from pathlib import Path
from typing import Any

import pytest
from rank_jobs import read_ledger, read_losses, run_ranks, train

TOLERANCE = 1e-5  # of losses in float32


class OneRank:
    """Runs of one rank, by what differs from the given values, each made once."""

    def __init__(self, values: dict[str, Any], out: Path) -> None:
        self._values, self._out = values, out
        self._runs: dict[str, dict[str, Any]] = {}

    def run(self, **values: Any) -> dict[str, Any]:
        """What the rank of a run answers."""
        key = repr(values)
        if key not in self._runs:
            out = str(self._out / str(len(self._runs)))
            self._runs[key] = run_ranks(1, train, self._values | values | {"out": out})[0]
        return self._runs[key]

    def folder(self, **values: Any) -> Path:
        """The folder of a run."""
        return self.run(**values)["folder"]


def assert_same(folder: Path, other: Path, tolerance: float = TOLERANCE) -> None:
    """Two runs have trained on the same samples, with the same losses up to the order of sums."""
    assert read_ledger(folder) == read_ledger(other)
    ours, theirs = read_losses(folder), read_losses(other)
    assert [loss[:2] for loss in ours] == [loss[:2] for loss in theirs]
    assert [loss[2] for loss in ours] == pytest.approx([loss[2] for loss in theirs], abs=tolerance)
