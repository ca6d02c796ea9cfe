"""Rounds that come again: granted at once when all ranks say the same, and the long way when one does not."""

from tutti.horovod.engine.coordinator import Coordinator
from tutti.horovod.engine.messages import Message, Response, TensorRequest

A, B = (TensorRequest("allreduce", name, dtype="float32", shape=(2,)) for name in "ab")


def taught(size: int = 2) -> Coordinator:
    """A coordinator that has heard all ranks say the numbers of A and B in one message each."""
    coordinator = Coordinator(size, {0: tuple(range(size)), 1: (0,)}, 1 << 20, 100)
    for rank in range(size):
        coordinator.receive(Message(rank, (A, B)), 0.0)
    coordinator.grants()
    say(coordinator, *range(size))
    return coordinator


def say(coordinator: Coordinator, *ranks: int, known: tuple[int, ...] = (0, 1), now: float = 0.0) -> list[Response]:
    for rank in ranks:
        coordinator.receive(Message(rank, known=known), now)
    return coordinator.grants()


def test_a_known_round_is_granted_as_before_when_the_last_rank_has_said_it() -> None:
    coordinator = taught()
    assert say(coordinator, 1) == []
    (again,) = say(coordinator, 0)
    assert again.requests == (A, B) and again.numbers == (0, 1)
    assert not coordinator._waiting
    assert say(coordinator, 0, 1) == [again]


def test_what_another_rank_says_in_other_words_is_matched_by_name() -> None:
    coordinator = taught()
    assert say(coordinator, 0) == []
    (first,) = say(coordinator, 1, known=(1,))
    assert first.requests == (B,)
    (second,) = say(coordinator, 1, known=(0,))
    assert second.requests == (A,)


def test_a_new_operation_in_between_is_no_part_of_a_known_round() -> None:
    coordinator = taught()
    assert say(coordinator, 0) == []
    new = TensorRequest("allreduce", "c", dtype="float32", shape=(2,))
    coordinator.receive(Message(1, (new,), known=(0, 1)), 0.0)
    (granted,) = coordinator.grants()
    assert granted.requests == (A, B)
    coordinator.receive(Message(0, (new,)), 0.0)
    assert [response.requests for response in coordinator.grants()] == [(new,)]


def test_a_mismatch_is_found_after_a_known_round_has_begun() -> None:
    coordinator = taught()
    assert say(coordinator, 0) == []
    coordinator.receive(Message(1, (A._replace(shape=(3,)), B)), 0.0)
    errors = [response.error for response in coordinator.grants() if response.error]
    assert len(errors) == 1 and "mismatched shapes: rank 0 has (2,), rank 1 has (3,)" in errors[0]


def test_a_round_with_a_rank_that_has_joined_goes_the_long_way() -> None:
    coordinator = taught()
    coordinator.receive(Message(1, (TensorRequest("join", "rank1"),)), 0.0)
    assert coordinator.grants() == []
    (granted,) = say(coordinator, 0)
    assert granted.joined == (1,) and granted.requests == (A, B)


def test_a_rank_that_never_says_a_known_round_is_named() -> None:
    coordinator = taught(3)
    assert say(coordinator, 0, 2, now=10.0) == []
    assert coordinator.oldest() == 10.0
    assert coordinator.stalled(15.0, 60.0) == []
    assert coordinator.stalled(71.0, 60.0) == [
        "allreduce.a: missing ranks [1]; ready ranks [0, 2]",
        "allreduce.b: missing ranks [1]; ready ranks [0, 2]",
    ]
    (granted,) = say(coordinator, 1)
    assert granted.requests == (A, B)


def test_ranks_are_missing_only_from_what_somebody_waits_for() -> None:
    coordinator = taught(3)
    say(coordinator, 0)
    assert coordinator.missing({0}) == {1, 2} and coordinator.missing({1}) == set()
    say(coordinator, 2, known=(0,))
    assert coordinator.missing({2}) == {1}
    assert coordinator.missing({0}) == {1, 2}


def test_a_process_set_that_is_removed_takes_known_rounds_with_it() -> None:
    coordinator = taught()
    for rank in (0, 1):
        coordinator.receive(Message(rank, (TensorRequest("remove_set", "change", members=(0,)),)), 0.0)
    assert coordinator.grants()[0].kind == "remove_set"
    say(coordinator, 0)
    assert coordinator._waiting  # it goes the long way
    (granted,) = say(coordinator, 1)
    assert granted.requests == (A, B)
