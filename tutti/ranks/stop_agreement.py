"""Stop agreement: the last step of a run that ends early, agreed by all ranks without a collective."""

import threading

from tutti.ranks.messages import MessageQueues

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
