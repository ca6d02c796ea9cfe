"""Messages between ranks outside of collectives, and the agreement on the last step of a run that ends early."""

import contextlib
import pickle
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class MessageQueues:
    """Sends messages to ranks and receives those to this rank; a blocking receive needs a connection of its own."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._receiving = waiting_connection(store)
        self._sending = waiting_connection(store)

    def send(self, rank: int, *message: Any) -> None:
        """Put a message into the queue of a rank."""
        self._sending.queue_push(f"watch/{rank}", pickle.dumps(message))

    def send_all(self, *message: Any) -> None:
        """Put a message into the queue of every rank, including this one."""
        for rank in range(self._world_size):
            self.send(rank, *message)

    def receive(self) -> tuple[Any, ...]:
        """Return the next message to this rank; blocks until there is one."""
        return pickle.loads(self._receiving.queue_pop(f"watch/{self._rank}", True))

    def is_first_to(self, what: str) -> bool:
        """Return whether this rank is the first of all to ask for `what`."""
        return self._sending.add(f"watch/first/{what}", 1) == 1

    def close(self) -> None:
        """Wake up the blocking receive of this rank."""
        with contextlib.suppress(RuntimeError):
            self.send(self._rank, "over")


def waiting_connection(store: dist.Store) -> dist.Store:
    """Return a second connection to the store, without a deadline, for a thread that blocks on it."""
    connection: dist.Store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
    connection.set_timeout(timedelta(days=365))
    return connection


_AGREE_SECONDS = 3.0


class StopAgreement:
    """After a request to stop, no rank begins another step before all ranks have reported the step they have begun.

    The largest of these is the last step: no rank has begun a later one, and all ranks reach it, so that no rank waits
    in a collective for a rank that has stopped.
    """

    def __init__(self, queues: MessageQueues, rank: int, world_size: int) -> None:
        self.reason: str | None = None
        self._queues = queues
        self._rank = rank
        self._world_size = world_size
        self._lock = threading.Lock()
        self._begun = 0  # the last step that the main thread has begun
        self._begun_by: dict[int, int] = {}  # on rank 0
        self._last: int | None = None
        self._decided = threading.Event()

    def ask(self, reason: str) -> None:
        """Ask all ranks to stop; further requests have no effect."""
        if self.reason is None:
            self._queues.send_all("stop", reason)

    def goes_on(self, step: int) -> bool | None:
        """Return whether a step follows this one; None if the ranks could not agree."""
        with self._lock:
            if self.reason is None:
                self._begun = step + 1
                return True
        self._decided.wait(_AGREE_SECONDS)  # the monitor threads agree, whatever the main threads do
        return None if self._last is None else step < self._last

    def end_waiting(self) -> None:
        """Release a rank that waits for the agreement."""
        self._decided.set()

    def on_stop(self, reason: str) -> None:
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
            begun = self._begun
        self._queues.send(0, "begun", self._rank, begun)

    def on_begun(self, rank: int, step: int) -> None:
        self._begun_by[rank] = step
        if len(self._begun_by) == self._world_size:
            self._queues.send_all("last", max(self._begun_by.values()))

    def on_last(self, step: int) -> None:
        self._last = step
        self._decided.set()
