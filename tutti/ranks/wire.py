"""Messages as signed bytes, and the sockets that carry them.

A message is a JSON object of limited size, with a tag over its number and content that only the job can compute.
"""

import contextlib
import hashlib
import hmac
import json
import os
import resource
import socket
import struct
import time
import weakref
from collections import deque
from typing import Any

NONCE_BYTES = 32
PROOF_BYTES = 32
TAG_BYTES = 16
LENGTH = struct.Struct("!I")
MAX_MESSAGE_BYTES = 16 << 20
_MAX_FILES = 1 << 16
# A host that has lost its power or its network is noticed after 4 + 3 x 2 seconds without an answer.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}

# A process that is forked here, such as a loader of data, must not keep a connection open when this process has ended.
not_for_children: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    for each in list(not_for_children):
        each.close()


os.register_at_fork(after_in_child=_close_in_child)


class NotOfThisJob(OSError):
    """The process at the other end does not hold the secret of this job."""


class Seal:
    """Packs messages of one direction of a connection, or unpacks them; each has a number of its own."""

    def __init__(self, key: bytes, nonces: bytes, sender: str) -> None:
        self._key = hmac.digest(key, sender.encode() + nonces, "sha256")
        self._count = 0

    def head(self, content: bytes) -> bytes:
        """Return what goes in front of the next message."""
        return LENGTH.pack(len(content)) + self._tag(content)

    def unpack(self, tag: bytes, content: bytes) -> dict[str, Any]:
        """Return the next message, if its tag is right."""
        if not hmac.compare_digest(tag, self._tag(content)):
            raise NotOfThisJob("a message without the signature of this job")
        message = json.loads(content)
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise ValueError("expected an object with a kind")
        return message

    def _tag(self, content: bytes) -> bytes:
        self._count += 1
        number = self._count.to_bytes(8, "big")
        return hashlib.blake2b(number + content, key=self._key, digest_size=TAG_BYTES).digest()


class Peer:
    """The server's end of a connection."""

    def __init__(self, connection: socket.socket, number: int) -> None:
        self.number = number
        self.admitted: int | None = None  # the number under which its messages are events
        self.connection = connection
        self.since = time.monotonic()
        self.received = bytearray()
        self.unsent: deque[bytes] = deque()
        self.unsent_bytes = 0
        self.nonces: bytes | None = None
        self.sealed: Seal | None = None  # once the peer has proved that it holds the secret
        self.opened: Seal | None = None
        self.ends = False  # as soon as everything is sent
        self.writing = False  # the selector reports when more can be sent

    def take(self, size: int) -> bytes | None:
        """Remove so many bytes from what was received, or none if there are fewer."""
        if len(self.received) < size:
            return None
        taken = bytes(self.received[:size])
        del self.received[:size]
        return taken


def encode(kind: str, content: dict[str, Any]) -> bytes:
    """Return a message as bytes, the same for all peers."""
    encoded = json.dumps({"kind": kind} | content, separators=(",", ":")).encode()
    if len(encoded) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(encoded):,} bytes: expected at most {MAX_MESSAGE_BYTES:,}")
    return encoded


def proof(key: bytes, prover: str, nonces: bytes) -> bytes:
    """Return what shows that one side of a connection holds the key."""
    return hmac.digest(key, b"proof of " + prover.encode() + nonces, "sha256")


def length_of(header: bytes) -> int:
    """Return the length of a message from its first bytes."""
    (length,) = LENGTH.unpack(header)
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length:,} bytes: expected at most {MAX_MESSAGE_BYTES:,}")
    return length


def set_keep_alive(connection: socket.socket) -> None:
    """Have the end of the other host noticed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def allow_many_files() -> None:
    """Raise the limit of open files of this process as far as it may: every peer is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
