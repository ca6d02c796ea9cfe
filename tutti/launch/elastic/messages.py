"""Lines of JSON between the processes of an elastic job, and the server that receives them."""

import contextlib
import json
import queue
import socket
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tutti.ranks.failures import Failure

_CONNECT_SECONDS = 10.0
# A host that has lost its power or its network is noticed after 4 + 3 x 2 seconds without an answer.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}


@dataclass(frozen=True)
class RoundShare:
    """The part of one host in a round: how many ranks it starts, and where they meet."""

    round: int
    ranks: int  # on this host
    host: int  # its index among the hosts of the round
    hosts: int
    port: int  # of the round's store in the first launcher


@dataclass(frozen=True)
class RankEnd:
    """How a rank that did not complete its work has ended."""

    failure: Failure
    killed: bool  # by a signal that was not the agent's


Event = tuple[int, dict[str, Any]]  # the number of a peer, and its message


class Connection:
    """One end of a connection between two processes of a job."""

    def __init__(self, connection: socket.socket, keep_alive: bool = True) -> None:
        if keep_alive:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEP_ALIVE.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, kind: str, **content: Any) -> None:
        """Send a message; the reader of this connection notices when it has ended."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(json.dumps({"kind": kind} | content).encode() + b"\n")

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages of the other end until the connection ends."""
        with contextlib.suppress(OSError, ValueError), self._connection.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                if not isinstance(message, dict):
                    return
                yield message

    def close(self) -> None:
        """End the connection at both ends."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def connect(address: str, port: int, timeout_seconds: float = _CONNECT_SECONDS, keep_alive: bool = True) -> Connection:
    """Connect to a server."""
    connection = socket.create_connection((address, port), timeout=timeout_seconds)
    connection.settimeout(None)
    return Connection(connection, keep_alive)


class MessageServer:
    """Receives the messages of all peers in one queue; a subclass decides which peers are admitted."""

    kinds: tuple[str, ...] = ()  # of messages that admitted peers send
    keep_alive = True

    def __init__(self) -> None:
        self._connections: dict[int, Connection] = {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def admit(self, arrival: int, message: dict[str, Any], connection: Connection) -> Event | None:
        """Return the number of a peer and its first event, given its first message; None refuses the peer."""
        raise NotImplementedError

    def start(self, listener: socket.socket) -> int:
        """Accept peers at a socket, in threads; return its port."""
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), name="message server", daemon=True).start()
        return listener.getsockname()[1]

    def close(self) -> None:
        """End all connections, and accept no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for connection in list(self._connections.values()):
            connection.close()

    def put(self, kind: str, **content: Any) -> None:
        """Add an event of this process itself; may be called in a signal handler."""
        self._events.put((-1, {"kind": kind} | content))

    def next(self, seconds: float) -> Event | None:
        """Return the next event, or None after this time; `disconnected` follows the last message of a peer."""
        with contextlib.suppress(queue.Empty):
            return self._events.get(timeout=seconds)

    def send(self, peers: Iterable[int], kind: str, **content: Any) -> None:
        """Send a message to some peers; those that have disconnected are left out."""
        for peer in peers:
            if connection := self._connections.get(peer):
                connection.send(kind, **content)

    def send_all(self, kind: str, **content: Any) -> None:
        """Send a message to all peers."""
        self.send(list(self._connections), kind, **content)

    def _accept(self, listener: socket.socket) -> None:
        arrival = 0
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = listener.accept()
                connection = Connection(accepted, self.keep_alive)
                threading.Thread(target=self._receive, args=(arrival, connection), daemon=True).start()
                arrival += 1

    def _receive(self, arrival: int, connection: Connection) -> None:
        messages = connection.messages()
        if admitted := self.admit(arrival, next(messages, {}), connection):
            peer, _ = admitted
            self._connections[peer] = connection
            self._events.put(admitted)
            for message in messages:
                if message.get("kind") in self.kinds:
                    self._events.put((peer, message))
            del self._connections[peer]
            self._events.put((peer, {"kind": "disconnected"}))
        connection.close()
