"""Ranks that wait for each other: every wait has a deadline, and its message names who is missing."""

import os
import platform
from pathlib import Path

import pytest
from conftest import Tutti
from rank_jobs import run_ranks
from rank_work import (
    agree_on_errors,
    arrive_late,
    join_without_rank_1,
    meet_after_an_earlier_rank_0,
    meet_at_a_taken_port,
    sum_and_gather,
)

from tutti.errors import ConfigError, DeadlineError, LaunchError

pytestmark = pytest.mark.ranks


def test_sums_and_objects_reach_every_rank() -> None:
    assert run_ranks(3, sum_and_gather) == [(6.0, ["rank 0", "rank 1", "rank 2"], "rank 0")] * 3


def test_the_start_names_the_ranks_that_did_not_come() -> None:
    errors = run_ranks(3, join_without_rank_1, 8.0, expect_failure=True)
    for rank in (0, 2):
        assert isinstance(errors[rank], DeadlineError)
        assert f"rank {rank} on host {platform.node()} waited 8 s at the start of the run" in str(errors[rank])
        assert "missing rank 1, arrived ranks 0, 2 of 3" in str(errors[rank])


def test_a_barrier_names_the_ranks_that_did_not_come(tmp_path: Path) -> None:
    errors = run_ranks(4, arrive_late, (1, 3), 6.0, tmp_path, expect_failure=True)
    for rank in (0, 2):
        assert isinstance(errors[rank], DeadlineError)
        assert "at the second barrier: missing ranks 1, 3, arrived ranks 0, 2 of 4" in str(errors[rank])


def test_an_error_on_one_rank_is_raised_on_all_with_its_name() -> None:
    errors = run_ranks(3, agree_on_errors, {1: "no such file"}, expect_failure=True)
    for error in errors:
        assert isinstance(error, ConfigError)
        assert str(error) == f"rank 1 on host {platform.node()}: no such file"


def test_the_same_error_everywhere_is_told_once() -> None:
    errors = run_ranks(2, agree_on_errors, {0: "no such file", 1: "no such file"}, expect_failure=True)
    assert [str(error) for error in errors] == ["no such file", "no such file"]


def test_a_port_in_use_is_named() -> None:
    [error, _] = run_ranks(2, meet_at_a_taken_port, expect_failure=True)
    assert isinstance(error, LaunchError)
    assert "the port is in use. Set MASTER_PORT" in str(error)
    assert "MASTER_PORT" not in os.environ


JOINS = """
import os, torch
from tutti.config.schema import RuntimeConfig
from tutti.ranks.environments import discover
from tutti.ranks.group import join
for _ in range(12):
    group = join(discover(os.environ), RuntimeConfig(timeout_seconds=20))
    print(group.sum(torch.tensor(1.0)).item())
    group.leave()
"""


def test_ranks_of_torchrun_meet_again_and_not_at_their_earlier_addresses(tmp_path: Path, tutti: Tutti) -> None:
    """The store of its agent outlives a group."""
    (tmp_path / "joins.py").write_text(JOINS)
    done = tutti("run", "-n", "2", "joins.py")
    assert done.code == 0 and done.out.startswith("2.0\n" * 12), done.all


def test_new_ranks_of_torchrun_meet_though_its_store_has_the_address_of_an_earlier_rank_0() -> None:
    """Its agent starts new processes where a host is added, and counts that as no restart."""
    assert run_ranks(3, meet_after_an_earlier_rank_0)[:2] == [2.0, 2.0]
