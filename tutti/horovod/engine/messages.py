"""The messages between ranks and their coordinator, and the channels that carry them."""

import pickle
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, NamedTuple, Protocol

import torch.distributed as dist

from tutti.ranks.stop_agreement import waiting_connection

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


_FORGET_AFTER = 1000


class ChannelClosed(Exception):
    """The other end of the channel does not respond."""


class Channel(Protocol):
    """Carries messages to the coordinator and responses to ranks. Each method is called from one thread only."""

    def send(self, message: Message) -> None: ...

    def receive(self) -> list[Message]: ...

    def respond(self, rank: int, responses: list[Response]) -> None: ...

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
        received = [self._up.get()]
        while not self._up.empty():
            received.append(self._up.get())
        return received

    def respond(self, rank: int, responses: list[Response]) -> None:
        self._down.put(responses)

    def responses(self, deadline_seconds: float) -> list[Response]:
        try:
            return self._down.get(timeout=deadline_seconds)
        except queue.Empty as error:
            raise ChannelClosed(f"nothing came for {deadline_seconds:g} s") from error

    def leave(self, size: int, seconds: float) -> None:
        """Return at once: there is no other rank."""


class Connections:
    """A rank's connections to the store, one for each thread, since waiting blocks them; made once for all jobs."""

    def __init__(self, store: dist.Store, coordinates: bool) -> None:
        self.to_send = waiting_connection(store)
        self.to_wait = waiting_connection(store)
        self.to_receive = waiting_connection(store) if coordinates else self.to_wait


class StoreChannel:
    """Queues in the TCP store of rank 0.

    Ranks and the coordinator send a heartbeat every few seconds: a rank that receives nothing for
    longer treats the coordinator as dead, and the coordinator determines which ranks are silent.
    """

    def __init__(self, connections: Connections, generation: int, rank: int) -> None:
        self._to = connections
        self._up = f"hvd/{generation}/up"
        self._down = f"hvd/{generation}/down"
        self._left = f"hvd/{generation}/left"
        self._rank = rank
        self._pops = {self._up: 0, self._own: 0}

    @property
    def _own(self) -> str:
        return f"{self._down}/{self._rank}"

    def send(self, message: Message) -> None:
        with _connected():
            self._to.to_send.queue_push(self._up, pickle.dumps(message))

    def receive(self) -> list[Message]:
        """Return all messages in the queue, or wait for the next one."""
        with _connected():
            received = [self._pop(self._to.to_receive, self._up)]
            received += [
                self._pop(self._to.to_receive, self._up) for _ in range(self._to.to_receive.queue_len(self._up))
            ]
        return [pickle.loads(content) for content in received]

    def respond(self, rank: int, responses: list[Response]) -> None:
        with _connected():
            self._to.to_receive.queue_push(f"{self._down}/{rank}", pickle.dumps(responses))

    def responses(self, deadline_seconds: float) -> list[Response]:
        with _connected():
            self._to.to_wait.set_timeout(timedelta(seconds=deadline_seconds))
            return pickle.loads(self._pop(self._to.to_wait, self._own))

    def leave(self, size: int, seconds: float) -> None:
        """Leave the channel; rank 0, whose process may hold the store, waits until all ranks have left."""
        with _connected():
            if self._to.to_wait.add(self._left, 1) == size:
                self._to.to_wait.set(f"{self._left}/all", "")
            if self._rank == 0:
                self._to.to_wait.wait([f"{self._left}/all"], timedelta(seconds=seconds))

    def interrupt(self, why: str) -> None:
        """End the job on this rank, since another rank is dead, and let no rank wait for that one; for any thread."""
        with _connected():
            connection = waiting_connection(self._to.to_send)
            connection.queue_push(self._own, pickle.dumps([Response("shutdown", error=why)]))
            connection.queue_push(self._up, pickle.dumps(Message(self._rank, leaves=True)))
            connection.set(f"{self._left}/all", "")

    def _pop(self, connection: dist.Store, key: str) -> bytes:
        """Return the next item of a queue; setting the key frees the store's records of earlier waits for it."""
        self._pops[key] += 1
        if self._pops[key] % _FORGET_AFTER == 0:
            connection.set(key, "")
            connection.delete_key(key)
        return connection.queue_pop(key, True)


@contextmanager
def _connected() -> Iterator[None]:
    """Raise ChannelClosed where a connection breaks."""
    try:
        yield
    except RuntimeError as error:
        raise ChannelClosed(str(error)) from error
