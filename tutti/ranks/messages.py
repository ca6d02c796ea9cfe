"""Notes between the watches of all ranks: a queue for each rank in the store at which they have met."""

import contextlib
import pickle
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class Mail:
    """Sends notes to ranks, and waits for those to this one; a wait holds a connection, so there are two."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._to_wait = patient(store)
        self._to_send = patient(store)

    def send(self, rank: int, *note: Any) -> None:
        """Put a note into a rank's queue."""
        self._to_send.queue_push(f"watch/{rank}", pickle.dumps(note))

    def send_all(self, *note: Any) -> None:
        """Put a note into every rank's queue, this one's too."""
        for rank in range(self._world_size):
            self.send(rank, *note)

    def receive(self) -> tuple[Any, ...]:
        """The next note to this rank; it waits for one."""
        return pickle.loads(self._to_wait.queue_pop(f"watch/{self._rank}", True))

    def is_first_to(self, what: str) -> bool:
        """Whether no rank has asked this before."""
        return self._to_send.add(f"watch/first/{what}", 1) == 1

    def close(self) -> None:
        """Wake this rank's own wait."""
        with contextlib.suppress(RuntimeError):
            self.send(self._rank, "over")


def patient(store: dist.Store) -> dist.Store:
    """A connection of its own to the store, for a thread that waits as long as it takes."""
    connection: dist.Store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
    connection.set_timeout(timedelta(days=365))
    return connection
