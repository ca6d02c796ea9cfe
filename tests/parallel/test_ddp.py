"""Gradients through shared memory: right means, and waits that end with a lost rank or at the deadline."""

from pathlib import Path

import pytest
from rank_jobs import run_ranks
from rank_work import average_many, average_without_rank_1, swap_with_a_silent_rank

from tutti.errors import DeadlineError

pytestmark = pytest.mark.ranks


def test_a_silent_rank_ends_the_step_at_the_deadline(tmp_path: Path) -> None:
    error, _ = run_ranks(2, swap_with_a_silent_rank, 6.0, tmp_path, expect_failure=True)
    assert isinstance(error, DeadlineError)
    assert "waited 6 s for the gradients of rank 1, which runs but did not send them" in str(error)


@pytest.mark.parametrize("ranks", [2, 4])
def test_means_are_right_however_far_ranks_run_ahead(ranks: int) -> None:
    for means, left in run_ranks(ranks, average_many, 200):
        assert means == [turn + (ranks - 1) / 2 for turn in range(200)]
        assert left == []


def test_a_rank_that_dies_ends_the_wait_at_once() -> None:
    error, _ = run_ranks(2, average_without_rank_1, expect_failure=True)
    assert isinstance(error, ConnectionResetError)
    assert "rank 1 has ended" in str(error)
