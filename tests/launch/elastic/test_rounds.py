"""Which hosts take part in a round of an elastic job, and with how many ranks."""

import pytest

from tutti.launch.elastic.slots import CoolDown, RankLimits, Rounds, SlotPool, usable_ranks


def rounds(min_ranks: int = 1, max_ranks: int = 8, parts: int = 24, losses_allowed: int = 5) -> Rounds:
    pool = SlotPool[int](CoolDown(10.0, failures_allowed=losses_allowed))
    return Rounds(RankLimits(min_ranks, max_ranks, parts), pool)


@pytest.mark.parametrize(
    ("present", "most", "parts", "expected"), [(4, 4, 4, 4), (3, 4, 4, 2), (3, 4, 12, 3), (9, 4, 8, 4), (0, 4, 4, 0)]
)
def test_as_many_ranks_are_used_as_the_batch_splits_over(present: int, most: int, parts: int, expected: int) -> None:
    assert usable_ranks(present, most, parts) == expected


def test_ranks_follow_the_order_in_which_hosts_came_and_the_rest_are_spares() -> None:
    job = rounds(parts=4)
    job.pool.add(7, "a", 2)
    job.pool.add(3, "b", 3)
    formed = job.next_round(0.0)
    assert formed is not None
    assert (formed.shares, formed.world_size, formed.spares) == ({7: 2, 3: 2}, 4, 1)
    assert (list(formed.ranks_of(7)), list(formed.ranks_of(3)), list(formed.ranks_of(1))) == ([0, 1], [2, 3], [])


def test_hosts_that_were_started_together_keep_their_order() -> None:
    job = rounds()
    for number, order in ((0, 0), (1, 2), (2, 1)):
        job.pool.add(number, f"n{order}", 1, order)
    formed = job.next_round(0.0)
    assert formed is not None and list(formed.shares) == [0, 2, 1]


def test_there_is_no_round_below_the_least_number_of_ranks() -> None:
    job = rounds(min_ranks=3, parts=4)
    job.pool.add(1, "a", 3)  # of which the batch can use two
    assert job.next_round(0.0) is None
    job.pool.add(2, "b", 1)
    assert job.next_round(0.0) is not None
    job.pool.remove(1)
    assert job.next_round(0.0) is None


def test_the_place_of_a_lost_rank_rests_longer_each_time() -> None:
    job = rounds(parts=12)
    job.pool.add(1, "a", 3)
    assert job.lose(1, now=100.0)
    formed = job.next_round(101.0)
    assert formed is not None and formed.world_size == 2
    assert job.pool.next_change(101.0) == 110.0
    assert not job.grows(formed, 109.0)
    assert job.grows(formed, 111.0)
    job.lose(1, now=200.0)
    assert job.pool.next_change(200.0) == 220.0


def test_a_place_that_is_lost_too_often_is_given_up() -> None:
    job = rounds(losses_allowed=2)
    job.pool.add(1, "a", 3)
    assert [job.lose(1, now=0.0) for _ in range(3)] == [True, True, False]
    assert job.present(now=1e6) == 2


def test_a_spare_does_not_end_a_round_that_could_not_use_it() -> None:
    job = rounds(parts=4)
    job.pool.add(1, "a", 2)
    formed = job.next_round(0.0)
    assert formed is not None
    job.pool.add(2, "b", 1)
    assert not job.grows(formed, 0.0)
    job.pool.add(3, "c", 1)
    assert job.grows(formed, 0.0)
