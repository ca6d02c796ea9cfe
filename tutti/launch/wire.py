"""Lines of JSON between the launchers of an elastic job, on a connection whose end is noticed."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
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
