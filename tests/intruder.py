"""A process on the same host without the secret of a job, which tries to disturb it, bounded in count and time.

It finds the ports at which the processes of a job listen, and speaks to each of them. What it must not achieve is that
the job ends otherwise than undisturbed.
"""

import contextlib
import os
import pickle
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path

HERE = "127.0.0.1"
_SECONDS = 1.0  # for one answer
_STORE_SECONDS = 3.0
_FLOOD = 300  # connections
_MOST_BYTES = 1 << 30
_HELLO = b"tutti/1\n"


def listening_ports(processes: Iterable[int]) -> list[int]:
    """The TCP ports at which some processes listen, as /proc shows them to anybody of the same user."""
    sockets = {number for process in processes for number in _sockets(process)}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and words[9] in sockets:
                    found.add(int(words[1].rpartition(":")[2], 16))
    return sorted(found)


def _sockets(process: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for handle in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                name = os.readlink(handle)
                if name.startswith("socket:["):
                    yield name[8:-1]


class Bomb:
    """A pickle that makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


class Intruder:
    """Tries things at the ports of a job; `executed` is made if any of them runs code there."""

    def __init__(self, ports: Iterable[int], folder: Path) -> None:
        self.ports = list(ports)
        self.executed = folder / "executed"
        self.tried: list[str] = []
        self._bomb = pickle.dumps(Bomb(self.executed))
        self._held: list[socket.socket] = []

    def attack(self) -> None:
        """Try everything at every port once."""
        for port in self.ports:
            for name, content in self._contents():
                self._say(port, name, content)
            for attempt in (self._replay, self._guess, self._read_forever, self._flood, self._hold, self._send_much):
                self.tried.append(attempt.__name__.strip("_"))
                with contextlib.suppress(OSError):
                    attempt(port)
            store = threading.Thread(target=self._use_as_store, args=(port,), daemon=True)
            store.start()
            store.join(_STORE_SECONDS)  # a client of the store waits for ever where another server answers

    def close(self) -> None:
        """Close the connections that are held open."""
        for each in self._held:
            each.close()

    def _contents(self) -> Iterator[tuple[str, bytes]]:
        bomb = self._bomb
        yield "nothing", b""
        yield "http", b"GET / HTTP/1.1\r\nHost: rank\r\n\r\n" + b"x" * 200
        yield "zeros", bytes(1 << 16)
        yield "noise", secrets.token_bytes(1 << 16)
        yield "a pickle", bomb
        yield "a pickle with its length", struct.pack("!I", len(bomb)) + bomb
        yield "a pickle after a hello", _HELLO + bytes(64) + struct.pack("!I", len(bomb)) + bytes(16) + bomb
        yield "half a hello", _HELLO[:4]
        yield "a hello without proof", _HELLO + bytes(32)
        yield "a huge length", _HELLO + bytes(64) + struct.pack("!I", 0xFFFFFFFF) + bytes(1 << 16)
        yield "a line of JSON", b'{"kind": "join", "rank": 0, "host": "x", "world_size": 2}\n'
        yield "a stop", b'{"kind": "stop", "reason": "on SIGTERM"}\n'
        yield "a host that joins", b'{"kind": "host", "places": 64, "order": -1}\n'
        yield "a negative rank", b'{"kind": "worker", "worker": -1}\n'
        yield "deep JSON", b"[" * (1 << 16)
        yield "text that is no UTF-8", b"\xff\xfe" * 1000 + b"\n"
        yield "a TLS hello", bytes.fromhex("16030100c8010000c40303") + secrets.token_bytes(200)
        yield "ssh", b"SSH-2.0-OpenSSH_9.0\r\n"

    def _say(self, port: int, name: str, content: bytes) -> None:
        self.tried.append(name)
        with contextlib.suppress(OSError), self._connected(port) as connection:
            connection.sendall(content)
            connection.settimeout(0.05)
            connection.recv(4096)

    def _connected(self, port: int) -> socket.socket:
        return socket.create_connection((HERE, port), timeout=_SECONDS)

    def _replay(self, port: int) -> None:
        """Send the server's own proof back to it."""
        with self._connected(port) as first, self._connected(port) as second:
            nonce = secrets.token_bytes(32)
            first.sendall(_HELLO + nonce)
            answer = first.recv(64)
            second.sendall(_HELLO + answer[:32])
            proof = second.recv(64)[32:]
            first.sendall(proof or bytes(32))
            first.recv(64)

    def _guess(self, port: int) -> None:
        for _ in range(20):
            with self._connected(port) as connection:
                connection.sendall(_HELLO + secrets.token_bytes(64))
                connection.settimeout(0.05)
                with contextlib.suppress(OSError):
                    connection.recv(128)

    def _read_forever(self, port: int) -> None:
        connection = self._connected(port)
        self._held.append(connection)

    def _hold(self, port: int) -> None:
        for _ in range(50):
            connection = self._connected(port)
            self._held.append(connection)
            connection.sendall(_HELLO)

    def _flood(self, port: int) -> None:
        for _ in range(_FLOOD):
            self._connected(port).close()

    def _send_much(self, port: int) -> None:
        """Send up to a gigabyte, until the other end closes or does not read."""
        block = secrets.token_bytes(1 << 20)
        deadline = time.monotonic() + 3 * _SECONDS
        with self._connected(port) as connection:
            for _ in range(_MOST_BYTES // len(block)):
                connection.sendall(block)
                if time.monotonic() > deadline:
                    return

    def _use_as_store(self, port: int) -> None:
        """Where a TCP store of torch answers: list, read, change, delete and pop every key, and push pickles."""
        import torch.distributed as dist

        self.tried += ["list keys", "write every key", "delete every key", "pop queues", "push pickles"]
        with contextlib.suppress(RuntimeError):
            store = dist.TCPStore(HERE, port, is_master=False, timeout=timedelta(seconds=1), wait_for_workers=False)
            for key in list(store.list_keys()):
                for attempt in (
                    lambda key=key: store.queue_push(key, self._bomb),
                    lambda key=key: store.set(key, self._bomb),  # pyright: ignore[reportArgumentType]
                    lambda key=key: store.add(key, 1000),
                    lambda key=key: store.queue_pop(key, False),
                    lambda key=key: store.delete_key(key),
                ):
                    with contextlib.suppress(RuntimeError):
                        attempt()
            for key in ("start/0/watch/0", "hvd/0/up", "hvd/0/down/0", "hub"):
                store.queue_push(key, self._bomb)
