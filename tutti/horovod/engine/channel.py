"""The way between ranks and their coordinator: queues in torch's TCP store, or in this process where it is alone."""

import pickle
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from tutti.horovod.engine.messages import Message, Response
from tutti.ranks.messages import waiting_connection

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
