"""The agreement of all ranks on the last step of a run that ends early."""

import threading
from typing import Any

from tutti.ranks.hub import allow_seconds
from tutti.ranks.hub_client import HubClient

_AGREE_SECONDS = 10.0  # the hub ends the wait for a rank that has ended


class StopAgreement:
    """After a request to stop, no rank begins another step before all ranks have reported the step they have begun.

    The largest of these is the last step: no rank has begun a later one, and all ranks reach it, so that no rank waits
    in a collective for a rank that has stopped. A rank sends and receives two messages, however many are signalled.
    """

    def __init__(self, hub: HubClient) -> None:
        self.reason: str | None = None
        self._hub = hub
        self._asked = False
        self._lock = threading.Lock()
        self._begun = 0  # the last step that the main thread has begun
        self._last: int | None = None
        self._decided = threading.Event()

    def ask(self, reason: str) -> None:
        """Ask all ranks to stop; further requests have no effect."""
        if self.reason is None and not self._asked:
            self._asked = True
            self._hub.send("stop", reason=reason)

    def goes_on(self, step: int) -> bool | None:
        """Return whether a step follows this one; None if the ranks could not agree."""
        with self._lock:
            if self.reason is None:
                self._begun = step + 1
                return True
        # The monitor threads agree, whatever the main threads do.
        self._decided.wait(allow_seconds(_AGREE_SECONDS, self._hub.world_size))
        return None if self._last is None else step < self._last

    def end_waiting(self) -> None:
        """Release a rank that waits for the agreement."""
        self._decided.set()

    def on_stop(self, message: dict[str, Any]) -> None:
        """Another rank or this one has asked to stop."""
        with self._lock:
            if self.reason is not None:
                return
            self.reason = message["reason"]
            begun = self._begun
        self._hub.send("begun", step=begun)

    def on_last(self, message: dict[str, Any]) -> None:
        """All ranks have reported their steps."""
        self._last = message["step"]
        self._decided.set()
