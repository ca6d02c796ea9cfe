"""Lines of JSON between the launchers of an elastic job, and the server that receives them."""

import contextlib
import json
import queue
import socket
import threading
from collections.abc import Iterable, Iterator
from typing import Any

_CONNECT_SECONDS = 10.0
# A host that is gone without a word is noticed after 4 + 3 x 2 seconds of silence.
_ALIVE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}


class Wire:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _ALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, kind: str, **content: Any) -> None:
        """Say something; a connection that has ended shows where it is read."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(json.dumps({"kind": kind} | content).encode() + b"\n")

    def messages(self) -> Iterator[dict[str, Any]]:
        """What the other end says, until the connection ends."""
        with contextlib.suppress(OSError, ValueError), self._connection.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                if not isinstance(message, dict):
                    return
                yield message

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def listen(port: int) -> socket.socket:
    """A socket for IPv4, and for IPv6 where there is IPv6; port 0 takes a free one."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def connect(address: str, port: int) -> Wire:
    """A connection to who listens there."""
    connection = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
    connection.settimeout(None)
    return Wire(connection)


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
