"""Where the hosts of an elastic job come in: their connections, and what they say as one queue of events."""

import contextlib
import queue
import socket
import threading
from collections.abc import Iterable
from typing import Any

from tutti.launch.wire import Wire

Event = tuple[int, dict[str, Any]]  # the number of a host, and what it says


class Reception:
    """Hosts by number; those that have not joined yet are not among them."""

    def __init__(self, recipe: str, version: str) -> None:
        self.names: dict[int, str] = {}  # also of hosts that are gone
        self._recipe = recipe
        self._version = version
        self._wires: dict[int, Wire] = {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def open(self, listener: socket.socket) -> None:
        """Let hosts join at a socket, in threads."""
        threading.Thread(target=self._accept, args=(listener,), name="reception", daemon=True).start()

    def put(self, kind: str, **content: Any) -> None:
        """An event of this launcher itself; may be called in a signal handler."""
        self._events.put((-1, {"kind": kind} | content))

    def next(self, seconds: float) -> Event | None:
        """The next event: join, ended, leave, gone, or one of this launcher."""
        with contextlib.suppress(queue.Empty):
            return self._events.get(timeout=seconds)

    def tell(self, hosts: Iterable[int], kind: str, **content: Any) -> None:
        for host in hosts:
            if wire := self._wires.get(host):
                wire.send(kind, **content)

    def tell_all(self, kind: str, **content: Any) -> None:
        self.tell(list(self._wires), kind, **content)

    def _accept(self, listener: socket.socket) -> None:
        number = 0
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._hear, args=(number, Wire(connection)), daemon=True).start()
                number += 1

    def _hear(self, host: int, wire: Wire) -> None:
        messages = wire.messages()
        if self._lets_in(host, wire, next(messages, {})):
            for message in messages:
                if message.get("kind") in ("ended", "leave"):
                    self._events.put((host, message))
            del self._wires[host]
            self._events.put((host, {"kind": "gone"}))
        wire.close()

    def _lets_in(self, host: int, wire: Wire, message: dict[str, Any]) -> bool:
        match message:
            case {"kind": "join", "version": version} if version != self._version:
                text = f"this host has tutti {version}, the job {self._version}: expected the same on all hosts."
            case {"kind": "join", "recipe": recipe} if recipe != self._recipe:
                text = f"the job here trains {self._recipe!r}, not {recipe!r}. Join it with its own recipe."
            case {"kind": "join", "host": str(name), "places": int(places), "order": int(order)}:
                self._wires[host], self.names[host] = wire, name
                self._events.put((host, {"kind": "join", "places": places, "order": order}))
                return True
            case _:
                return False
        wire.send("end", code=2, text=text)
        return False
