"""Gradients through shared memory: the wait for a missing rank ends at the deadline of the group."""

from pathlib import Path

import pytest
from rank_jobs import run_ranks
from rank_work import swap_with_a_silent_rank

from tutti.errors import DeadlineError

pytestmark = pytest.mark.ranks


def test_a_silent_rank_ends_the_step_at_the_deadline(tmp_path: Path) -> None:
    error, _ = run_ranks(2, swap_with_a_silent_rank, 6.0, tmp_path, expect_failure=True)
    assert isinstance(error, DeadlineError)
    assert "waited 6 s for the gradients of rank 1, which runs but did not send them" in str(error)
