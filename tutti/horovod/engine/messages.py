"""The messages between ranks and their coordinator, and the channels that carry them."""

import pickle
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, NamedTuple, Protocol

import torch.distributed as dist

from tutti.ranks.messages import waiting_connection

Kind = Literal[
    "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join", "add_set", "remove_set"
]
Key = tuple[int, str]  # process set, and the name with its kind in front

AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)
OP_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
GLOBAL_SET = 0
SET_CHANGES = ("add_set", "remove_set")  # one at a time, whatever it is: they share a key
UNNAMED = "noname."  # and a number, for what the user gave no name: it never comes again


class TensorRequest(NamedTuple):
    """One rank's wish to take part in an operation; all that must agree over ranks is in it."""

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
    group: str = ""  # grouped operations: ready together or not at all
    group_size: int = 1
    parts: tuple[tuple[int, ...], ...] = ()  # shapes of tensors that lie side by side in this one
    members: tuple[int, ...] = ()  # of a process set that is to be added or removed

    @property
    def key(self) -> Key:
        return self.process_set, f"{'process_set' if self.kind in SET_CHANGES else self.kind}.{self.name}"


@dataclass(frozen=True)
class Message:
    """What a rank tells the coordinator: new wishes, in full or by the number of one that was granted before."""

    rank: int
    requests: tuple[TensorRequest, ...] = ()
    known: tuple[int, ...] = ()
    waits: bool = False  # somebody on this rank waits for a result
    lost: str = ""  # an operation broke off here, perhaps because a rank is gone
    leaves: bool = False  # this rank shuts down


@dataclass(frozen=True)
class Response:
    """What the coordinator tells the members of a process set: do this now, all of you, in the order of responses."""

    kind: Kind | Literal["hurry", "shutdown"]  # hurry: somebody waits for what this rank has not told yet
    process_set: int = GLOBAL_SET
    requests: tuple[TensorRequest, ...] = ()  # one, or several that are done as one; rank 0's or the first that came
    numbers: tuple[int, ...] = ()  # under which ranks may name them from now on, or none
    error: str = ""
    sizes: tuple[tuple[int, ...], ...] = ()  # allgather: first dimensions; alltoall: splits; rank by rank of the set
    joined: tuple[int, ...] = ()  # ranks that have no more data and take part with zeros
    last_joined: int = -1
    set_number: int = -1  # of the process set that was added or removed


_FORGET_AFTER = 1000


class ChannelClosed(Exception):
    """Nobody answers at the other end."""


class Channel(Protocol):
    """What a rank says, what the coordinator hears, and the way back. Each method is called from one thread only."""

    def say(self, message: Message) -> None: ...

    def hear(self) -> list[Message]: ...

    def answer(self, rank: int, responses: list[Response]) -> None: ...

    def responses(self, deadline_seconds: float) -> list[Response]: ...

    def part(self, size: int, seconds: float) -> None: ...


class LocalChannel:
    """For a job of one rank."""

    def __init__(self) -> None:
        self._up: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._down: queue.SimpleQueue[list[Response]] = queue.SimpleQueue()

    def say(self, message: Message) -> None:
        self._up.put(message)

    def hear(self) -> list[Message]:
        heard = [self._up.get()]
        while not self._up.empty():
            heard.append(self._up.get())
        return heard

    def answer(self, rank: int, responses: list[Response]) -> None:
        self._down.put(responses)

    def responses(self, deadline_seconds: float) -> list[Response]:
        try:
            return self._down.get(timeout=deadline_seconds)
        except queue.Empty as error:
            raise ChannelClosed(f"nothing came for {deadline_seconds:g} s") from error

    def part(self, size: int, seconds: float) -> None:
        """Nobody else is there."""


class Connections:
    """A rank's own connections to the store, one for each thread, since a wait blocks it; made once for all jobs."""

    def __init__(self, store: dist.Store, coordinates: bool) -> None:
        self.to_say = waiting_connection(store)
        self.to_wait = waiting_connection(store)
        self.to_hear = waiting_connection(store) if coordinates else self.to_wait


class StoreChannel:
    """Queues in the TCP store that rank 0 holds.

    Ranks and coordinator say something every few seconds, if only that they are there: a rank that hears nothing for
    longer takes the coordinator for dead, and the coordinator counts for itself who is silent.
    """

    def __init__(self, connections: Connections, generation: int, rank: int) -> None:
        self._to = connections
        self._up = f"hvd/{generation}/up"
        self._down = f"hvd/{generation}/down"
        self._parted = f"hvd/{generation}/parted"
        self._rank = rank
        self._pops = {self._up: 0, self._own: 0}

    @property
    def _own(self) -> str:
        return f"{self._down}/{self._rank}"

    def say(self, message: Message) -> None:
        with _connected():
            self._to.to_say.queue_push(self._up, pickle.dumps(message))

    def hear(self) -> list[Message]:
        """All messages that are there, or the first one that comes."""
        with _connected():
            heard = [self._pop(self._to.to_hear, self._up)]
            heard += [self._pop(self._to.to_hear, self._up) for _ in range(self._to.to_hear.queue_len(self._up))]
        return [pickle.loads(content) for content in heard]

    def answer(self, rank: int, responses: list[Response]) -> None:
        with _connected():
            self._to.to_hear.queue_push(f"{self._down}/{rank}", pickle.dumps(responses))

    def responses(self, deadline_seconds: float) -> list[Response]:
        with _connected():
            self._to.to_wait.set_timeout(timedelta(seconds=deadline_seconds))
            return pickle.loads(self._pop(self._to.to_wait, self._own))

    def part(self, size: int, seconds: float) -> None:
        """Need nothing more; rank 0, whose process may hold the store, stays until nobody does."""
        with _connected():
            if self._to.to_wait.add(self._parted, 1) == size:
                self._to.to_wait.set(f"{self._parted}/all", "")
            if self._rank == 0:
                self._to.to_wait.wait([f"{self._parted}/all"], timedelta(seconds=seconds))

    def interrupt(self, why: str) -> None:
        """From any thread, when a rank is known to be dead: end the job here, and have nobody wait for that rank."""
        with _connected():
            connection = waiting_connection(self._to.to_say)
            connection.queue_push(self._own, pickle.dumps([Response("shutdown", error=why)]))
            connection.queue_push(self._up, pickle.dumps(Message(self._rank, leaves=True)))
            connection.set(f"{self._parted}/all", "")

    def _pop(self, connection: dist.Store, key: str) -> bytes:
        """The next in a queue; the store notes every wait for a key until the key is set, and is made to forget."""
        self._pops[key] += 1
        if self._pops[key] % _FORGET_AFTER == 0:
            connection.set(key, "")
            connection.delete_key(key)
        return connection.queue_pop(key, True)


@contextmanager
def _connected() -> Iterator[None]:
    """A broken connection is the end of the channel."""
    try:
        yield
    except RuntimeError as error:
        raise ChannelClosed(str(error)) from error
