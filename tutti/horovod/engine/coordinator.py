"""Which operations all ranks are ready for: the logic of rank 0, without communication.

Ranks submit operations by name, each in its own order. An operation is granted when all ranks of its process set have
submitted it, and all of them then execute it in the order of the grants. Requests that do not agree fail on all ranks.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from tutti.horovod.engine.messages import (
    GLOBAL_SET,
    OP_NAMES,
    SET_CHANGES,
    UNNAMED,
    Key,
    Message,
    Response,
    TensorRequest,
)

_MAX_CACHED_ROUNDS = 256


class Repeats:
    """Caches what was granted when every rank sent the same request numbers in one message."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._grants: dict[tuple[int, ...], list[Response]] = {}
        self._kept: dict[int, tuple[Message, float]] = {}  # messages of ranks in a cached round, and when they came
        self._round: list[Message] = []  # messages since no operation was waiting

    def keep(self, message: Message, now: float) -> bool:
        """Return whether a message belongs to a cached round; it is then kept until all ranks have sent the same."""
        begun = next(iter(self._kept.values()), None)
        known = message.known if begun is None else begun[0].known
        if message.requests or message.leaves or message.known != known or known not in self._grants:
            return False
        self._kept[message.rank] = message, now
        return True

    def complete(self) -> list[Response]:
        """Return what is granted, if all ranks have sent the same."""
        if len(self._kept) < self._size:
            return []
        known = next(iter(self._kept.values()))[0].known
        self._kept.clear()
        return self._grants[known]

    def give_up(self) -> list[tuple[Message, float]]:
        """Return and drop the messages that were kept, since another rank sent something else."""
        kept, self._kept = list(self._kept.values()), {}
        return kept

    def missing(self, waiting: set[int]) -> set[int]:
        """Return the ranks that have not sent what these ranks have."""
        return set() if waiting.isdisjoint(self._kept) else set(range(self._size)).difference(self._kept)

    def since(self) -> float | None:
        """Return when the first of the kept messages came."""
        return min((when for _, when in self._kept.values()), default=None)

    def note(self, message: Message) -> None:
        """Record a message that is not part of a cached round."""
        if len(self._round) <= self._size:
            self._round.append(message)

    def learn(self, granted: list[Response]) -> None:
        """Cache a round, now that no operation waits, if all ranks sent the same numbers once."""
        round_messages, self._round = self._round, []
        numbers = {message.known for message in round_messages}
        if (
            len(round_messages) != self._size
            or len({message.rank for message in round_messages}) != self._size
            or len(numbers) != 1
        ):
            return
        known = numbers.pop()
        plain = not any(message.requests for message in round_messages)
        if (
            known
            and plain
            and len(self._grants) < _MAX_CACHED_ROUNDS
            and not any(each.error or each.joined for each in granted)
        ):
            self._grants[known] = granted

    def forget(self) -> None:
        """Clear the cache, since request numbers have changed."""
        self._grants.clear()


_ROWS_MAY_DIFFER = ("allgather", "alltoall")
_HAVE_ROWS = ("allgather", "alltoall", "reducescatter")
_CACHED = ("allreduce", "broadcast", "reducescatter", "barrier")  # whose requests are the same on all ranks
_BYTES = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "int16": 2, "uint8": 1, "int8": 1, "bool": 1}


@dataclass
class Waiting:
    """An operation that some ranks have submitted."""

    first: TensorRequest
    since: float
    requests: dict[int, TensorRequest] = field(default_factory=dict)
    warned: bool = False

    @property
    def is_one(self) -> bool:
        """Return whether all ranks sent the same request by its number, so that there is nothing to compare."""
        return all(request is self.first for request in self.requests.values())


class Coordinator:
    """Turns messages into responses; the caller passes the time. `sets` holds the current process sets."""

    def __init__(self, size: int, sets: dict[int, tuple[int, ...]], fusion_bytes: int, capacity: int) -> None:
        self._size = size
        self.sets = dict(sets)
        self._fusion_bytes = fusion_bytes
        self._capacity = capacity
        self._waiting: dict[Key, Waiting] = {}
        self._known: dict[int, TensorRequest] = {}
        self._numbers: dict[TensorRequest, int] = {}
        self._fresh = itertools.count()  # numbers that no request has had
        self._joined: list[int] = []  # in the order in which they joined
        self._repeats = Repeats(size)

    def receive(self, message: Message, now: float) -> None:
        """Record what a rank has submitted."""
        if not message.requests and not message.known:
            return
        if not self._waiting and not self._joined and self._repeats.keep(message, now):
            return
        for early, when in self._repeats.give_up():
            self._note(early, when)
        self._note(message, now)

    def requests(self, message: Message) -> list[TensorRequest]:
        """Return the requests of a message in full; those of a removed process set have already failed on the rank."""
        known = (self._known[number] for number in message.known if number in self._known)
        return [request for request in (*message.requests, *known) if request.process_set in self.sets]

    def _note(self, message: Message, now: float) -> None:
        self._repeats.note(message)
        for request in self.requests(message):
            waiting = self._waiting.get(request.key)
            if waiting is None:
                waiting = self._waiting[request.key] = Waiting(request, now)
            waiting.requests[message.rank] = request
            if request.kind == "join":
                self._joined.append(message.rank)

    def grants(self) -> list[Response]:
        """Return what all ranks can execute now; small operations of one kind are fused."""
        if not self._waiting:
            return self._repeats.complete()
        ready = sorted(
            self._ready(), key=lambda keys: self._waiting[keys[0]].first.kind in SET_CHANGES
        )  # changes of process sets last
        responses = [response for keys in ready for response in self._decide(keys)]
        granted = self._fused(responses) + self._all_joined()
        if not self._waiting:
            self._repeats.learn(granted)
        return granted

    def missing(self, waiting: set[int]) -> set[int]:
        """Return the ranks that have not submitted what these ranks have."""
        found = self._repeats.missing(waiting)
        for (number, _), entry in self._waiting.items():
            if not waiting.isdisjoint(entry.requests):
                found.update(rank for rank in self.sets[number] if rank not in entry.requests)
        return found.difference(self._joined)

    def stalled(self, now: float, after_seconds: float) -> list[str]:
        """Return a line for each operation that has waited so long, with the missing ranks; each operation once."""
        lines = []
        since = self._repeats.since()
        if since is not None and now - since >= after_seconds:
            for early, when in self._repeats.give_up():
                self._note(early, when)
        for (number, name), waiting in self._waiting.items():
            if waiting.first.kind == "join" or waiting.warned or now - waiting.since < after_seconds:
                continue
            waiting.warned = True
            missing = [r for r in self.sets[number] if r not in waiting.requests and r not in self._joined]
            lines.append(f"{name}: missing ranks {_listed(missing)}; ready ranks {_listed(waiting.requests)}")
        return lines

    def oldest(self) -> float | None:
        """Return when the operation that waits longest was submitted."""
        times = [waiting.since for waiting in self._waiting.values() if waiting.first.kind != "join"]
        kept = self._repeats.since()
        return min(times if kept is None else [*times, kept], default=None)

    def _ready(self) -> Iterable[list[Key]]:
        """Return the operations that every rank with data has submitted; a group once all of it is."""
        groups: dict[str, list[Key]] = {}
        refused: set[Key] = set()
        for key, waiting in self._waiting.items():
            request = waiting.first
            if request.kind == "join" or key in refused or not self._all(key):
                continue
            names = {_group(request)} if waiting.is_one else _groups(waiting)
            if len(names) > 1:  # ranks disagree about the group: the whole group fails
                taken = [each for each, other in self._waiting.items() if each == key or names & _groups(other) - {""}]
                refused.update(taken)
                yield taken
            elif not request.group:
                yield [key]
            else:
                group = groups.setdefault(names.pop(), [])
                group.append(key)
                if len(group) == request.group_size:
                    yield group

    def _all(self, key: Key) -> bool:
        """Return whether all ranks have submitted an operation; those that have joined need not."""
        there = self._waiting[key].requests
        if not self._joined:
            return len(there) == len(self.sets[key[0]])
        return all(rank in there or rank in self._joined for rank in self.sets[key[0]])

    def _decide(self, keys: list[Key]) -> list[Response]:
        """Grant or refuse operations that belong together, and remove them from those that wait."""
        entries = [self._waiting.pop(key) for key in keys]
        errors = [error for entry in entries if (error := self._problem(entry))]
        requests = tuple(entry.requests[min(entry.requests)] for entry in entries)
        if errors:
            return [Response(requests[0].kind, requests[0].process_set, requests, error="\n".join(errors))]
        if requests[0].kind in SET_CHANGES:
            return [self._change_sets(requests[0])]
        members = self.sets[requests[0].process_set]
        joined = tuple(rank for rank in members if rank not in entries[0].requests)
        alike: dict[tuple[object, ...], list[Waiting]] = {}  # a group may have several dtypes
        for entry in entries:
            alike.setdefault((entry.first.dtype, entry.first.device), []).append(entry)
        return [self._granted(each, joined) for each in alike.values()]

    def _granted(self, entries: list[Waiting], joined: tuple[int, ...]) -> Response:
        requests = tuple(entry.requests[min(entry.requests)] for entry in entries)
        first = requests[0]
        numbers = tuple(self._number(request) for request in requests)
        sizes = tuple(self._sizes(entry) for entry in entries) if first.kind in _ROWS_MAY_DIFFER else ()
        return Response(first.kind, first.process_set, requests, numbers, sizes=sizes, joined=joined)

    def _problem(self, entry: Waiting) -> str:
        """Return why an operation cannot be executed: what differs, on which ranks, with both values."""
        ranks = sorted(entry.requests)
        reference, name = entry.requests[ranks[0]], entry.first.key[1]
        if reference.kind not in ("allreduce", "barrier") and len(ranks) < len(self.sets[entry.first.process_set]):
            return f"{name}: {reference.kind} is not supported with Join at this time."
        for rank in () if entry.is_one else ranks[1:]:
            for what, mine, theirs in _compared(reference, entry.requests[rank]):
                if mine != theirs:
                    return (
                        f"{name}: mismatched {what}: rank {ranks[0]} has {mine}, rank {rank} has {theirs}. "
                        "Expected the same on all ranks."
                    )
        if reference.kind in _HAVE_ROWS and not reference.shape:
            return f"{name}: {reference.kind} of tensors without dimensions: expected at least one dimension, the rows."
        return self._wrong_change(reference) if reference.kind in SET_CHANGES else ""

    def _wrong_change(self, request: TensorRequest) -> str:
        """Return why a process set cannot be added or removed, or an empty string."""
        if request.kind == "remove_set":
            there = request.members in self.sets.values() and request.members != self.sets[GLOBAL_SET]
            return "" if there else f"There is no process set with ranks {list(request.members)} that can be removed."
        return wrong_members(request.members, self.sets.values(), self._size)

    def _change_sets(self, request: TensorRequest) -> Response:
        """Add or remove a process set; a removed one frees its number and drops its cached requests."""
        if request.kind == "add_set":
            number = next(number for number in itertools.count(GLOBAL_SET + 1) if number not in self.sets)
            self.sets[number] = request.members
        else:
            number = next(number for number, members in self.sets.items() if members == request.members)
            del self.sets[number]
            self._waiting = {key: waiting for key, waiting in self._waiting.items() if key[0] != number}
            self._known = {own: known for own, known in self._known.items() if known.process_set != number}
            self._numbers = {known: own for own, known in self._known.items()}
            self._repeats.forget()
        return Response(request.kind, GLOBAL_SET, (request,), set_number=number)

    def _number(self, request: TensorRequest) -> int:
        """Return the number of a request that can be cached, or -1."""
        if request.kind not in _CACHED or request.name.startswith(UNNAMED):
            return -1
        if request not in self._numbers and len(self._known) < self._capacity:
            number = self._numbers[request] = next(self._fresh)
            self._known[number] = request
        return self._numbers.get(request, -1)

    def _sizes(self, entry: Waiting) -> tuple[int, ...]:
        """Return the first dimensions (allgather) or splits (alltoall) of all ranks, one rank after the other."""
        members = [entry.requests[rank] for rank in self.sets[entry.first.process_set]]
        if entry.first.kind == "allgather":
            return tuple(request.shape[0] for request in members)
        return tuple(rows for request in members for rows in request.splits)

    def _fused(self, responses: list[Response]) -> list[Response]:
        """Fuse granted all-reduces that can be sent in one message, in their order."""
        out: list[list[Response]] = []
        open_places: dict[tuple[object, ...], int] = {}
        filled: dict[int, int] = {}
        for response in responses:
            if response.kind != "allreduce" or response.error:
                out.append([response])
                continue
            like = (*_fusion_key(response.requests[0]), response.joined)
            size = sum(_bytes(request) for request in response.requests)
            place = open_places.get(like)
            if place is None or filled[place] + size > self._fusion_bytes:
                place = open_places[like] = len(out)
                filled[place] = 0
                out.append([])
            out[place].append(response)
            filled[place] += size
        return [_merged(each) for each in out]

    def _all_joined(self) -> list[Response]:
        """Return the end of a join, once every rank has joined."""
        if len(self._joined) < self._size:
            return []
        requests = tuple(self._waiting.pop(key).first for key in list(self._waiting) if key[1].startswith("join."))
        last, self._joined = self._joined[-1], []
        return [Response("join", GLOBAL_SET, requests, last_joined=last)]


def _groups(waiting: Waiting) -> set[str]:
    """Return the groups in which ranks submitted an operation."""
    return {_group(request) for request in waiting.requests.values()}


def _group(request: TensorRequest) -> str:
    """Return the full name of a request's group, which includes the number of tensors."""
    if not request.group:
        return ""
    return f"{request.process_set}.{request.kind}.{request.group} of {request.group_size}"


def _fusion_key(request: TensorRequest) -> tuple[object, ...]:
    """Return what all-reduces in one message must share; a packed one is a message by itself."""
    own = request.name if request.parts else ""
    return own, request.process_set, request.dtype, request.device, request.op, request.prescale, request.postscale


def _compared(one: TensorRequest, other: TensorRequest) -> Iterable[tuple[str, object, object]]:
    """Return what must agree between two ranks, in the order in which it is reported."""
    yield "operations", one.kind, other.kind
    yield "data types", one.dtype, other.dtype
    if one.kind in _ROWS_MAY_DIFFER:
        yield "numbers of dimensions", len(one.shape), len(other.shape)
        yield "shapes after the first dimension", one.shape[1:], other.shape[1:]
    else:
        for place, (mine, theirs) in enumerate(itertools.zip_longest(one.parts, other.parts)):
            yield f"shapes of tensor {place}", mine, theirs
        yield "shapes", one.shape, other.shape
    yield "reduce operations", OP_NAMES[one.op], OP_NAMES[other.op]
    yield "prescale factors", one.prescale, other.prescale
    yield "postscale factors", one.postscale, other.postscale
    yield "root ranks", one.root, other.root
    yield "devices", one.device, other.device
    yield "groups", (one.group, one.group_size), (other.group, other.group_size)
    yield "ranks of the process set", list(one.members), list(other.members)


def _merged(responses: list[Response]) -> Response:
    first = responses[0]
    if len(responses) == 1:
        return first
    requests = tuple(request for response in responses for request in response.requests)
    numbers = tuple(number for response in responses for number in response.numbers)
    return Response(first.kind, first.process_set, requests, numbers, joined=first.joined)


def _bytes(request: TensorRequest) -> int:
    return math.prod(request.shape) * _BYTES.get(request.dtype, 4)


def _listed(ranks: Iterable[int]) -> str:
    return "[" + ", ".join(map(str, sorted(ranks))) + "]"


def wrong_members(ranks: tuple[int, ...], there: Iterable[tuple[int, ...]], size: int) -> str:
    """Return why ranks cannot form a new process set, or an empty string."""
    if not ranks or ranks[0] < 0 or ranks[-1] >= size:
        return f"A process set with ranks {list(ranks)}: expected ranks from 0 to {size - 1}, at least one."
    if ranks in there:
        return f"A process set with ranks {list(ranks)} exists already."
    return ""
