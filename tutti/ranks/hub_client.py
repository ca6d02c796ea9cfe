"""A rank's end of the hub: messages to it, messages from it by their kinds, and meetings of all ranks."""

import contextlib
import platform
import threading
from collections.abc import Callable
from typing import Any

from tutti.errors import DeadlineError, RankLost, TuttiError
from tutti.ranks.hub import Hub, HubServer, Returns, allow_seconds
from tutti.ranks.messages import Connection

Handler = Callable[[dict[str, Any]], None]

_ABSENT_SECONDS = 10.0  # for the answer who is missing
_LEAVE_SECONDS = 5.0  # for the other ranks to leave before the hub closes


class HubClient:
    """A rank's end of the hub: it sends messages, and hands those that arrive to the handlers of their kinds."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.hub: Hub | None = None  # on rank 0
        self._server: HubServer | None = None
        self.ended = False  # rank 0 has ended, or its host is unreachable
        self._closed = False
        self._connection: Connection | None = None
        self._reader: threading.Thread | None = None
        self._handlers: dict[str, list[Handler]] = {}
        self._early: list[dict[str, Any]] = []  # messages without a handler yet
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._number = 0
        self._runs = 0
        self._items: list[Any] = []
        self._answer: dict[str, Any] | None = None
        self.on("passes", self._on_passes)
        for kind in ("passed", "absent"):
            self.on(kind, self._on_answer)

    def hold(self, server: HubServer | None = None) -> "HubClient":
        """Be rank 0, in whose process the hub is; without a server, the only rank."""
        self._server = server
        self.hub = server.hub if server else Hub(1, lambda _, kind, content: self.deliver({"kind": kind} | content))
        self.hub.join(0, platform.node())
        if server is not None:
            server.deliver_to_first = self.deliver
        return self

    def read(self, connection: Connection) -> "HubClient":
        """Receive messages in a thread from now on."""
        self._connection = connection
        self._reader = threading.Thread(target=self._read, name="hub", daemon=True)
        self._reader.start()
        return self

    def on(self, kind: str, handler: Handler) -> None:
        """Have messages of a kind handled, also those that have arrived already."""
        with self._lock:
            self._handlers.setdefault(kind, []).append(handler)
            early = [message for message in self._early if message["kind"] == kind]
            self._early = [message for message in self._early if message["kind"] != kind]
        for message in early:
            handler(message)

    def off(self, kind: str, handler: Handler) -> None:
        """Have messages of a kind no longer handled."""
        with self._lock:
            self._handlers[kind].remove(handler)

    def begin_run(self) -> int:
        """Return the number of a run that begins in this process; it is the same on all ranks."""
        self._runs += 1
        if self.hub is not None:
            self.hub.begin_run()
        return self._runs

    def keep(self, message: dict[str, Any]) -> None:
        """Keep a message for a handler that comes later."""
        with self._lock:
            self._early.append(message)

    def send(self, kind: str, **content: Any) -> None:
        """Send a message to the hub; where the connection has ended, the reader has noticed."""
        if self.hub is not None:
            self.hub.receive(self.rank, {"kind": kind} | content)
        elif self._connection is not None:
            self._connection.send(kind, **content)

    def deliver(self, message: dict[str, Any]) -> None:
        """Hand a message to its handler, or keep it until there is one."""
        with self._lock:
            handlers = list(self._handlers.get(message["kind"], ()))
            if not handlers:
                self._early.append(message)
        for handler in handlers:
            handler(message)

    def meet(self, what: str, seconds: float, item: Any = None, returns: Returns = "nothing") -> list[Any]:
        """Wait for all ranks, and return the items of some of them; the error names the ranks that do not come."""
        with self._lock:
            self._number += 1
            self._items, self._answer = [], None
        self.send("arrive", number=self._number, item=item, returns=returns)
        if not self._wait(seconds):
            self.send("deadline", number=self._number)
            self._wait(allow_seconds(_ABSENT_SECONDS, self.world_size))
        answer: dict[str, Any] | None = self._answer
        if answer is None or answer["kind"] == "absent":
            raise self._describe(answer, what, seconds)
        items = self._items + answer["items"]
        return [item for count, item in items for _ in range(count)] if returns == "all" else items

    def close(self, seconds: float = _LEAVE_SECONDS) -> None:
        """Leave the hub; rank 0 closes it when the others have left, after this time at the latest."""
        if self._closed:
            return
        self._closed = True
        self.send("leave")
        if self.hub is not None:
            self.hub.wait_until_left(seconds)
            self.hub.close()
        if self._server is not None:
            self._server.close()
        if self._connection is not None:
            self._connection.close()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(1.0)

    def _wait(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._answer is not None or self.ended, seconds)

    def _describe(self, answer: dict[str, Any] | None, what: str, seconds: float) -> TuttiError:
        own = f"rank {self.rank} on host {platform.node()}"
        if answer is None:
            error = RankLost(f"{own} waited at {what}: rank 0, which holds the hub, has ended or does not answer.")
        elif answer["gone"]:
            error = RankLost(f"{own} waited at {what} for {answer['gone']}, which has ended.")
        else:
            error = DeadlineError(
                f"{own} waited {seconds:g} s at {what}: missing {answer['missing']}, arrived {answer['arrived']} of "
                f"{self.world_size}. Look at the logs of the missing ranks."
            )
        error.rank = answer["rank"] if answer else 0
        return error

    def _on_passes(self, message: dict[str, Any]) -> None:
        with self._lock:
            if message["number"] == self._number:
                self._items += message["items"]

    def _on_answer(self, message: dict[str, Any]) -> None:
        with self._changed:
            if message["number"] == self._number:
                self._answer = message
                self._changed.notify_all()

    def _read(self) -> None:
        assert self._connection is not None
        for message in self._connection.messages():
            with contextlib.suppress(KeyError, TypeError, ValueError):  # of another version of tutti
                self.deliver(message)
        with self._changed:
            self.ended = True
            self._changed.notify_all()
        self.deliver({"kind": "ended"})


_AGREE_SECONDS = 10.0  # the hub ends the wait for a rank that has ended


class StopAgreement:
    """After a request to stop, no rank begins another step before all ranks have reported the step they have begun.

    The largest of these is the last step: no rank has begun a later one, and all ranks reach it, so that no rank waits
    in a collective for a rank that has stopped. A rank sends and receives two messages, however many are signalled.
    """

    def __init__(self, hub: HubClient, run: int = 1) -> None:
        self.reason: str | None = None
        self._hub = hub
        self._run = run  # its number in this process
        self._asked = False
        self._lock = threading.Lock()
        self._begun = 0  # the last step that the main thread has begun
        self._last: int | None = None
        self._decided = threading.Event()

    def ask(self, reason: str) -> None:
        """Ask all ranks to stop; further requests have no effect."""
        if self.reason is None and not self._asked:
            self._asked = True
            self._hub.send("stop", reason=reason, run=self._run)

    def continues_after(self, step: int) -> bool | None:
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
        if message["run"] > self._run:  # the next run has begun on another rank
            self._hub.keep(message)
            return
        with self._lock:
            if self.reason is not None or message["run"] < self._run:
                return
            self.reason = message["reason"]
            begun = self._begun
        self._hub.send("begun", step=begun, run=self._run)

    def on_last(self, message: dict[str, Any]) -> None:
        """All ranks have reported their steps."""
        if message["run"] == self._run:
            self._last = message["step"]
            self._decided.set()
