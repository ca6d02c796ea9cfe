"""Process sets that are added and removed while a job runs."""

from typing import Any

import hvd_sets_work as work
import numpy as np
import pytest
import torch
from rank_jobs import run_ranks

from tutti.horovod.basics import ProcessSet
from tutti.horovod.engine.coordinator import Coordinator, wrong_members
from tutti.horovod.engine.messages import Message, TensorRequest

pytestmark = pytest.mark.ranks


def same(found: list[Any]) -> Any:
    """What is the same on all ranks."""
    assert all(each == found[0] for each in found)
    return found[0]


def test_sets_are_added_used_removed_and_added_again() -> None:
    found = run_ranks(4, work.add_and_remove)
    sums = [each.pop("sums") for each in found]
    assert sums == [[[4.0], [], [3.0]], [[], [6.0], [3.0]], [[4.0], [], []], [[], [6.0], []]]
    assert [each.pop("again") for each in found] == sums
    most = [each.pop("after") for each in found]
    assert most == [[[8.0], [4.0], [], [3.0]], [[], [], [6.0], [3.0]], [[8.0], [4.0], [], []], [[8.0], [], [6.0], []]]
    gone = [each.pop("gone") for each in found]
    assert all(number is None and error[0] == "ValueError" for number, error in gone)
    answer = same(found)
    assert answer["repr"] == [
        "ProcessSet(process_set_id=1, ranks=[0, 1], mpi_comm=None)",
        "ProcessSet(process_set_id=2, ranks=[0, 2], mpi_comm=None)",
        "ProcessSet(process_set_id=3, ranks=[1, 3], mpi_comm=None)",
    ]
    assert answer["all"] == {0: [0, 1, 2, 3], 1: [0, 1], 2: [0, 2], 3: [1, 3]}
    assert answer["twice"] == ("ValueError", "A process set with ranks [0, 2] exists already.")
    assert answer["everyone"] == ("ValueError", "A process set with ranks [0, 1, 2, 3] exists already.")
    assert answer["nobody"][0] == answer["too many"][0] == "ValueError"
    assert "expected ranks from 0 to 3" in answer["too many"][1]
    assert answer["removed"] == [True, False]
    assert not answer["global"] and not answer["unknown"]
    assert answer["numbers"] == (2, 4)  # the number that was free, and the next one
    assert answer["static"] == (True, {0: [0, 1, 2, 3], 2: [0, 2, 3], 3: [1, 3], 4: [0, 2]})
    number, error = answer["end"]
    assert number is None and error[0] == "ValueError" and "not been initialized" in error[1]


def test_ranks_that_disagree_about_a_set_all_fail_and_the_job_goes_on() -> None:
    first, second = run_ranks(2, work.disagree_about_sets)
    told = "mismatched ranks of the process set: rank 0 has [1], rank 1 has [0]"
    assert first[0] == second[0] and first[0][0] == "HorovodInternalError" and told in first[0][1]
    assert first[1][0] == "HorovodInternalError" and "rank 0 has [0], rank 1 has [1]" in first[1][1]
    assert second[1] == ("ValueError", "A process set with ranks [1] exists already.")
    assert first[2] == second[2] and "mismatched operations: rank 0 has add_set, rank 1 has remove_set" in first[2][1]
    assert first[3:] == second[3:] == [(1, [3.0]), True]


def test_sets_change_while_other_threads_work() -> None:
    for rank, (found, sums, known) in enumerate(run_ranks(3, work.change_sets_many_times, 9)):
        for turn, (number, named, unnamed) in enumerate(found):
            ranks = ((0, 2), (1, 2), (0, 1))[turn % 3]
            assert number == 1
            assert named == unnamed == ([sum(ranks) + 2.0] if rank in ranks else [])
        assert sums == {3.0}
        assert known == 40  # numbers of requests: none of a set that is gone


def test_what_waits_for_a_set_that_is_removed_fails() -> None:
    found = run_ranks(3, work.remove_a_set_in_use)
    assert found[0][0] == ("HorovodInternalError", "allreduce.x: process set 1 has been removed.")
    assert [after for _, after in found] == [[3.0], [3.0], None]


def test_no_set_is_added_while_a_rank_has_joined() -> None:
    (error, number), (_, other) = run_ranks(2, work.change_sets_while_a_rank_has_joined)
    assert error[0] == "HorovodInternalError" and "add_set is not supported with Join" in error[1]
    assert number == other == 1


def test_sets_change_only_where_the_job_was_started_so() -> None:
    error, removed = same(run_ranks(2, work.change_sets_in_a_static_job))
    assert error[0] == "ValueError" and "HOROVOD_DYNAMIC_PROCESS_SETS=1" in error[1]
    assert not removed
    wrong, number = same(run_ranks(2, work.ask_for_dynamic_sets))
    assert wrong == ("ValueError", "process_sets='changing': expected a list of hvd.ProcessSet, or \"dynamic\".")
    assert number == 1


@pytest.mark.parametrize(
    "ranks",
    [[2, 0, 2], (0, 2), {2, 0}, range(0, 3, 2), reversed(range(0, 3, 2)), (2 * n for n in range(2)), {0: "a", 2: "b"}],
)
def test_ranks_come_in_any_form_that_can_be_iterated(ranks: Any) -> None:
    assert ProcessSet(ranks).ranks == [0, 2]


def test_ranks_come_as_arrays_and_tensors_of_integers() -> None:
    for given in (np.array([2, 0]), np.arange(3)[::-2], torch.tensor([0, 2])):
        ranks = ProcessSet(given).ranks
        assert ranks == [0, 2] and all(type(rank) is int for rank in ranks)
    for wrong in (np.array([0.5]), np.array([[0, 2]]), ["a"], 3):
        with pytest.raises(ValueError, match=r"(?s)ProcessSet\(.*Expected ranks, such as \[0, 2\], or an mpi4py comm"):
            ProcessSet(wrong)


def test_an_init_that_failed_has_not_initialized() -> None:
    wrong, initialized, numbers, total = same(run_ranks(2, work.init_again_after_an_error))
    assert wrong == ("ValueError", "A process set with ranks [0] exists already.")
    assert not initialized and numbers == [1, 2] and total == 3.0


def test_members_are_sorted_and_in_the_job() -> None:
    assert wrong_members((0, 2), [(0, 1)], 3) == ""
    assert "exists already" in wrong_members((0, 1), [(0, 1)], 3)
    assert "expected ranks from 0 to 2" in wrong_members((0, 3), [], 3)
    assert "expected ranks from 0 to 2" in wrong_members((-1,), [], 3)


def test_requests_of_a_set_that_is_gone_are_forgotten() -> None:
    coordinator = Coordinator(2, {0: (0, 1), 1: (0,)}, fusion_bytes=100, capacity=1)
    reduce, remove = (
        TensorRequest("allreduce", "x", 1, "float32", (1,)),
        TensorRequest("remove_set", "change", members=(0,)),
    )
    coordinator.receive(Message(0, (reduce,)), 0.0)
    (granted,) = coordinator.grants()
    assert granted.numbers == (0,)
    for rank in range(2):
        coordinator.receive(Message(rank, (remove,)), 0.0)
    (removed,) = coordinator.grants()
    assert removed.set_number == 1 and coordinator.sets == {0: (0, 1)}
    coordinator.receive(Message(0, (reduce,), known=(0,)), 0.0)
    assert coordinator.grants() == [] and coordinator.oldest() is None
    for rank in range(2):
        coordinator.receive(Message(rank, (remove._replace(kind="add_set", members=(1,)),)), 0.0)
    assert coordinator.grants()[0].set_number == 1
    coordinator.receive(Message(1, (reduce,)), 0.0)
    (again,) = coordinator.grants()
    assert again.numbers == (1,)  # a new one, which its new members know


def test_what_is_ready_is_done_before_its_set_is_removed() -> None:
    coordinator = Coordinator(2, {0: (0, 1), 1: (0,)}, fusion_bytes=100, capacity=1)
    remove = TensorRequest("remove_set", "change", members=(0,))
    coordinator.receive(Message(1, (remove,)), 0.0)
    coordinator.receive(Message(0, (remove, TensorRequest("barrier", "noname", 1))), 0.0)
    assert [response.kind for response in coordinator.grants()] == ["barrier", "remove_set"]


def test_additions_and_removals_meet_under_one_key() -> None:
    assert (
        TensorRequest("add_set", "change").key == TensorRequest("remove_set", "change").key == (0, "process_set.change")
    )
