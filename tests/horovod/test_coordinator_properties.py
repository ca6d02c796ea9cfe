"""Properties of the coordinator, for any order in which ranks submit operations, join, and change process sets."""

import math
from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tutti.horovod.engine.coordinator import Coordinator
from tutti.horovod.engine.messages import GLOBAL_SET, MAX, Key, Message, Response, TensorRequest

Operation = tuple[int, str]  # process set and name
JOIN_SUPPORTED = ("allreduce", "barrier")
NAMES = ("a", "b", "c", "double", "max", "group", "broadcast", "barrier", "scatter", "gather", "swap", "noname.1")
STEADY = (("a", "b"), ("a", "b", "group", "broadcast"), ("c",))  # what comes again and again


def requests_of(operation: Operation, rank: int, members: tuple[int, ...], is_wrong: bool) -> tuple[TensorRequest, ...]:
    """What a rank submits for an operation; a wrong one has a shape or a type that no other rank has."""
    number, name = operation
    rows = 100 + rank if is_wrong else 3
    plain = {"process_set": number, "dtype": "float32", "shape": (rows, 2)}
    more: dict[str, dict[str, object]] = {
        "double": {"dtype": "float64"},
        "max": {"op": MAX},
        "broadcast": {"kind": "broadcast", "root": members[0]},
        "barrier": {"kind": "barrier", "shape": (), "dtype": f"wrong{rank}" if is_wrong else ""},
        "scatter": {"kind": "reducescatter"},
        "gather": {"kind": "allgather", "shape": (rank, rows)},
        "swap": {"kind": "alltoall", "shape": (len(members), rows), "splits": (1,) * len(members)},
    }
    if name == "group":
        sizes = {"g0": (1,), "g1": (rows,), "g2": (4,)}
        types = {"g2": "float64"}
        return tuple(
            TensorRequest(
                "allreduce", each, number, types.get(each, "float32"), shape, group="the group", group_size=len(sizes)
            )
            for each, shape in sizes.items()
        )
    return (TensorRequest(**{"kind": "allreduce", "name": name} | plain | more.get(name, {})),)  # pyright: ignore


class Job(RuleBasedStateMachine):
    """Ranks talk to two coordinators, one of which never takes the short way for rounds that come again."""

    @initialize(
        size=st.integers(2, 4), fusion_bytes=st.sampled_from([0, 60, 1 << 20]), capacity=st.sampled_from([0, 2, 100])
    )
    def begin(self, size: int, fusion_bytes: int, capacity: int) -> None:
        self.size, self.fusion_bytes, self.capacity = size, fusion_bytes, capacity
        self.sets = {GLOBAL_SET: tuple(range(size)), 1: tuple(range(size - 1))}
        self.coordinator = Coordinator(size, self.sets, fusion_bytes, capacity)
        self.thorough = Coordinator(size, self.sets, fusion_bytes, capacity)
        self.thorough._repeats.keep = lambda message, now: False  # type: ignore[method-assign]
        self.now = 0.0
        self.submitted: dict[Operation, dict[int, tuple[TensorRequest, ...]]] = {}
        self.since: dict[Operation, float] = {}
        self.numbers: list[dict[TensorRequest, int]] = [{} for _ in range(size)]  # that each rank has been told
        self.meanings: dict[int, TensorRequest] = {}
        self.joined: list[int] = []

    @rule(
        rank=st.integers(0, 3),
        names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True),
        is_wrong=st.sampled_from([False, False, False, True]),
        in_a_set=st.booleans(),
    )
    def one_rank_submits(self, rank: int, names: list[str], is_wrong: bool, in_a_set: bool) -> None:
        number = max(self.sets) if in_a_set else GLOBAL_SET
        self._submit(rank % self.size, [(number, name) for name in names], is_wrong)

    @rule(names=st.sampled_from(STEADY), data=st.data(), rounds=st.integers(1, 4))
    def ranks_submit_the_same_several_times(self, names: tuple[str, ...], data: st.DataObject, rounds: int) -> None:
        """The last time, some ranks may leave it to the others to go on."""
        operations = [(GLOBAL_SET, name) for name in names]
        for _ in range(rounds - 1):
            for rank in data.draw(st.permutations(range(self.size))):
                self._submit(rank, operations)
        some = data.draw(st.integers(1, self.size))
        for rank in data.draw(st.permutations(range(self.size)))[:some]:
            self._submit(rank, operations)

    @rule(rank=st.integers(0, 3))
    def a_rank_joins(self, rank: int) -> None:
        rank %= self.size
        if rank not in self.joined:
            self.joined.append(rank)
            self._say(Message(rank, (TensorRequest("join", f"rank{rank}"),)))

    @rule(seconds=st.sampled_from([1.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        found = self.coordinator.stalled(self.now, 60.0)
        assert sorted(found) == sorted(self.thorough.stalled(self.now, 60.0))

    @precondition(lambda self: not self.joined)
    @rule(data=st.data(), ranks=st.sets(st.integers(0, 3), min_size=1))
    def a_process_set_is_added(self, data: st.DataObject, ranks: set[int]) -> None:
        members = tuple(sorted(rank for rank in ranks if rank < self.size))
        if members and members not in self.sets.values():
            number = min(set(range(1, 20)) - set(self.sets))  # 4 ranks have 15 subsets
            assert self._change("add_set", members, data).set_number == number
            self.sets[number] = members

    @precondition(lambda self: not self.joined and len(self.sets) > 1)
    @rule(data=st.data())
    def a_process_set_is_removed(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(set(self.sets) - {GLOBAL_SET})))
        assert self._change("remove_set", self.sets[number], data).set_number == number
        del self.sets[number]
        for kept in (self.submitted, self.since):
            for operation in [operation for operation in kept if operation[0] == number]:
                del kept[operation]
        for numbers in self.numbers:
            for request in [request for request in numbers if request.process_set == number]:
                del numbers[request]

    @invariant()
    def what_waits_is_told(self) -> None:
        if hasattr(self, "submitted"):
            assert self.coordinator.oldest() == self.thorough.oldest() == min(self.since.values(), default=None)
            for rank in range(self.size):
                waiting = [each for each, ranks in self.submitted.items() if rank in ranks]
                missing = {other for each in waiting for other in self._absent(each) if other not in self.joined}
                found = self.coordinator.missing({rank}) - {rank}
                assert found == missing if rank not in self.joined else found >= missing

    def teardown(self) -> None:
        """Everything that somebody has submitted is granted once the others submit it too."""
        if hasattr(self, "submitted"):
            for operation in list(self.submitted):
                for rank in self._absent(operation) if operation in self.submitted else ():
                    self._submit(rank, [operation])
            assert not self.submitted
            assert not self.coordinator.missing(set(range(self.size)) - set(self.joined))

    def _absent(self, operation: Operation) -> list[int]:
        return [rank for rank in self.sets[operation[0]] if rank not in self.submitted.get(operation, {})]

    def _is_ready(self, operation: Operation) -> bool:
        return all(rank in self.joined for rank in self._absent(operation))

    def _submit(self, rank: int, operations: Iterable[Operation], is_wrong: bool = False) -> None:
        """Submit what this rank does not wait for yet, by numbers where it knows them."""
        if rank in self.joined:
            return
        requests: list[TensorRequest] = []
        for operation in operations:
            members = self.sets[operation[0]]
            if rank in members and rank not in self.submitted.get(operation, {}):
                own = requests_of(operation, rank, members, is_wrong)
                self.submitted.setdefault(operation, {})[rank] = own
                self.since.setdefault(operation, self.now)
                requests += own
        numbers = [self.numbers[rank].get(request, -1) for request in requests]
        new = tuple(request for request, number in zip(requests, numbers, strict=True) if number < 0)
        self._say(Message(rank, new, tuple(sorted(number for number in numbers if number >= 0))))

    def _change(self, kind: str, members: tuple[int, ...], data: st.DataObject) -> Response:
        """All ranks ask for a change of the process sets; it is granted with the last of them."""
        *early, last = data.draw(st.permutations(range(self.size)))
        request = TensorRequest(kind, "change", members=members)  # pyright: ignore[reportArgumentType]
        for rank in early:
            self._say(Message(rank, (request,)))
        (response,) = self._grants(Message(last, (request,)))
        assert response.kind == kind and response.requests == (request,) and not response.error
        return response

    def _grants(self, message: Message) -> list[Response]:
        """What is granted after a message, the same by both ways."""
        self.coordinator.receive(message, self.now)
        self.thorough.receive(message, self.now)
        found = self.coordinator.grants()
        assert found == self.thorough.grants()
        assert self.coordinator.grants() == []
        return found

    def _say(self, message: Message) -> None:
        responses = self._grants(message)
        ready = {operation: ranks for operation, ranks in self.submitted.items() if self._is_ready(operation)}
        if len(self.joined) == self.size:
            end = responses.pop()
            assert end.kind == "join" and end.last_joined == self.joined[-1] and len(end.requests) == self.size
        answered: list[Key] = []
        for response in responses:
            self._check(response, ready)
            answered += [request.key for request in response.requests]
        expected = [own.key for ranks in ready.values() for own in next(iter(ranks.values()))]
        assert sorted(answered) == sorted(expected)  # all that is ready, each exactly once, and nothing else
        for operation in ready:
            del self.submitted[operation], self.since[operation]
        if len(self.joined) == self.size:
            self.joined = []

    def _check(self, response: Response, ready: dict[Operation, dict[int, tuple[TensorRequest, ...]]]) -> None:
        owners = {own.key: each for each, ranks in ready.items() for own in next(iter(ranks.values()))}
        for request in response.requests:
            operation = owners[request.key]
            ranks, absent = ready[operation], self._absent(operation)
            is_alike = all(_agree(own, other) for own in ranks.values() for other in ranks.values())
            is_supported = not absent or request.kind in JOIN_SUPPORTED
            assert bool(response.error) == (not is_alike or not is_supported), response.error
            assert request in ranks[min(ranks)]
            if not response.error:
                assert list(response.joined) == absent
        if response.error:
            assert not response.numbers
            return
        self._check_fusion(response)
        self._learn(response)
        if response.kind == "allgather":
            assert response.sizes == (tuple(rank for rank in self.sets[response.process_set]),)

    def _check_fusion(self, response: Response) -> None:
        """One message holds numbers of one kind for one set, and only one operation or group beyond the threshold."""
        assert len({(r.kind, r.process_set, r.dtype, r.op) for r in response.requests}) == 1
        sizes = [math.prod(r.shape) * (8 if r.dtype == "float64" else 4) for r in response.requests]
        units = {r.group or r.name for r in response.requests}
        assert len(units) == 1 or (response.kind == "allreduce" and sum(sizes) <= self.fusion_bytes)

    def _learn(self, response: Response) -> None:
        """Ranks note the numbers of requests; a number never means two requests."""
        assert len(response.numbers) == len(response.requests)
        for request, number in zip(response.requests, response.numbers, strict=True):
            if number >= 0:
                assert self.meanings.setdefault(number, request) == request
                for rank in self.sets[response.process_set]:
                    self.numbers[rank][request] = number
        assert len({request for told in self.numbers for request in told}) <= self.capacity


def _agree(own: tuple[TensorRequest, ...], other: tuple[TensorRequest, ...]) -> bool:
    """Whether two ranks have submitted the same; the rows of a gather may differ."""
    if own[0].kind == "allgather":
        return own[0].shape[1:] == other[0].shape[1:]
    return own == other


class TestJob(Job.TestCase):
    settings = settings(max_examples=120, stateful_step_count=30, deadline=None, derandomize=True)
