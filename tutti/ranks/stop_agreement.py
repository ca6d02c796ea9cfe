"""How ranks agree on the step after which all of them stop, without a collective and without a cost to steps."""

import threading

from tutti.ranks.messages import Mail

_AGREE_SECONDS = 3.0


class Stopping:
    """Once somebody asks, no rank begins another step before all have said which one they have begun.

    The furthest of these is the last. Ranks that wait for others inside it are not left alone, since all go as far, and
    nobody is past it.
    """

    def __init__(self, mail: Mail, rank: int, world_size: int) -> None:
        self.reason: str | None = None
        self._mail = mail
        self._rank = rank
        self._world_size = world_size
        self._lock = threading.Lock()
        self._begun = 0  # the last step that the main thread has begun
        self._begun_by: dict[int, int] = {}  # known to rank 0
        self._last: int | None = None
        self._decided = threading.Event()

    def ask(self, reason: str) -> None:
        """Ask all ranks to stop; asked again it does nothing."""
        if self.reason is None:
            self._mail.send_all("stop", reason)

    def goes_on(self, step: int) -> bool | None:
        """Whether the step after this one is to be made; None where no agreement has come about."""
        with self._lock:
            if self.reason is None:
                self._begun = step + 1
                return True
        self._decided.wait(_AGREE_SECONDS)  # watches agree among themselves, whatever their main threads do
        return None if self._last is None else step < self._last

    def end_waiting(self) -> None:
        """There is nothing left to agree on."""
        self._decided.set()

    def on_stop(self, reason: str) -> None:
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
            begun = self._begun
        self._mail.send(0, "begun", self._rank, begun)

    def on_begun(self, rank: int, step: int) -> None:
        self._begun_by[rank] = step
        if len(self._begun_by) == self._world_size:
            self._mail.send_all("last", max(self._begun_by.values()))

    def on_last(self, step: int) -> None:
        self._last = step
        self._decided.set()
