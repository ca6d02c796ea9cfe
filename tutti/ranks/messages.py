"""Messages between ranks outside of collectives: one queue for each rank in the store of the job."""

import contextlib
import pickle
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
