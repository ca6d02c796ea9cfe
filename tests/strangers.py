"""What a stranger on the network tries against the server of a launcher; nothing here holds the secret of the job."""

import contextlib
import json
import secrets
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

from tutti.ranks.messages import Connection
from tutti.ranks.secret import Secret

_HELD = 100
_FLOOD = 200
_MOST_BYTES = 1 << 30
_SECONDS = 20.0


def attack(address: str, port: int, wanted: list[dict[str, Any]]) -> list[str]:
    """Try everything once, with the messages that the stranger would like to be believed; what was tried."""
    for each in _ATTACKS:
        with contextlib.suppress(OSError):
            each(address, port, wanted)
    return [each.__name__ for each in _ATTACKS]


@contextlib.contextmanager
def held_connections(address: str, port: int) -> Iterator[None]:
    """Connections that say nothing, or stop in the middle of a word, for as long as this lasts."""
    with contextlib.ExitStack() as held:
        for number in range(_HELD):
            with contextlib.suppress(OSError):
                connection = held.enter_context(_connect(address, port))
                connection.sendall(b"tutti/1\n"[: number % 9])
        yield


def replay(address: str, port: int, recorded: bytes) -> None:
    """Send again what a process of the job has sent."""
    _send(address, port, recorded)


class Recorded(socket.socket):
    """A connection whose sent bytes are kept, as somebody on its way would see them."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(fileno=connection.detach())
        self.settimeout(_SECONDS)
        self.sent = b""

    def sendall(self, content: Any, *_: Any) -> None:
        self.sent += bytes(content)
        super().sendall(content)


def recorded_connection(address: str, port: int, secret: Secret) -> tuple[Recorded, Connection]:
    """A connection of a process of the job that somebody listens to."""
    wire = Recorded(_connect(address, port))
    return wire, Connection(wire, secret)


def _connect(address: str, port: int) -> socket.socket:
    return socket.create_connection((address, port), timeout=_SECONDS)


def _send(address: str, port: int, content: bytes) -> bytes:
    """Send bytes, and return what comes back until the other end closes."""
    with _connect(address, port) as connection, contextlib.suppress(OSError):
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(4096), b""))
    return b""


def lines_of_json(address: str, port: int, wanted: list[dict[str, Any]]) -> None:
    for message in wanted:
        _send(address, port, json.dumps(message).encode() + b"\n")


def messages_with_guessed_proof_and_signature(address: str, port: int, wanted: list[dict[str, Any]]) -> None:
    """The whole protocol, but for what only the job can compute."""
    for message in wanted:
        with _connect(address, port) as connection:
            connection.sendall(b"tutti/1\n" + secrets.token_bytes(32))
            connection.recv(64)
            content = json.dumps(message).encode()
            signed = struct.pack("!I", len(content)) + secrets.token_bytes(16) + content
            connection.sendall(secrets.token_bytes(32) + signed)
            with contextlib.suppress(OSError):
                assert connection.recv(4096) == b""


def the_proof_of_the_server_sent_back(address: str, port: int, _: list[dict[str, Any]]) -> None:
    with _connect(address, port) as connection:
        connection.sendall(b"tutti/1\n" + secrets.token_bytes(32))
        answer = connection.recv(64)
        connection.sendall(answer[32:])
        with contextlib.suppress(OSError):
            assert connection.recv(4096) == b""


def other_protocols(address: str, port: int, _: list[dict[str, Any]]) -> None:
    for content in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 4096,
        b"\xff" * 4096,
        b"[" * 100_000,
        b"\x80\x04cos\nsystem\n",
        b"",
    ):
        _send(address, port, content)


def a_long_message_announced(address: str, port: int, _: list[dict[str, Any]]) -> None:
    _send(address, port, b"tutti/1\n" + b"n" * 32 + b"p" * 32 + struct.pack("!I", _MOST_BYTES))


def a_gigabyte(address: str, port: int, _: list[dict[str, Any]]) -> None:
    """As much as the other end takes before it closes the connection."""
    piece, sent = b"x" * (1 << 20), 0
    with _connect(address, port) as connection, contextlib.suppress(OSError):
        while sent < _MOST_BYTES:
            connection.sendall(piece)
            sent += len(piece)
    assert sent < 64 << 20, "a stranger's bytes are read without an end"


def a_flood_of_connections(address: str, port: int, _: list[dict[str, Any]]) -> None:
    for _number in range(_FLOOD):
        _connect(address, port).close()


def connections_that_are_reset(address: str, port: int, _: list[dict[str, Any]]) -> None:
    for _number in range(20):
        with _connect(address, port) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(b"tutti/1\n" + b"n" * 32)


_ATTACKS: list[Callable[[str, int, list[dict[str, Any]]], None]] = [
    lines_of_json,
    messages_with_guessed_proof_and_signature,
    the_proof_of_the_server_sent_back,
    other_protocols,
    a_long_message_announced,
    a_gigabyte,
    a_flood_of_connections,
    connections_that_are_reset,
]
