"""Which tensors all ranks are ready for: the logic of rank 0, without communication of its own.

Ranks submit operations by name, each in its own order. An operation is granted when all ranks of its process set have
submitted it, and all of them then execute it in the order of the grants. What does not agree is refused on all ranks.
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

_MOST = 256


class Repeats:
    """Learns what was granted when every rank said the same numbers in one message, and knows it the next time."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._grants: dict[tuple[int, ...], list[Response]] = {}
        self._kept: dict[
            int, tuple[Message, float]
        ] = {}  # what some ranks have said of a round that is known, and when
        self._round: list[Message] = []  # what has been said since nothing was waiting

    def keep(self, message: Message, now: float) -> bool:
        """Whether a message belongs to a known round; it is then kept here until all ranks have said the same."""
        begun = next(iter(self._kept.values()), None)
        known = message.known if begun is None else begun[0].known
        if message.requests or message.leaves or message.known != known or known not in self._grants:
            return False
        self._kept[message.rank] = message, now
        return True

    def complete(self) -> list[Response]:
        """What is granted when all ranks have said the same."""
        if len(self._kept) < self._size:
            return []
        known = next(iter(self._kept.values()))[0].known
        self._kept.clear()
        return self._grants[known]

    def give_up(self) -> list[tuple[Message, float]]:
        """Hand out what was kept: another rank says something else."""
        kept, self._kept = list(self._kept.values()), {}
        return kept

    def missing(self, waiting: set[int]) -> set[int]:
        """The ranks that have not said what these ranks have."""
        return set() if waiting.isdisjoint(self._kept) else set(range(self._size)).difference(self._kept)

    def since(self) -> float | None:
        """When the first of what is kept was said."""
        return min((when for _, when in self._kept.values()), default=None)

    def note(self, message: Message) -> None:
        """A message that goes the long way."""
        if len(self._round) <= self._size:
            self._round.append(message)

    def learn(self, granted: list[Response]) -> None:
        """Nothing is waiting any more: what was granted belongs to what was said, if all ranks said the same once."""
        heard, self._round = self._round, []
        words = {message.known for message in heard}
        if len(heard) != self._size or len({message.rank for message in heard}) != self._size or len(words) != 1:
            return
        known = words.pop()
        plain = not any(message.requests for message in heard)
        if known and plain and len(self._grants) < _MOST and not any(each.error or each.joined for each in granted):
            self._grants[known] = granted

    def forget(self) -> None:
        """Numbers have lost their meaning."""
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
        """Whether all ranks have named the same request by its number, so that there is nothing to compare."""
        return all(request is self.first for request in self.requests.values())


class Coordinator:
    """Takes messages, gives responses; every call says what time it is. `sets` are the process sets of the moment."""

    def __init__(self, size: int, sets: dict[int, tuple[int, ...]], fusion_bytes: int, capacity: int) -> None:
        self._size = size
        self.sets = dict(sets)
        self._fusion_bytes = fusion_bytes
        self._capacity = capacity
        self._waiting: dict[Key, Waiting] = {}
        self._known: dict[int, TensorRequest] = {}
        self._numbers: dict[TensorRequest, int] = {}
        self._fresh = itertools.count()  # numbers that no request has had
        self._joined: list[int] = []  # in the order in which they came
        self._repeats = Repeats(size)

    def receive(self, message: Message, now: float) -> None:
        """Note what a rank has submitted."""
        if not message.requests and not message.known:
            return
        if not self._waiting and not self._joined and self._repeats.keep(message, now):
            return
        for early, when in self._repeats.give_up():
            self._note(early, when)
        self._note(message, now)

    def requests(self, message: Message) -> list[TensorRequest]:
        """What a rank has submitted, in full; what is of a process set that is gone has failed there."""
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
        """What all ranks can do now: single operations, and small ones of a kind as one."""
        if not self._waiting:
            return self._repeats.complete()
        ready = sorted(self._ready(), key=lambda keys: self._waiting[keys[0]].first.kind in SET_CHANGES)  # these last
        responses = [response for keys in ready for response in self._decide(keys)]
        granted = self._fused(responses) + self._all_joined()
        if not self._waiting:
            self._repeats.learn(granted)
        return granted

    def missing(self, waiting: set[int]) -> set[int]:
        """The ranks that have not submitted what these ranks have."""
        found = self._repeats.missing(waiting)
        for (number, _), entry in self._waiting.items():
            if not waiting.isdisjoint(entry.requests):
                found.update(rank for rank in self.sets[number] if rank not in entry.requests)
        return found.difference(self._joined)

    def stalled(self, now: float, after_seconds: float) -> list[str]:
        """A line for each operation that has waited so long, with the ranks that are missing; each is told once."""
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
        """Since when the longest waiting operation has waited."""
        times = [waiting.since for waiting in self._waiting.values() if waiting.first.kind != "join"]
        kept = self._repeats.since()
        return min(times if kept is None else [*times, kept], default=None)

    def _ready(self) -> Iterable[list[Key]]:
        """The operations that every rank which still has data has submitted; groups when all of them are."""
        groups: dict[str, list[Key]] = {}
        refused: set[Key] = set()
        for key, waiting in self._waiting.items():
            request = waiting.first
            if request.kind == "join" or key in refused or not self._all(key):
                continue
            names = {_group(request)} if waiting.is_one else _groups(waiting)
            if len(names) > 1:  # what only some ranks have in a group is refused, and the whole group with it
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
        """Whether all ranks are here; those that have joined need not submit anything."""
        there = self._waiting[key].requests
        if not self._joined:
            return len(there) == len(self.sets[key[0]])
        return all(rank in there or rank in self._joined for rank in self.sets[key[0]])

    def _decide(self, keys: list[Key]) -> list[Response]:
        """Grant or refuse operations that belong together, and forget them."""
        entries = [self._waiting.pop(key) for key in keys]
        errors = [error for entry in entries if (error := self._problem(entry))]
        requests = tuple(entry.requests[min(entry.requests)] for entry in entries)
        if errors:
            return [Response(requests[0].kind, requests[0].process_set, requests, error="\n".join(errors))]
        if requests[0].kind in SET_CHANGES:
            return [self._change_sets(requests[0])]
        members = self.sets[requests[0].process_set]
        joined = tuple(rank for rank in members if rank not in entries[0].requests)
        alike: dict[tuple[object, ...], list[Waiting]] = {}  # a group may hold several types of numbers
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
        """Why an operation cannot be done: what differs, on which ranks, with both values."""
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
            return f"{name}: {reference.kind} of tensors without dimensions: expected at least one, which counts rows."
        return self._wrong_change(reference) if reference.kind in SET_CHANGES else ""

    def _wrong_change(self, request: TensorRequest) -> str:
        """Why a process set cannot be added or removed."""
        if request.kind == "remove_set":
            there = request.members in self.sets.values() and request.members != self.sets[GLOBAL_SET]
            return "" if there else f"There is no process set with ranks {list(request.members)} that can be removed."
        return wrong_members(request.members, self.sets.values(), self._size)

    def _change_sets(self, request: TensorRequest) -> Response:
        """Add or remove a set; the number of one that is gone is free again, and nobody knows its requests any more."""
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
        """The number of a request that will come again, or -1."""
        if request.kind not in _CACHED or request.name.startswith(UNNAMED):
            return -1
        if request not in self._numbers and len(self._known) < self._capacity:
            number = self._numbers[request] = next(self._fresh)
            self._known[number] = request
        return self._numbers.get(request, -1)

    def _sizes(self, entry: Waiting) -> tuple[int, ...]:
        """First dimensions (allgather) or splits (alltoall) of all ranks, one rank after the other."""
        members = [entry.requests[rank] for rank in self.sets[entry.first.process_set]]
        if entry.first.kind == "allgather":
            return tuple(request.shape[0] for request in members)
        return tuple(rows for request in members for rows in request.splits)

    def _fused(self, responses: list[Response]) -> list[Response]:
        """Granted all-reduces that can travel in one message, put together in the order in which they came."""
        out: list[list[Response]] = []
        open_places: dict[tuple[object, ...], int] = {}
        filled: dict[int, int] = {}
        for response in responses:
            if response.kind != "allreduce" or response.error:
                out.append([response])
                continue
            like = (*_travels_with(response.requests[0]), response.joined)
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
        """The end of a join, when every rank has come to it."""
        if len(self._joined) < self._size:
            return []
        requests = tuple(self._waiting.pop(key).first for key in list(self._waiting) if key[1].startswith("join."))
        last, self._joined = self._joined[-1], []
        return [Response("join", GLOBAL_SET, requests, last_joined=last)]


def _groups(waiting: Waiting) -> set[str]:
    """The groups that ranks have it in."""
    return {_group(request) for request in waiting.requests.values()}


def _group(request: TensorRequest) -> str:
    """A group has another name for each number of tensors."""
    if not request.group:
        return ""
    return f"{request.process_set}.{request.kind}.{request.group} of {request.group_size}"


def _travels_with(request: TensorRequest) -> tuple[object, ...]:
    """What all-reduces in one message have in common; one of several tensors is a message already."""
    own = request.name if request.parts else ""
    return own, request.process_set, request.dtype, request.device, request.op, request.prescale, request.postscale


def _compared(one: TensorRequest, other: TensorRequest) -> Iterable[tuple[str, object, object]]:
    """What must agree between two ranks, in the order in which it is told."""
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
