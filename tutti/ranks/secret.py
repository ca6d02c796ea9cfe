"""The secret of a job: processes that hold it believe each other, and nobody else.

A launcher makes a secret and hands it to the ranks that it starts, through their environment. Processes that find each
other without such a launcher (srun, mpirun, a host that joins an elastic job) use the secret of their user: a file in
the home folder that nobody else can read. Messages are JSON objects of limited size, each with a tag over its number
and content that only processes of the job can compute.
"""

import contextlib
import hashlib
import hmac
import json
import os
import re
import resource
import secrets
import socket
import stat
import struct
import time
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti.errors import LaunchError

SECRET_VARIABLE = "TUTTI_SECRET"  # 64 hexadecimal digits
FILE_VARIABLE = "TUTTI_SECRET_FILE"  # a file that holds them, with mode 0600
_BYTES = 32
_TAG_BYTES = 32
_WRITE_SECONDS = 5.0  # in which another process completes the file that it has just created
_PAUSE_SECONDS = 0.05


class ForgedContent(Exception):
    """Content does not carry the signature of this job."""


@dataclass(frozen=True)
class Secret:
    """256 random bits that the processes of a job share."""

    value: bytes = field(repr=False)

    def key(self, purpose: str) -> bytes:
        """Derive a key for one purpose, from which neither the secret nor another key can be computed."""
        return hmac.digest(self.value, purpose.encode(), "sha256")

    def derive(self, purpose: str) -> "Secret":
        """Return another secret, which only holders of this one can compute: for one job of a user, or one start."""
        return Secret(self.key(purpose))

    def sign(self, content: bytes, purpose: str) -> bytes:
        """Return the content with a signature in front."""
        return hmac.digest(self.key(purpose), content, "sha256") + content

    def verify(self, signed: bytes, purpose: str) -> bytes:
        """Return the content without its signature; raise ForgedContent where it is not this job's."""
        tag, content = signed[:_TAG_BYTES], signed[_TAG_BYTES:]
        if not hmac.compare_digest(tag, hmac.digest(self.key(purpose), content, "sha256")):
            raise ForgedContent(f"{len(content)} bytes of {purpose} are not signed by a process of this job")
        return content

    def environment(self) -> dict[str, str]:
        """Return the variable that hands the secret to a process; it must never be part of a command line."""
        return {SECRET_VARIABLE: self.value.hex()}


def make_secret() -> Secret:
    """Return a new secret."""
    return Secret(secrets.token_bytes(_BYTES))


def find_secret(environment: Mapping[str, str] = os.environ) -> Secret:
    """Return the secret of this job: from the environment, from the file that it names, or the user's own."""
    if given := environment.get(SECRET_VARIABLE):
        return _parse(given, SECRET_VARIABLE, f"Unset it, or start the job with {FILE_VARIABLE}.")
    if path := environment.get(FILE_VARIABLE):
        return read_secret(Path(path))
    return user_secret(environment)


def user_secret(environment: Mapping[str, str] = os.environ) -> Secret:
    """Return the secret of this user, which the first call creates."""
    try:
        folder = Path(environment.get("XDG_CONFIG_HOME") or Path(environment.get("HOME") or Path.home()) / ".config")
        path = folder / "tutti" / "secret"
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # another rank was first
                write_secret(path, make_secret())
    except (OSError, RuntimeError) as error:
        raise LaunchError(
            f"the secret by which ranks recognise each other cannot be kept in the home folder: {error}. "
            f"Set {FILE_VARIABLE} to a file that all hosts of the job can read, or start the ranks with tutti."
        ) from error
    return read_secret(path)


def write_secret(path: Path, secret: Secret) -> None:
    """Write a secret to a new file that only its owner can read."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(handle, "w") as file:
        file.write(secret.value.hex() + "\n")
        file.flush()
        os.fsync(handle)


def read_secret(path: Path) -> Secret:
    """Read a secret from a file that nobody else can read."""
    deadline = time.monotonic() + _WRITE_SECONDS
    while True:
        try:
            with open(path) as file:
                found, content = os.fstat(file.fileno()), file.read(1024)
        except (OSError, ValueError) as error:
            raise LaunchError(
                f"the secret of the job, {path}, cannot be read: {getattr(error, 'strerror', None) or error}. "
                f"Expected a file that all hosts of the job can read; {FILE_VARIABLE} names another."
            ) from error
        if content or time.monotonic() > deadline:
            break
        time.sleep(_PAUSE_SECONDS)
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid not in (os.getuid(), 0) or mode & 0o077:
        raise LaunchError(
            f"the secret of the job, {path}, has mode {mode:o} and belongs to user {found.st_uid}: expected a file "
            f"that only user {os.getuid()} can read. Delete it, and remove its copies on other hosts."
        )
    return _parse(content.strip(), str(path), "Delete it, and a new one is made.")


def _parse(text: str, source: str, fix: str) -> Secret:
    if not re.fullmatch(rf"[0-9a-f]{{{2 * _BYTES}}}", text):
        raise LaunchError(
            f"{source} holds {len(text)} characters: expected {2 * _BYTES} hexadecimal digits, a job's secret. {fix}"
        )
    return Secret(bytes.fromhex(text))


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
