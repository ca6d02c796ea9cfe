"""Gradients swapped directly: a rank that never sends is not waited for beyond the group's deadline."""

import pytest
from rank_work import swap_with_a_silent_rank
from ranks import run_ranks

pytestmark = pytest.mark.ranks


def test_a_silent_rank_ends_the_step_at_the_deadline() -> None:
    error, _ = run_ranks(2, swap_with_a_silent_rank, 2.0, expect_failure=True)
    assert isinstance(error, RuntimeError)
    assert "Timed out waiting 2000ms" in str(error)
