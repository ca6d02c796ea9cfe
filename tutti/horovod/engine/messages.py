"""The messages between ranks and their coordinator, and the channels that carry them."""

import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args

from tutti.ranks.hub_client import HubClient

Kind = Literal[
    "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join", "add_set", "remove_set"
]
Key = tuple[int, str]  # process set, and the name prefixed with the kind

AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)
OP_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
GLOBAL_SET = 0
SET_CHANGES = ("add_set", "remove_set")  # one at a time: they share a key
UNNAMED = "noname."  # and a number, for operations without a name: it is not used again


class TensorRequest(NamedTuple):
    """One rank's request for an operation, with everything that must agree over ranks."""

    kind: Kind
    name: str
    process_set: int = GLOBAL_SET
    dtype: str = ""
    shape: tuple[int, ...] = ()
    device: str = "cpu"
    op: int = SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    splits: tuple[int, ...] = ()  # alltoall: rows for each rank
    group: str = ""  # grouped operations are executed together
    group_size: int = 1
    parts: tuple[tuple[int, ...], ...] = ()  # shapes of the tensors that are packed in this one
    members: tuple[int, ...] = ()  # of a process set to add or remove

    @classmethod
    def from_plain(cls, plain: list[Any]) -> "TensorRequest":
        """Return a request as another rank has sent it."""
        request = cls(*(_frozen(value) for value in plain))
        if request.kind not in get_args(Kind) or not isinstance(request.name, str):
            raise ValueError(f"expected a request, not {plain!r:.80}")
        return request

    @property
    def key(self) -> Key:
        return self.process_set, f"{'process_set' if self.kind in SET_CHANGES else self.kind}.{self.name}"


@dataclass(frozen=True)
class Message:
    """A rank's message to the coordinator: new requests, in full or by the number of one that was granted before."""

    rank: int
    requests: tuple[TensorRequest, ...] = ()
    known: tuple[int, ...] = ()
    waits: bool = False  # a thread of this rank waits for a result
    lost: str = ""  # an operation failed here, perhaps because a rank has ended
    leaves: bool = False  # this rank shuts down
    gone: bool = False  # the connection of this rank has ended

    def plain(self) -> list[Any]:
        """Return what is sent of it."""
        return [self.requests, self.known, self.waits, self.lost, self.leaves]

    @classmethod
    def from_plain(cls, rank: int, plain: list[Any]) -> "Message":
        """Return the message that a rank has sent."""
        requests, known, waits, lost, leaves = plain
        made = tuple(TensorRequest.from_plain(each) for each in requests)
        return cls(rank, made, tuple(map(int, known)), bool(waits), str(lost), bool(leaves))


@dataclass(frozen=True)
class Response:
    """The coordinator's message to the ranks of a process set: execute this now, in the order of responses."""

    kind: Kind | Literal["hurry", "shutdown"]  # hurry: another rank waits for requests of this rank
    process_set: int = GLOBAL_SET
    requests: tuple[TensorRequest, ...] = ()  # one, or several that are executed as one
    numbers: tuple[int, ...] = ()  # by which ranks may refer to them from now on, or none
    error: str = ""
    sizes: tuple[tuple[int, ...], ...] = ()  # allgather: first dimensions; alltoall: splits; rank by rank of the set
    joined: tuple[int, ...] = ()  # ranks without data, which take part with zeros
    last_joined: int = -1
    set_number: int = -1  # of the process set that was added or removed

    def plain(self) -> list[Any]:
        """Return what is sent of it."""
        return [getattr(self, name) for name in _RESPONSE_FIELDS]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> "Response":
        """Return a response that the coordinator has sent."""
        kind, process_set, requests, *rest = plain
        made = tuple(TensorRequest.from_plain(each) for each in requests)
        return cls(kind, int(process_set), made, *(_frozen(value) for value in rest))


_RESPONSE_FIELDS = [field.name for field in fields(Response)]


def _frozen(value: Any) -> Any:
    """Return a value with tuples in the place of lists."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


class ChannelClosed(Exception):
    """The other end of the channel does not respond."""


class Channel(Protocol):
    """Carries messages to the coordinator and responses to ranks. Each method is called from one thread only."""

    def send(self, message: Message) -> None: ...

    def receive(self) -> list[Message]: ...

    def respond(self, ranks: Sequence[int], responses: list[Response]) -> None: ...

    def responses(self, deadline_seconds: float) -> list[Response]: ...

    def leave(self, size: int, seconds: float) -> None: ...


class LocalChannel:
    """The channel of a job with one rank."""

    def __init__(self) -> None:
        self._up: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._down: queue.SimpleQueue[list[Response]] = queue.SimpleQueue()

    def send(self, message: Message) -> None:
        self._up.put(message)

    def receive(self) -> list[Message]:
        return _take_all(self._up)

    def respond(self, ranks: Sequence[int], responses: list[Response]) -> None:
        self._down.put(responses)

    def responses(self, deadline_seconds: float) -> list[Response]:
        return _take(self._down, deadline_seconds)

    def leave(self, size: int, seconds: float) -> None:
        """Return at once: there is no other rank."""


class HubChannel:
    """Messages of ranks to the coordinator in rank 0, and its responses, over the connections of the hub.

    Ranks and the coordinator send a heartbeat every few seconds: a rank that receives nothing for longer treats the
    coordinator as dead, and the coordinator determines which ranks are silent. A connection that ends says so at once.
    """

    def __init__(self, hub: HubClient, generation: int, rank: int) -> None:
        self._hub = hub
        self._generation = generation
        self._rank = rank
        self._up: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._down: queue.SimpleQueue[list[Response] | None] = queue.SimpleQueue()
        self._left: set[int] = set()  # on rank 0: ranks that receive no more
        self._changed = threading.Condition()
        if hub.hub is not None:
            hub.hub.serve_engine(self._on_message, self._on_gone)
        else:
            hub.on("engine", self._on_responses)
            hub.on("ended", self._on_ended)

    def send(self, message: Message) -> None:
        if self._rank == 0:
            self._up.put(message)
        elif self._hub.ended:
            raise ChannelClosed("the connection was closed")
        else:
            self._send(message=message.plain())

    def receive(self) -> list[Message]:
        """Return all messages that have arrived, or wait for the next one: this rank's heartbeat, at the latest."""
        return _take_all(self._up)

    def respond(self, ranks: Sequence[int], responses: list[Response]) -> None:
        assert self._hub.hub is not None
        content = {"generation": self._generation, "responses": [response.plain() for response in responses]}
        self._hub.hub.send([rank for rank in ranks if rank], "engine", content)
        if 0 in ranks:
            self._down.put(responses)

    def responses(self, deadline_seconds: float) -> list[Response]:
        found = _take(self._down, deadline_seconds)
        if found is None:
            raise ChannelClosed("the connection was closed")
        return found

    def leave(self, size: int, seconds: float) -> None:
        """Leave the channel; rank 0, in whose process the hub is, waits until all ranks have left."""
        if self._rank:
            self._send(left=True)
            self._hub.off("engine", self._on_responses)
            self._hub.off("ended", self._on_ended)
            return
        with self._changed:
            self._changed.wait_for(lambda: len(self._left | {0}) == size, seconds)

    def interrupt(self, why: str) -> None:
        """End the job on this rank, since another rank is dead, and let no rank wait for that one; for any thread."""
        self._down.put([Response("shutdown", error=why)])
        with suppress(ChannelClosed):
            self.send(Message(self._rank, leaves=True))
        with self._changed:
            self._left.update(range(self._hub.world_size))
            self._changed.notify_all()

    def _send(self, **content: Any) -> None:
        self._hub.send("engine", generation=self._generation, **content)

    def _on_message(self, rank: int, content: dict[str, Any]) -> bool:
        """Take a message of this generation or an earlier one, which is over; one of the next has to wait."""
        if content["generation"] == self._generation and "message" in content:
            self._up.put(Message.from_plain(rank, content["message"]))
        elif content["generation"] == self._generation:
            self._leave(rank)
        return content["generation"] <= self._generation

    def _on_gone(self, rank: int) -> None:
        self._up.put(Message(rank, gone=True))
        self._leave(rank)

    def _leave(self, rank: int) -> None:
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def _on_responses(self, content: dict[str, Any]) -> None:
        if content["generation"] == self._generation:
            self._down.put([Response.from_plain(plain) for plain in content["responses"]])

    def _on_ended(self, _: dict[str, Any]) -> None:
        self._down.put(None)


T = TypeVar("T")


def _take(items: queue.SimpleQueue[T], seconds: float) -> T:
    try:
        return items.get(timeout=seconds)
    except queue.Empty as error:
        raise ChannelClosed(f"nothing came for {seconds:g} s") from error


def _take_all(items: queue.SimpleQueue[T]) -> list[T]:
    """Return all items, or wait for the first."""
    taken = [items.get()]
    while not items.empty():
        taken.append(items.get())
    return taken
