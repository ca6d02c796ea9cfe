"""Who is ready for what: grants, refusals, groups, joins, numbers of known requests, and what travels together."""

import pytest

from tutti.horovod.engine.coordinator import Coordinator
from tutti.horovod.engine.messages import AVERAGE, MAX, SUM, Message, Response, TensorRequest


class Ranks:
    """Ranks that talk to a coordinator; every message is heard at the time `now`."""

    def __init__(
        self, size: int = 2, fusion_bytes: int = 1 << 20, capacity: int = 100, **sets: tuple[int, ...]
    ) -> None:
        numbered = {0: tuple(range(size))} | dict(enumerate(sets.values(), start=1))
        self.coordinator = Coordinator(size, numbered, fusion_bytes, capacity)
        self.now = 0.0

    def say(self, rank: int, *requests: TensorRequest, known: tuple[int, ...] = ()) -> list[Response]:
        self.coordinator.receive(Message(rank, requests, known), self.now)
        return self.coordinator.grants()

    def all_say(self, *requests: TensorRequest, known: tuple[int, ...] = ()) -> list[Response]:
        """All submit the same; what is granted when the last one has."""
        *early, last = [self.say(rank, *requests, known=known) for rank in range(self.coordinator._size)]
        assert not any(early)
        return last


def reduce(name: str, shape: tuple[int, ...] = (2,), **rest: object) -> TensorRequest:
    return TensorRequest("allreduce", name, dtype=rest.pop("dtype", "float32"), shape=shape, **rest)  # pyright: ignore


def names(responses: list[Response]) -> list[tuple[str, ...]]:
    return [tuple(request.name for request in response.requests) for response in responses]


def test_an_operation_is_granted_when_the_last_rank_has_submitted_it() -> None:
    ranks = Ranks(3)
    assert ranks.say(2, reduce("a")) == []
    assert ranks.say(0, reduce("a")) == []
    (granted,) = ranks.say(1, reduce("a"))
    assert granted.kind == "allreduce" and granted.requests == (reduce("a"),) and not granted.error
    assert ranks.say(1, reduce("a")) == []  # a new one under the same name


def test_orders_of_ranks_do_not_matter() -> None:
    ranks = Ranks(fusion_bytes=0)
    assert ranks.say(0, reduce("a"), reduce("b"), reduce("c")) == []
    assert names(ranks.say(1, reduce("c"))) == [("c",)]
    assert names(ranks.say(1, reduce("b"), reduce("a"))) == [("a",), ("b",)]


def test_one_name_may_be_in_use_for_two_kinds_and_two_sets() -> None:
    ranks = Ranks(3, pair=(0, 2))
    gather = TensorRequest("allgather", "x", dtype="float32", shape=(2,))
    assert ranks.say(0, reduce("x"), gather, reduce("x", process_set=1)) == []
    (in_the_pair,) = ranks.say(2, reduce("x", process_set=1))
    assert in_the_pair.process_set == 1
    assert ranks.say(2, gather) == []
    assert [response.kind for response in ranks.say(1, gather)] == ["allgather"]


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        (reduce("t"), reduce("t", dtype="float64"), "data types: rank 0 has float32, rank 1 has float64"),
        (reduce("t"), reduce("t", (3,)), r"shapes: rank 0 has \(2,\), rank 1 has \(3,\)"),
        (reduce("t", op=SUM), reduce("t", op=MAX), "reduce operations: rank 0 has Sum, rank 1 has Max"),
        (reduce("t", op=SUM), reduce("t", op=AVERAGE), "reduce operations: rank 0 has Sum, rank 1 has Average"),
        (reduce("t"), reduce("t", prescale=0.5), "prescale factors: rank 0 has 1.0, rank 1 has 0.5"),
        (reduce("t"), reduce("t", postscale=2.0), "postscale factors: rank 0 has 1.0, rank 1 has 2.0"),
        (reduce("t"), reduce("t", device="cuda"), "devices: rank 0 has cpu, rank 1 has cuda"),
        (
            TensorRequest("broadcast", "t", root=0),
            TensorRequest("broadcast", "t", root=1),
            "root ranks: rank 0 has 0, rank 1 has 1",
        ),
        (
            TensorRequest("allgather", "t", shape=(4, 2)),
            TensorRequest("allgather", "t", shape=(4, 3)),
            r"shapes after the first dimension: rank 0 has \(2,\), rank 1 has \(3,\)",
        ),
        (
            TensorRequest("alltoall", "t", shape=(4, 2)),
            TensorRequest("alltoall", "t", shape=(4,)),
            "numbers of dimensions: rank 0 has 2, rank 1 has 1",
        ),
    ],
)
def test_what_differs_is_told_with_the_tensor_the_ranks_and_both_values(
    ours: TensorRequest, theirs: TensorRequest, told: str
) -> None:
    ranks = Ranks()
    ranks.say(1, theirs)
    (refused,) = ranks.say(0, ours)
    assert refused.requests[0].key == ours.key
    with pytest.raises(ValueError, match=rf"{ours.kind}\.t: mismatched {told}"):
        raise ValueError(refused.error)
    (granted,) = ranks.all_say(ours)
    assert not granted.error


@pytest.mark.parametrize("kind", ["allgather", "alltoall", "reducescatter"])
def test_what_has_rows_needs_a_dimension(kind: str) -> None:
    (refused,) = Ranks().all_say(TensorRequest(kind, "t"))  # pyright: ignore[reportArgumentType]
    assert f"{kind}.t: {kind} of tensors without dimensions" in refused.error


def test_sizes_of_all_ranks_come_with_the_grant() -> None:
    ranks = Ranks(3)
    for rank in (2, 0, 1):
        gathered = ranks.say(rank, TensorRequest("allgather", "g", shape=(10 * rank, 4)))
    assert gathered[0].sizes == ((0, 10, 20),)
    for rank in (2, 0, 1):
        swapped = ranks.say(rank, TensorRequest("alltoall", "a", shape=(6,), splits=(rank, rank, 0)))
    assert swapped[0].sizes == ((0, 0, 0, 1, 1, 0, 2, 2, 0),)


def test_a_group_is_granted_as_a_whole_or_not_at_all() -> None:
    ranks = Ranks(fusion_bytes=0)
    group = [reduce(f"g{i}", group="g", group_size=3) for i in range(3)]
    assert ranks.say(0, *group) == []
    assert ranks.say(1, *group[:2]) == []
    assert names(ranks.say(1, group[2], reduce("single"))) == [("g0", "g1", "g2")]
    ranks.say(0, *group)
    (refused,) = ranks.say(1, *group[:2], reduce("g2", (5,), group="g", group_size=3))
    assert len(refused.requests) == 3 and "allreduce.g2: mismatched shapes" in refused.error


def test_a_group_of_several_types_is_granted_at_once_and_travels_by_type() -> None:
    group = [reduce(f"g{i}", dtype=("float32", "float64")[i % 2], group="g", group_size=4) for i in range(4)]
    granted = Ranks().all_say(*group)
    assert names(granted) == [("g0", "g2"), ("g1", "g3")]


def test_what_is_in_a_group_on_some_ranks_only_is_refused_with_the_group() -> None:
    ranks = Ranks()
    ranks.say(0, reduce("g0", group="g", group_size=2), reduce("g1", group="g", group_size=2))
    (refused,) = ranks.say(1, reduce("g0"))
    assert {request.name for request in refused.requests} == {"g0", "g1"}
    assert "allreduce.g0: mismatched groups" in refused.error
    assert ranks.coordinator.oldest() is None


def test_ranks_that_have_joined_count_as_ready_for_reductions_alone() -> None:
    ranks = Ranks(3)
    assert ranks.say(1, TensorRequest("join", "rank1")) == []
    ranks.say(0, reduce("x"))
    (granted,) = ranks.say(2, reduce("x"))
    assert granted.joined == (1,)
    ranks.say(0, TensorRequest("allgather", "y", shape=(1,)))
    (refused,) = ranks.say(2, TensorRequest("allgather", "y", shape=(1,)))
    assert "allgather is not supported with Join at this time" in refused.error
    assert ranks.say(2, TensorRequest("join", "rank2")) == []
    reduced, end = ranks.say(0, reduce("z"), TensorRequest("join", "rank0"))
    assert reduced.joined == (1, 2)
    assert end.kind == "join" and end.last_joined == 0 and len(end.requests) == 3
    assert ranks.say(0, reduce("x")) == []  # the others have to come again


def test_a_second_round_is_known_by_numbers() -> None:
    ranks = Ranks(fusion_bytes=0)
    first = ranks.all_say(reduce("a"), reduce("b"))
    numbers = tuple(number for response in first for number in response.numbers)
    assert numbers == (0, 1)
    second = ranks.all_say(known=numbers)
    assert second == first


def test_a_changed_shape_has_a_number_of_its_own() -> None:
    ranks = Ranks()
    (first,) = ranks.all_say(reduce("a"))
    (changed,) = ranks.all_say(reduce("a", (7,)))
    assert changed.requests[0].shape == (7,) and changed.numbers != first.numbers
    ranks.say(0, known=first.numbers)
    (refused,) = ranks.say(1, known=changed.numbers)
    assert "rank 0 has (2,), rank 1 has (7,)" in refused.error


def test_only_what_comes_again_unchanged_gets_a_number_while_there_is_room() -> None:
    ranks = Ranks(capacity=2)
    granted = ranks.all_say(reduce("noname.0"))
    granted += ranks.all_say(TensorRequest("allgather", "g", shape=(2,)))
    granted += ranks.all_say(TensorRequest("broadcast", "b", root=0))
    granted += ranks.all_say(TensorRequest("barrier", "noname"))
    granted += ranks.all_say(reduce("late"))
    assert [response.numbers for response in granted] == [(-1,), (-1,), (0,), (1,), (-1,)]


def test_reductions_of_a_kind_travel_together_in_order_up_to_the_threshold() -> None:
    ranks = Ranks(fusion_bytes=5 * 8)
    granted = ranks.all_say(
        reduce("a"),
        reduce("d", dtype="float64"),
        reduce("b"),
        reduce("m", op=MAX),
        reduce("s", prescale=2.0),
        TensorRequest("broadcast", "x", root=0),
        reduce("c", (6,)),
        reduce("e", (3,)),
        reduce("f", (1,)),
        reduce("large", (1000,)),
    )
    assert names(granted) == [("a", "b", "c"), ("d",), ("m",), ("s",), ("x",), ("e", "f"), ("large",)]
    assert granted[0].numbers == tuple(ranks.coordinator._numbers[r] for r in granted[0].requests)


def test_nothing_travels_together_across_sets_errors_or_joined_ranks() -> None:
    ranks = Ranks(2, alone=(0,))
    ranks.say(1, reduce("a"), reduce("bad", (9,)), reduce("b"))
    granted = ranks.say(0, reduce("a"), reduce("bad"), reduce("own", process_set=1), reduce("b"))
    assert names(granted) == [("a", "b"), ("bad",), ("own",)]
    assert [bool(response.error) for response in granted] == [False, True, False]


def test_a_stall_is_told_once_with_missing_and_ready_ranks() -> None:
    ranks = Ranks(4)
    ranks.say(3, TensorRequest("join", "rank3"))
    ranks.say(2, reduce("late"))
    ranks.now = 5.0
    ranks.say(0, reduce("late"))
    assert ranks.coordinator.stalled(9.0, after_seconds=10) == []
    assert ranks.coordinator.stalled(11.0, after_seconds=10) == [
        "allreduce.late: missing ranks [1]; ready ranks [0, 2]"
    ]
    assert ranks.coordinator.stalled(30.0, after_seconds=10) == []
    assert ranks.coordinator.oldest() == 0.0
    ranks.say(1, reduce("late"))
    assert ranks.coordinator.oldest() is None
