"""Averages through shared memory."""

import pytest
from rank_jobs import run_ranks
from rank_work import average_many, average_without_rank_1

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_means_are_right_however_far_ranks_run_ahead(ranks: int) -> None:
    for means, left in run_ranks(ranks, average_many, 200):
        assert means == [turn + (ranks - 1) / 2 for turn in range(200)]
        assert left == []


def test_a_rank_that_dies_ends_the_wait_at_once() -> None:
    error, _ = run_ranks(2, average_without_rank_1, expect_failure=True)
    assert isinstance(error, ConnectionResetError)
    assert "rank 1 has ended" in str(error)
