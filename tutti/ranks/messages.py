"""Messages between the processes of a job: JSON objects over TCP, signed with the secret of the job.

Both ends of a connection prove that they hold the secret, without sending it, before either reads a message. The keys
of a connection come from random numbers of both ends, and every message carries a tag over its content, direction and
number: it can neither be forged nor altered, repeated or sent on another connection. Messages are not encrypted.
"""

import contextlib
import errno
import hmac
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from tutti.ranks.secret import (
    LENGTH,
    NONCE_BYTES,
    PROOF_BYTES,
    TAG_BYTES,
    NotOfThisJob,
    Peer,
    Seal,
    Secret,
    allow_many_files,
    encode,
    length_of,
    not_for_children,
    proof,
    set_keep_alive,
)

_HELLO = b"tutti/1\n"
_MAX_UNSENT_BYTES = 256 << 20  # to a peer that does not read
_MAX_STRANGERS = 4096  # connections that have not proved anything yet; the oldest is closed first
_PROOF_SECONDS = 20.0
_CONNECT_SECONDS = 10.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between two attempts to connect
_READ_BYTES = 1 << 16
_SHARED_BYTES = 1 << 12  # messages that are not copied for every peer
_END_SECONDS = 5.0  # for what was sent before the server closed
Event = tuple[int, dict[str, Any]]  # the number of a peer, and its message


def listen(port: int, address: str = "") -> socket.socket:
    """Listen at an address, or on all of IPv4, and of IPv6 where the host has it; port 0 takes a free one."""
    if address:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, port), family=family, backlog=4096)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=4096)


class Connection:
    """A connection to the server of a job; one thread reads its messages, any thread may send."""

    def __init__(self, connection: socket.socket, secret: Secret) -> None:
        """Prove that this process belongs to the job, and have the server prove it."""
        self._connection = connection
        self._lock = threading.Lock()
        not_for_children.add(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        key, own = secret.key("messages"), secrets.token_bytes(NONCE_BYTES)
        connection.sendall(_HELLO + own)
        nonces = own + _receive(connection, NONCE_BYTES)
        if not hmac.compare_digest(_receive(connection, PROOF_BYTES), proof(key, "server", nonces)):
            raise NotOfThisJob("another program answers, without the secret of this job")
        connection.sendall(proof(key, "client", nonces))
        self._sealed, self._opened = Seal(key, nonces, "client"), Seal(key, nonces, "server")

    def send(self, kind: str, **content: Any) -> None:
        """Send a message; the reader of this connection notices when it has ended."""
        encoded = encode(kind, content)
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(self._sealed.head(encoded) + encoded)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages of the server until the connection ends, or a forged one arrives."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            while True:
                length = length_of(_receive(self._connection, LENGTH.size))
                tag = _receive(self._connection, TAG_BYTES)
                yield self._opened.unpack(tag, _receive(self._connection, length))

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """Return the next message, or None where none comes in time; the connection is then good for nothing more."""
        self._connection.settimeout(seconds)
        message = next(self.messages(), None)
        self._connection.settimeout(None)
        return message

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection at both ends."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _receive(connection: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        part = connection.recv(min(size - len(received), _READ_BYTES))
        if not part:
            raise NotOfThisJob("the connection was closed by the other end")
        received += part
    return bytes(received)


def connect(
    address: str, port: int, secret: Secret, timeout_seconds: float = _CONNECT_SECONDS, keep_alive: bool = True
) -> Connection:
    """Connect to a server of this job; try again until the deadline, since a crowded server may drop a connection."""
    deadline, pause = time.monotonic() + timeout_seconds, _SHORTEST_PAUSE
    while True:
        left = max(deadline - time.monotonic(), 0.001)
        try:
            connection = socket.create_connection((address, port), timeout=left)
            try:
                connection.settimeout(min(left, _PROOF_SECONDS))
                made = Connection(connection, secret)
                connection.settimeout(None)
                if keep_alive:
                    set_keep_alive(connection)
                return made
            except BaseException:
                connection.close()
                raise
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError | socket.gaierror)
            if refused or time.monotonic() + pause > deadline:
                raise
        time.sleep(pause * (0.5 + secrets.randbelow(1000) / 2000))
        pause = min(2 * pause, _LONGEST_PAUSE)


class MessageServer:
    """Receives the messages of all peers in one thread; a subclass decides which peers are admitted."""

    kinds: tuple[str, ...] = ()  # of messages that admitted peers send
    keep_alive = True

    def __init__(self, secret: Secret) -> None:
        self._key = secret.key("messages")
        self._peers: dict[int, Peer] = {}  # by the number under which they were admitted
        self._strangers: dict[int, Peer] = {}  # by arrival, without a proof yet
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._waker: socket.socket | None = None  # to wake the thread, once it has started
        self._thread = threading.Thread(target=self._serve, name="message server", daemon=True)
        self._closed = False

    def admit(self, arrival: int, message: dict[str, Any], peer: Peer) -> Event | None:
        """Return the number of a peer and its first event, given its first message; None refuses the peer."""
        raise NotImplementedError

    def on_message(self, number: int, message: dict[str, Any]) -> None:
        """Take a message of a peer, in the server's thread; adds it to the events unless a subclass does more."""
        self._events.put((number, message))

    def start(self, listener: socket.socket) -> int:
        """Accept peers at a socket, in a thread; return its port."""
        allow_many_files()
        listener.setblocking(False)
        not_for_children.add(listener)
        self._listener = listener
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread.start()
        return listener.getsockname()[1]

    def close(self) -> None:
        """End all connections once what was sent has left, and accept no more."""
        self._closed = True
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_END_SECONDS)

    def put(self, kind: str, **content: Any) -> None:
        """Add an event of this process itself; may be called in a signal handler."""
        self._events.put((-1, {"kind": kind} | content))

    def next(self, seconds: float) -> Event | None:
        """Return the next event, or None after this time; `disconnected` follows the last message of a peer."""
        with contextlib.suppress(queue.Empty):
            return self._events.get(timeout=seconds)

    def send(self, numbers: Iterable[int], kind: str, **content: Any) -> None:
        """Send a message to some peers; those that have disconnected are left out."""
        encoded = encode(kind, content)
        for number in numbers:
            if peer := self._peers.get(number):
                self._seal(peer, encoded)

    def send_all(self, kind: str, **content: Any) -> None:
        """Send a message to all peers."""
        self.send(list(self._peers), kind, **content)

    def reply(self, peer: Peer, kind: str, **content: Any) -> None:
        """Send a message to one peer, also to one that is not admitted."""
        self._seal(peer, encode(kind, content))

    # What follows runs in the server's thread, but for _seal, _write and _wake.

    def _seal(self, peer: Peer, encoded: bytes) -> None:
        with self._lock:
            assert peer.sealed is not None
            head = peer.sealed.head(encoded)
            if len(encoded) < _SHARED_BYTES:
                self._write(peer, head + encoded)
            else:  # the same bytes wait for all peers
                self._write(peer, head, encoded)

    def _serve(self) -> None:
        arrival = 0
        while not self._closed:
            for ready, _ in self._selector.select(1.0 if self._strangers else None):
                if ready.fileobj is self._woken:
                    self._woken.recv(_READ_BYTES)
                elif ready.fileobj is self._listener:
                    arrival = self._accept(arrival)
                else:
                    self._handle(ready.data)
            self._drop_strangers()
        self._end()

    def _handle(self, peer: Peer) -> None:
        """Send what is left to send, and read what has arrived; a peer that breaks the protocol is disconnected."""
        try:
            with self._lock:
                self._flush(peer)
            if peer.ends and not peer.unsent:
                return self._drop(peer)
            part = peer.connection.recv(_READ_BYTES)
            if not part:
                return self._drop(peer)
            peer.received += part
            if peer.opened is not None or self._prove(peer):
                self._read(peer)
        except BlockingIOError:
            pass
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            self._drop(peer)

    def _accept(self, arrival: int) -> int:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._strangers:
                    self._drop(next(iter(self._strangers.values())))
                    continue
                return arrival
            not_for_children.add(connection)
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = self._strangers[arrival] = Peer(connection, arrival)
            self._selector.register(connection, selectors.EVENT_READ, peer)
            arrival += 1
            self._drop_strangers()

    def _drop_strangers(self) -> None:
        """Close connections that have proved nothing in time, and the oldest where there are too many."""
        now = time.monotonic()
        while self._strangers:
            oldest = next(iter(self._strangers.values()))
            if len(self._strangers) <= _MAX_STRANGERS and now - oldest.since < _PROOF_SECONDS:
                return
            self._drop(oldest)

    def _prove(self, peer: Peer) -> bool:
        """Exchange proofs with a stranger; return whether it has proved to hold the secret."""
        if peer.nonces is None:
            hello = peer.take(len(_HELLO) + NONCE_BYTES)
            if hello is None:
                return False
            if not hello.startswith(_HELLO):
                raise NotOfThisJob("another protocol")
            own = secrets.token_bytes(NONCE_BYTES)
            peer.nonces = hello.removeprefix(_HELLO) + own
            self._write(peer, own + proof(self._key, "server", peer.nonces))
        given = peer.take(PROOF_BYTES)
        if given is None:
            return False
        if not hmac.compare_digest(given, proof(self._key, "client", peer.nonces)):
            raise NotOfThisJob("a wrong proof")
        peer.sealed, peer.opened = Seal(self._key, peer.nonces, "server"), Seal(self._key, peer.nonces, "client")
        del self._strangers[peer.number]
        if self.keep_alive:
            set_keep_alive(peer.connection)
        return True

    def _read(self, peer: Peer) -> None:
        assert peer.opened is not None
        head = LENGTH.size + TAG_BYTES
        while len(peer.received) >= head:
            length = length_of(bytes(peer.received[: LENGTH.size]))
            if len(peer.received) < head + length:
                return
            tag = peer.take(head)[LENGTH.size :]  # pyright: ignore[reportOptionalSubscript]
            message = peer.opened.unpack(tag, peer.take(length) or b"")
            if peer.admitted is None:
                self._admit(peer, message)
            elif message["kind"] in self.kinds:
                self.on_message(peer.admitted, message)

    def _admit(self, peer: Peer, message: dict[str, Any]) -> None:
        admitted = None if peer.ends else self.admit(peer.number, message, peer)
        if admitted is None:
            peer.ends = True
            self._watch(peer, writing=True)
            return
        number, event = admitted
        if number in self._peers:  # a peer that connects anew replaces its lost connection
            self._drop(self._peers[number])
        peer.admitted = number
        self._peers[number] = peer
        self.on_message(number, event)

    def _write(self, peer: Peer, *parts: bytes) -> None:
        """Send as much as the connection takes now, the rest when it can; in any thread."""
        with self._lock, contextlib.suppress(OSError):
            peer.unsent.extend(parts)
            peer.unsent_bytes += sum(map(len, parts))
            self._flush(peer)
            if peer.unsent_bytes > _MAX_UNSENT_BYTES:
                peer.connection.shutdown(socket.SHUT_RDWR)  # the server's thread notices

    def _flush(self, peer: Peer) -> None:
        with contextlib.suppress(BlockingIOError):
            while peer.unsent:
                sent = peer.connection.send(peer.unsent[0])
                peer.unsent_bytes -= sent
                if sent == len(peer.unsent[0]):
                    peer.unsent.popleft()
                else:
                    peer.unsent[0] = peer.unsent[0][sent:]
        self._watch(peer, writing=bool(peer.unsent) or peer.ends)

    def _watch(self, peer: Peer, writing: bool) -> None:
        """Have the selector report when a peer can be written to, or no longer."""
        if peer.writing != writing:
            peer.writing = writing
            events = selectors.EVENT_READ | selectors.EVENT_WRITE if writing else selectors.EVENT_READ
            with contextlib.suppress(KeyError, ValueError):  # it has just been disconnected
                self._selector.modify(peer.connection, events, peer)
            self._wake()

    def _drop(self, peer: Peer) -> None:
        with self._lock:
            self._strangers.pop(peer.number, None)
            is_known = peer.admitted is not None and self._peers.get(peer.admitted) is peer
            if peer.admitted is not None and is_known:
                del self._peers[peer.admitted]
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(peer.connection)
            peer.connection.close()
        if peer.admitted is not None and is_known:
            self.on_message(peer.admitted, {"kind": "disconnected"})

    def _wake(self) -> None:
        if self._waker is not None:
            with contextlib.suppress(OSError):
                self._waker.send(b"\0")

    def _end(self) -> None:
        self._listener.close()
        for peer in [key.data for key in self._selector.get_map().values() if key.data is not None]:
            with contextlib.suppress(OSError):
                peer.connection.settimeout(1.0)
                peer.connection.sendall(b"".join(peer.unsent))
                peer.connection.shutdown(socket.SHUT_RDWR)
            peer.connection.close()
        self._selector.close()
        for end in (self._waker, self._woken):
            if end is not None:
                end.close()
