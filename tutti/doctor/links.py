"""Link tests over TCP: a server on each host that replies, receives and sends, and measurements by its clients."""

import contextlib
import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from tutti.doctor.exchange import StoreExchange
from tutti.doctor.plan import HostAddress, Link
from tutti.ranks.interfaces import interface_towards, interfaces, source_towards
from tutti.ranks.placement import Placement

_LOOPBACK = "lo"


def own_address(placement: Placement, exchange: StoreExchange, seconds: float) -> tuple[str, str]:
    """The address and interface of this rank: of GLOO_SOCKET_IFNAME, else on the route to another host.

    Every rank must call this. The address is empty if the interface has none.
    """
    several = placement.world_size > placement.local_size
    own = None
    if several and placement.address:
        with suppress(OSError):  # the name does not resolve here: the link tests report it
            own = source_towards(placement.address)
    exchange.put_any("elsewhere", own, placement.world_size)
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if not name and several:
        other = placement.address if own else exchange.take("elsewhere", seconds)
        name = interface_towards(other) if other else None
    name = name or _LOOPBACK
    return next(iter(interfaces().get(name, [])), ""), name


CONNECT_SECONDS = 3.0
STALL_SECONDS = 4.0
_PINGS = 12
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 1 << 27
_REQUEST = struct.Struct("!cQ")
_TIME = struct.Struct("!d")
_BLOCK = bytes(1 << 20)


class Server:
    """Serves the link tests of other hosts until it is closed; clients without the secret are refused."""

    def __init__(self, address: str, secret: str) -> None:
        self._secret = secret.encode()
        self._socket = socket.create_server((address, 0), family=_family(address), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for each in (self._socket, *list(self._open)):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._socket.accept()
                self._open.add(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not hmac.compare_digest(_receive(connection, len(self._secret)), self._secret):
                return
            connection.sendall(b"!")
            while True:
                kind, size = _REQUEST.unpack(_receive(connection, _REQUEST.size))
                if kind == b"t":
                    connection.sendall(_TIME.pack(time.time()))
                elif kind == b"u" and size <= _MOST_BYTES:
                    _drain(connection, size)
                    connection.sendall(b"!")
                elif kind == b"d" and size <= _MOST_BYTES:
                    _fill(connection, size)
                else:
                    return


def connect(place: HostAddress, secret: str, seconds: float = CONNECT_SECONDS) -> socket.socket:
    """A connection whose server has accepted the secret."""
    connection = socket.create_connection((place.address, place.port), timeout=seconds)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(secret.encode())
        _receive(connection, 1)
        connection.settimeout(STALL_SECONDS)
    except BaseException:
        connection.close()
        raise
    return connection


def connect_all(places: Mapping[int, HostAddress], secret: str) -> dict[int, socket.socket | str]:
    """Connect to many hosts at once, so that unreachable ones share a deadline; a text says why there is none."""

    def attempt(place: HostAddress) -> socket.socket | str:
        try:
            return connect(place, secret)
        except OSError as error:
            return _why(error, place)

    if not places:
        return {}
    with ThreadPoolExecutor(max_workers=min(64, len(places))) as pool:
        return dict(zip(places, pool.map(attempt, places.values()), strict=True))


def measure(connection: socket.socket, first: str, second: str, seconds: float) -> Link:
    """Measure latency and bandwidth in both directions, with transfers that grow until they take this long."""
    try:
        latency = min(_timed(lambda: _ask_time(connection)) for _ in range(_PINGS))
        there = _grow(lambda size: _upload(connection, size), latency, seconds)
        back = _grow(lambda size: _download(connection, size), latency, seconds)
        return Link(first, second, there, back, latency)
    except OSError as error:
        stalled = isinstance(error, TimeoutError)
        why = f"bytes stopped for {STALL_SECONDS:g} s; do both use the same MTU?" if stalled else str(error)
        return Link(first, second, error=f"it connects, but then {why}")


def measure_clock(connection: socket.socket) -> tuple[float, float]:
    """The offset of this host's clock from the other's, and its uncertainty."""
    best = (0.0, float("inf"))
    for _ in range(_PINGS):
        sent = time.time()
        theirs = _ask_time(connection)
        received = time.time()
        error = (received - sent) / 2
        if 0 <= error < best[1]:
            best = ((sent + received) / 2 - theirs, error)
    return best


def _grow(transfer: Callable[[int], float], latency: float, seconds: float) -> float:
    """Bytes per second of the first transfer that takes long enough; those before it fill network buffers."""
    size = _FIRST_BYTES
    while True:
        taken = transfer(size)
        if taken >= seconds:
            taken = min(taken, transfer(size))  # a process that was interrupted is no slow link
        if taken >= seconds or size >= _MOST_BYTES:
            return size / max(taken - latency, 1e-6)
        size *= 2


def _upload(connection: socket.socket, size: int) -> float:
    def work() -> None:
        connection.sendall(_REQUEST.pack(b"u", size))
        _fill(connection, size)
        _receive(connection, 1)

    return _timed(work)


def _download(connection: socket.socket, size: int) -> float:
    def work() -> None:
        connection.sendall(_REQUEST.pack(b"d", size))
        _drain(connection, size)

    return _timed(work)


def _ask_time(connection: socket.socket) -> float:
    connection.sendall(_REQUEST.pack(b"t", 0))
    return _TIME.unpack(_receive(connection, _TIME.size))[0]


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _fill(connection: socket.socket, size: int) -> None:
    block = memoryview(_BLOCK)
    for sent in range(0, size, len(_BLOCK)):
        connection.sendall(block[: min(len(_BLOCK), size - sent)])


def _drain(connection: socket.socket, size: int) -> None:
    buffer = memoryview(bytearray(min(size, len(_BLOCK))))
    while size:
        count = connection.recv_into(buffer[: min(size, len(buffer))])
        if not count:
            raise ConnectionError("the other end has closed the connection")
        size -= count


def _receive(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise ConnectionError("the other end has closed the connection")
        found += part
    return bytes(found)


def _why(error: OSError, place: HostAddress) -> str:
    late = isinstance(error, TimeoutError)
    what = f"no answer within {CONNECT_SECONDS:g} s" if late else (error.strerror or str(error)).lower()
    return f"{place.address}:{place.port} on host {place.host}: {what}"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def close_all(connections: Sequence[socket.socket | str]) -> None:
    """Close the connections that were established."""
    for each in connections:
        if isinstance(each, socket.socket):
            each.close()
