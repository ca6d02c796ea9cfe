"""The engine on real ranks: matching by name, refusals, waiting, joins, beginnings and ends, and ranks that die."""

from typing import Any

import hvd_engine_work as work
import pytest
from rank_jobs import run_ranks

from tutti.horovod.errors import SHUT_DOWN

pytestmark = pytest.mark.ranks


def both(found: list[Any]) -> Any:
    """What is the same on all ranks."""
    assert all(each == found[0] for each in found)
    return found[0]


def test_names_match_whatever_the_order_of_submission() -> None:
    assert both(run_ranks(2, work.submit_in_another_order)) == [2.0 * i for i in range(20)]


def test_what_has_no_name_matches_by_issue_order() -> None:
    assert both(run_ranks(2, work.submit_without_names)) == [[3.0], [30.0], [2.0], [1.0, 2.0], [300.0]]


def test_a_name_serves_several_kinds_at_once_and_again_later() -> None:
    first, second = run_ranks(2, work.reuse_names)
    assert first == ([[1.0], [0.0, 1.0], [1.0], [0.0]], [0.0, 2.0, 4.0, 6.0, 8.0])
    assert second[0][3] == [2.0] and second[1] == first[1]


def test_a_name_in_flight_is_refused_and_the_first_stays_valid() -> None:
    (error, first, again), _ = run_ranks(2, work.submit_a_name_twice)
    assert error[0] == "ValueError" and "same name as another tensor" in error[1] and "'x'" in error[1]
    assert (first, again) == (2.0, 2.0)


def test_threads_may_submit_at_once() -> None:
    assert both(run_ranks(2, work.submit_from_threads)) == [2.0 * i for i in range(80)]


def test_a_thousand_operations_in_random_order_on_four_ranks() -> None:
    wrong, known = both(run_ranks(4, work.submit_many, 1000))
    assert wrong == []
    assert known == 900  # all but the gathers


def test_what_differs_fails_on_all_ranks_and_the_job_goes_on() -> None:
    errors, afterwards = both(run_ranks(2, work.disagree))
    assert {kind for kind, _ in errors.values()} == {"HorovodInternalError"}
    told = {name: text for name, (_, text) in errors.items()}
    assert "allreduce.dtype: mismatched data types: rank 0 has float32, rank 1 has float64" in told["dtype"]
    assert "allreduce.shape: mismatched shapes: rank 0 has (2,), rank 1 has (3,)" in told["shape"]
    assert "rank 0 has (2,), rank 1 has (2, 1)" in told["dims"]
    assert "rank 0 has Sum, rank 1 has Max" in told["op"]
    assert "prescale factors: rank 0 has 1.0, rank 1 has 2.0" in told["prescale"]
    assert "postscale factors: rank 0 has 1.0, rank 1 has 2.0" in told["postscale"]
    assert "broadcast.root: mismatched root ranks: rank 0 has 0, rank 1 has 1" in told["root"]
    assert "rank 0 has (2,), rank 1 has (3,)" in told["broadcast"]
    assert "rank 0 has (3,), rank 1 has (4,)" in told["gather"]
    assert "numbers of dimensions: rank 0 has 1, rank 1 has 2" in told["gather dims"]
    assert "rank 0 has bool, rank 1 has uint8" in told["gather dtype"]
    assert "numbers of dimensions: rank 0 has 0, rank 1 has 1" in told["gather little"]
    assert "rank 0 has (3,), rank 1 has (4,)" in told["alltoall"]
    assert "rank 0 has (2,), rank 1 has (3,)" in told["scatter"]
    assert "rank 0 has Sum, rank 1 has Average" in told["scatter op"]
    assert "group_2of2: mismatched shapes" in told["group"]
    assert "grouped_1of2: mismatched groups" in told["grouped"]
    assert all("without dimensions" in told[f"{kind} nothing"] for kind in ("gather", "alltoall", "scatter"))
    assert afterwards == 2.0


def test_poll_tells_whether_all_ranks_have_come() -> None:
    first, _ = run_ranks(2, work.poll_while_a_rank_is_away)
    assert first == (False, True, 2.0)


def test_nobody_passes_a_barrier_alone() -> None:
    assert run_ranks(3, work.wait_at_barriers) == [True, True, True]


def test_ranks_with_less_data_join_and_lend_zeros() -> None:
    found = run_ranks(3, work.join_unevenly)
    assert [each["means"] for each in found] == [
        [[12.0, 24.0]],
        [[12.0, 24.0], [8.0, 16.0]],
        [[12.0, 24.0], [8.0, 16.0], [4.0, 8.0]],
    ]
    kinds = ("allgather", "broadcast", "alltoall", "reducescatter")
    for (error, text), kind in zip(found[2]["refused"], kinds, strict=True):
        assert error == "HorovodInternalError" and f"{kind} is not supported with Join at this time" in text
    assert found[2]["whole numbers"] == -2  # -7 of one rank over three
    assert found[2]["group"] == [1.0, 1.0]
    assert [(each["last"], each["after"], each["second"]) for each in found] == [(2, (3.0, [0, 1, 2]), 0)] * 3


def test_known_requests_are_said_by_number() -> None:
    found = both(run_ranks(2, work.watch_messages))
    assert found["first"][:2] == (4, 0)
    assert found["second"][:2] == (0, 4)
    assert found["changed"][:2] == (1, 3)
    assert [len(result) for result in found["changed"][2]] == [2, 2, 5, 2]
    assert found["numbers"] == 5  # and none for what has no name
    assert "rank 0 has (5,), rank 1 has (2,)" in found["mismatch"][1]


def test_process_sets_work_side_by_side_among_their_members() -> None:
    found = run_ranks(4, work.work_in_sets)
    assert found[0]["repr"] == [
        "ProcessSet(process_set_id=1, ranks=[0, 2], mpi_comm=None)",
        "ProcessSet(process_set_id=2, ranks=[1, 3], mpi_comm=None)",
        "ProcessSet(process_set_id=3, ranks=[0, 1, 2], mpi_comm=None)",
    ]
    assert [each["places"] for each in found] == [(rank // 2, 2, True, False) for rank in range(4)]
    for each in found:
        assert each["not mine"][0] == each["no rank"][0] == each["wrong root"][0] == "ValueError"
    assert "rank 3 is not a member of ProcessSet(process_set_id=3" in found[3]["barrier"][1]
    assert [each["reduced"] for each in found] == [[2.5, 2.0, 6.0], [2.5, 3.0, 6.0], [2.5, 2.0, 6.0], [2.5, 3.0]]
    assert [each["gathered"] for each in found] == [[1.0, 3.0], [2.0, 4.0]] * 2
    assert [each["root"] for each in found] == [3.0, 4.0] * 2
    assert [each["swapped"][0] for each in found] == [[0, 20], [10, 30], [1, 21], [11, 31]]
    assert [each["scattered"] for each in found] == [[0.0], [0.0], [2.0], [2.0]]
    assert [each["unnamed"] for each in found] == [4.0] * 4
    assert all(each["after"][0][0] == "ValueError" and each["after"][1] is None for each in found)


def test_wrong_process_sets_are_refused_and_the_next_init_starts_a_job() -> None:
    twice, one, everyone, two, none, three = both(run_ranks(2, work.give_wrong_sets))
    assert twice == ("ValueError", "A process set with ranks [0] exists already.")
    assert everyone == ("ValueError", "A process set with ranks [0, 1] exists already.")
    assert none[0] == "ValueError" and "expected ranks from 0 to 1" in none[1]
    assert (one, two, three) == (2.0, 2.0, 2.0)


def test_a_job_ends_and_starts_again_without_leaving_threads() -> None:
    sums, threads, rank, operation = both(run_ranks(2, work.start_again, 5))
    assert sums == [2.0 * turn for turn in range(5)]
    assert threads == []
    assert rank == ("ValueError", "Horovod has not been initialized; use hvd.init().")
    assert operation == ("HorovodInternalError", "Horovod has not been initialized; use hvd.init().")


def test_a_rank_that_starts_again_late_is_waited_for() -> None:
    assert run_ranks(2, work.start_again_late) == [2.0, 2.0]


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_shutdown_ends_what_others_wait_for_and_all_may_start_again(leaver: int) -> None:
    found = run_ranks(3, work.shut_down_while_others_wait, leaver)
    for rank, (pending, later, again) in enumerate(found):
        assert again == 3.0
        if rank != leaver:
            assert pending == later == ("HorovodInternalError", SHUT_DOWN)


@pytest.mark.parametrize(("last", "answer"), [("barrier", "through"), ("join", True), ("broadcast", 0)])
def test_rank_0_may_leave_at_once_after_the_last_operation(last: str, answer: Any) -> None:
    assert run_ranks(3, work.leave_at_once, last) == [answer] * 3


@pytest.mark.parametrize(("victim", "how"), [(1, "exit"), (2, "kill"), (0, "kill")])
def test_a_rank_that_dies_ends_what_others_wait_for(victim: int, how: str) -> None:
    found = run_ranks(3, work.lose_a_rank, victim, how, False, expect_failure=True)
    reason = "rank 0, which coordinates all ranks, has ended" if victim == 0 else f"rank {victim} has not responded"
    for rank, answer in enumerate(found):
        if rank != victim:
            (pending, text), (later, _) = answer
            assert pending == later == "HorovodInternalError"
            assert reason in text and SHUT_DOWN in text


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_inside_an_operation_ends_it_on_all(victim: int) -> None:
    found = run_ranks(4, work.lose_a_rank, victim, "kill", True, expect_failure=True)
    reason = "rank 0, which coordinates all ranks, has ended" if victim == 0 else f"ank {victim} has not responded"
    for rank, answer in enumerate(found):
        if rank != victim:
            assert {error for error, _ in answer} == {"HorovodInternalError"}
            assert reason in answer[0][1] and SHUT_DOWN in answer[0][1]


def test_a_stall_is_told_with_the_tensor_and_the_missing_ranks() -> None:
    found = run_ranks(3, work.stall, "0")
    (line,), _ = found[0]
    assert "for more than 1 seconds. allreduce.slow: missing ranks [1]; ready ranks [0, 2]" in line
    assert [answer for _, answer in found] == [3.0] * 3


def test_a_stall_that_is_too_long_ends_the_job() -> None:
    for _, (error, text) in run_ranks(3, work.stall, "1"):
        assert error == "HorovodInternalError"
        assert "waited for more than 1 s for some ranks" in text and SHUT_DOWN in text
