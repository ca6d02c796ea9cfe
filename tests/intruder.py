"""A process without the secret of a job, which tries to disturb it in many ways; none of them may change its result.

`intruding` starts it as a process of its own. It answers at ports where processes of the job may look for each other,
and tries every entry of `ATTEMPTS` at every port at which the job listens: those of tutti, of torch's store and
of Gloo. Not among them is what torch cannot refuse (docs/security.md): changes to its store and connections to Gloo
while groups are created, a taken port that was given, and relayed connections.
"""

import contextlib
import json
import os
import pickle
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = "127.0.0.1"
LEAST_ATTEMPTS = 25
_HELLO = b"tutti/1\n"
_NONCE_BYTES = _PROOF_BYTES = 32
_TAG_BYTES = 16
_ANSWER_SECONDS = 10.0  # for a server of tutti to close a connection; it does so at once
_SECONDS = 1.0  # for any other answer
_BUSY_SECONDS = 30.0  # for a server of tutti on a busy machine to show that it is one
_STORE_SECONDS = 3.0
_FLOOD, _HELD, _GUESSES, _RESETS = 300, 60, 20, 20  # connections
_MOST_BYTES = 1 << 30
_MOST_BYTES_READ = 64 << 20  # that a server of tutti may take from somebody without a proof
_OLD_KEYS = ("start/0/watch/0", "hvd/0/up", "hvd/0/down/0", "hub")

# Messages that the intruder would like to be believed, by the name of the attempt.
_WANTED: dict[str, list[Any]] = {
    "join as rank 0": [{"kind": "join", "rank": 0, "host": "evil", "world_size": 2}],
    "join as another rank": [
        {"kind": "join", "rank": 1, "host": "evil", "world_size": 2},
        {"kind": "worker", "worker": 1},
    ],
    "join with a negative rank": [{"kind": "join", "rank": -1, "host": "evil", "world_size": 2}],
    "join as worker -1": [{"kind": "worker", "worker": -1}],
    "join with 64 slots and order -1": [
        {"kind": "join", "slots": 64, "order": -1, "host": "evil", "recipe": "recipe", "overrides": [], "version": "1"}
    ],
    "join with a billion slots": [
        {
            "kind": "join",
            "slots": 10**9,
            "order": 0,
            "host": "evil",
            "recipe": "recipe",
            "overrides": [],
            "version": "1",
        }
    ],
    "stop": [{"kind": "stop", "reason": "on SIGTERM", "run": 1}, {"kind": "signal", "number": 15}],
    "report a failure": [{"kind": "failed", "text": "no disk", "exit_code": 1, "cause": "error"}],
    "leave for others": [{"kind": "leave"}, {"kind": "disconnected"}],
    "end the round": [{"kind": "ended", "round": 1, "ranks": []}, {"kind": "end", "code": 0, "text": ""}],
    "request ranks": [{"kind": "request", "number": 9, "has_state": True}, {"kind": "request"}],
    "give an answer": [{"kind": "answer", "part": "gASVCg==", "last": {"rank": 0, "well": True}}, {"kind": "rank"}],
    "crash the leader": [{}, [], None, 7, {"kind": 7}, {"kind": "join", "rank": "x"}, {"kind": "join", "slots": {}}],
}


class Bomb:
    """A pickle that makes a folder where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


class Intruder:
    """Tries everything at the ports of a job, and notes what it was told as if it were believed."""

    def __init__(self, folder: Path) -> None:
        self.bomb = pickle.dumps(Bomb(folder / "executed"))
        self.recorded: list[bytes] = []  # what processes of the job have sent on their connections
        self.believed: list[str] = []
        self.fakes = [0, 0]  # callers of the fake servers, and those that went on after a wrong proof
        self.stores: set[int] = set()
        self.ours: set[int] = set()  # the ports at which servers of tutti answer
        self.others: set[int] = set()  # and those where neither tutti nor a store does, such as Gloo's
        self._held: list[socket.socket] = []

    def attack(self, ports: Sequence[int], recorded: list[bytes]) -> dict[str, Any]:
        """Try everything at every port, the ports at once; what was tried at each."""
        self.recorded = recorded
        tried: dict[int, list[str]] = {port: [] for port in ports}
        for seconds in (_SECONDS, _BUSY_SECONDS):
            if not self.ours:
                _at_once(self._find_out, ((port, seconds) for port in ports))
        _at_once(self._attack, tried.items())
        return {
            "tried": tried,
            "believed": self.believed,
            "stores": sorted(self.stores),
            "ours": sorted(self.ours),
            "held": len(self._held),
        }

    def close(self) -> None:
        """Close the connections that are held open."""
        for connection in self._held:
            connection.close()

    def _find_out(self, port: int, seconds: float) -> None:
        """Note whether a server of tutti answers at a port within some time."""
        with contextlib.suppress(OSError), self.connect(port) as connection:
            connection.settimeout(seconds)
            connection.sendall(_HELLO + secrets.token_bytes(_NONCE_BYTES))
            if len(connection.recv(256)) == _NONCE_BYTES + _PROOF_BYTES:
                self.ours.add(port)

    def _attack(self, port: int, tried: list[str]) -> None:
        for name, attempt in ATTEMPTS.items():
            tried.append(name)
            with contextlib.suppress(OSError):
                attempt(self, port)

    def answer_first(self, server: socket.socket) -> None:
        """Answer whoever looks for a process of the job, each time otherwise."""
        for number in range(1_000_000):
            caller, _ = server.accept()
            self.fakes[0] += 1
            threading.Thread(target=self._pretend, args=(caller, number), daemon=True).start()

    def _pretend(self, caller: socket.socket, number: int) -> None:
        welcome = json.dumps({"kind": "welcome", "store_port": 1, "port": 1, "why": ""}).encode()
        with contextlib.suppress(OSError), caller:
            caller.settimeout(_ANSWER_SECONDS)
            if number % 5 == 0:
                caller.sendall(welcome + b"\n")
            hello = caller.recv(4096)
            if number % 5 == 1:  # its own random number and words
                caller.sendall(hello[len(_HELLO) :] + hello[len(_HELLO) :])
            elif number % 5 == 2:
                caller.sendall(self.bomb + bytes(64))
            elif number % 5 == 3:
                return
            else:
                caller.sendall(secrets.token_bytes(_NONCE_BYTES + _PROOF_BYTES))
            caller.sendall(_framed(welcome))
            if len(caller.recv(4096)) >= _PROOF_BYTES:
                self.fakes[1] += 1

    # What the attempts are made of.

    def connect(self, port: int) -> socket.socket:
        return socket.create_connection((HERE, port), timeout=_ANSWER_SECONDS if port in self.ours else _SECONDS)

    def hold(self, port: int, content: bytes) -> None:
        """Leave a connection open until the job has ended."""
        connection = self.connect(port)
        self._held.append(connection)
        connection.sendall(content)

    def say(self, port: int, content: bytes) -> None:
        """Send bytes; a server of tutti closes the connection without a word."""
        with self.connect(port) as connection:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            self._listen(connection, port, "bytes without a proof", allowed=_NONCE_BYTES + _PROOF_BYTES)

    def prove(self, port: int, name: str, content: bytes, proof: bytes | None = None) -> None:
        """Go through the handshake with a wrong proof, that of the server by default, and send bytes as a message."""
        connection, answer = self._greet(port)
        with connection:
            connection.sendall((proof or answer[_NONCE_BYTES:] or bytes(_PROOF_BYTES)) + content)
            self._listen(connection, port, name)

    def _greet(self, port: int) -> tuple[socket.socket, bytes]:
        connection = self.connect(port)
        connection.sendall(_HELLO + secrets.token_bytes(_NONCE_BYTES))
        size = _NONCE_BYTES + _PROOF_BYTES
        return connection, connection.recv(size, socket.MSG_WAITALL) if port in self.ours else b""

    def _listen(self, connection: socket.socket, port: int, name: str, allowed: int = 0) -> None:
        """Wait until the connection is closed; more than a handshake means that the intruder was believed."""
        if port not in self.ours:
            return
        heard = b""
        with contextlib.suppress(OSError):
            while part := connection.recv(4096):
                heard += part
        if len(heard) > allowed:
            self.believed.append(name)


def _at_once(work: Callable[..., None], each: Iterable[tuple[Any, ...]]) -> None:
    threads = [threading.Thread(target=work, args=arguments) for arguments in each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


ATTEMPTS: dict[str, Callable[[Intruder, int], None]] = {}


def _attempt(name: str) -> Callable[[Callable[[Intruder, int], None]], Callable[[Intruder, int], None]]:
    def add(function: Callable[[Intruder, int], None]) -> Callable[[Intruder, int], None]:
        ATTEMPTS[name] = function
        return function

    return add


def _framed(content: bytes) -> bytes:
    """A message with its length and a guessed signature."""
    return struct.pack("!I", len(content)) + secrets.token_bytes(_TAG_BYTES) + content


def _sending(content: Callable[[Intruder], bytes]) -> Callable[[Intruder, int], None]:
    return lambda intruder, port: intruder.say(port, content(intruder))


def _wanting(name: str, messages: list[Any]) -> Callable[[Intruder, int], None]:
    """The messages as lines of JSON, with a guessed proof and with the proof of the server."""

    def attempt(intruder: Intruder, port: int) -> None:
        for message in messages:
            content = json.dumps(message).encode()
            intruder.say(port, content + b"\n")
            intruder.prove(port, name, _framed(content), secrets.token_bytes(_PROOF_BYTES))
            intruder.prove(port, name, _framed(content))

    return attempt


ATTEMPTS |= {name: _wanting(name, messages) for name, messages in _WANTED.items()}
ATTEMPTS |= {
    "nothing": _sending(lambda _: b""),
    "half a hello": _sending(lambda _: _HELLO[:4]),
    "a hello without a proof": _sending(lambda _: _HELLO + bytes(32)),
    "http": _sending(lambda _: b"GET / HTTP/1.1\r\nHost: rank\r\n\r\n" + b"x" * 200),
    "ssh": _sending(lambda _: b"SSH-2.0-OpenSSH_9.0\r\n"),
    "a TLS hello": _sending(lambda _: bytes.fromhex("16030100c8010000c40303") + secrets.token_bytes(200)),
    "zeros": _sending(lambda _: bytes(1 << 16)),
    "noise": _sending(lambda _: secrets.token_bytes(1 << 16)),
    "deep JSON": _sending(lambda _: b"[" * (1 << 16)),
    "deep JSON as a message": lambda intruder, port: intruder.prove(port, "deep JSON", _framed(b"[" * (1 << 16))),
    "text that is no UTF-8": _sending(lambda _: b"\xff\xfe" * 1000 + b"\n"),
    "a pickle": _sending(lambda intruder: intruder.bomb),
    "a pickle with its length": _sending(lambda intruder: struct.pack("!I", len(intruder.bomb)) + intruder.bomb),
    "a pickle as a message": lambda intruder, port: intruder.prove(port, "a pickle", _framed(intruder.bomb)),
    "a huge length": _sending(lambda _: _HELLO + bytes(64) + struct.pack("!I", 0xFFFFFFFF) + bytes(1 << 16)),
    "a length of 1 GB": lambda intruder, port: intruder.prove(port, "1 GB", struct.pack("!I", _MOST_BYTES) + bytes(99)),
}


@_attempt("guessed proofs")
def _guess(intruder: Intruder, port: int) -> None:
    for _ in range(_GUESSES):
        intruder.prove(port, "guessed proofs", _framed(b'{"kind":"join"}'), secrets.token_bytes(_PROOF_BYTES))


@_attempt("reflected proof of another connection")
def _reflect(intruder: Intruder, port: int) -> None:
    """Give the random number of one connection as one's own in another, and its proof back in the first."""
    first, answer = intruder._greet(port)
    with first, intruder.connect(port) as second:
        second.sendall(_HELLO + answer[:_NONCE_BYTES].ljust(_NONCE_BYTES, b"\0"))
        if port in intruder.ours:
            proof = second.recv(_NONCE_BYTES + _PROOF_BYTES)[_NONCE_BYTES:]
            first.sendall(proof + _framed(b'{"kind":"leave"}'))
            intruder._listen(first, port, "reflected proof")


@_attempt("replay of recorded messages")
def _replay(intruder: Intruder, port: int) -> None:
    """Send what processes of the job have sent, in one piece, and once more in answer to the server."""
    for recorded in intruder.recorded:
        intruder.say(port, recorded)
        with intruder.connect(port) as connection:
            connection.sendall(recorded[: len(_HELLO) + _NONCE_BYTES])
            if port in intruder.ours:
                connection.recv(_NONCE_BYTES + _PROOF_BYTES, socket.MSG_WAITALL)
            connection.sendall(recorded[len(_HELLO) + _NONCE_BYTES :])
            intruder._listen(connection, port, "replay")


@_attempt("replay of the last message alone")
def _replay_the_end(intruder: Intruder, port: int) -> None:
    for recorded in intruder.recorded:
        intruder.say(port, recorded[len(_HELLO) + _NONCE_BYTES + _PROOF_BYTES :])


@_attempt("one byte after the other")
def _dribble(intruder: Intruder, port: int) -> None:
    with intruder.connect(port) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in _HELLO + secrets.token_bytes(_NONCE_BYTES + _PROOF_BYTES):
            connection.sendall(bytes([byte]))


@_attempt("hold connections open")
def _hold(intruder: Intruder, port: int) -> None:
    for number in range(_HELD):
        intruder.hold(port, (_HELLO + bytes(40))[: number % 48])


@_attempt("never read")
def _never_read(intruder: Intruder, port: int) -> None:
    intruder.hold(port, _HELLO + secrets.token_bytes(_NONCE_BYTES))


@_attempt("flood of connections")
def _flood(intruder: Intruder, port: int) -> None:
    for _ in range(_FLOOD):
        intruder.connect(port).close()


@_attempt("resets")
def _reset(intruder: Intruder, port: int) -> None:
    for number in range(_RESETS):
        with intruder.connect(port) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall((_HELLO + bytes(32))[: 2 * number])


@_attempt("1 GB")
def _send_a_gigabyte(intruder: Intruder, port: int) -> None:
    """As much as the other end takes before it closes; a server of torch may take it for a while."""
    block, sent = secrets.token_bytes(1 << 20), 0
    deadline = time.monotonic() + _SECONDS
    with intruder.connect(port) as connection, contextlib.suppress(OSError):
        while sent < _MOST_BYTES and (port in intruder.ours or time.monotonic() < deadline):
            connection.sendall(block)
            sent += len(block)
    if port in intruder.ours and sent > _MOST_BYTES_READ:
        intruder.believed.append("1 GB")


def _with_store(change: Callable[[Any, Any, str], object]) -> Callable[[Intruder, int], None]:
    """Do something to every key, where a store of torch answers; its client may wait for ever where none does."""

    def use(intruder: Intruder, port: int) -> None:
        import torch.distributed as dist

        with contextlib.suppress(RuntimeError):
            store = dist.TCPStore(HERE, port, is_master=False, timeout=timedelta(seconds=1), wait_for_workers=False)
            keys = list(store.list_keys())
            intruder.stores.add(port)
            for key in [*keys, *_OLD_KEYS]:
                with contextlib.suppress(RuntimeError):
                    change(intruder, store, key)

    def attempt(intruder: Intruder, port: int) -> None:
        if port in intruder.ours | intruder.others:
            intruder.say(port, b"\x07" + secrets.token_bytes(99))
            return
        thread = threading.Thread(target=use, args=(intruder, port), daemon=True)
        thread.start()
        thread.join(_STORE_SECONDS)
        if port not in intruder.stores:
            intruder.others.add(port)

    return attempt


ATTEMPTS |= {
    "read every key": _with_store(lambda _, store, key: store.get(key) if store.check([key]) else None),
    "write every key": _with_store(lambda intruder, store, key: store.set(key, intruder.bomb)),
    "count up every key": _with_store(lambda _, store, key: store.add(key, 1000)),
    "push pickles into every queue": _with_store(lambda intruder, store, key: store.queue_push(key, intruder.bomb)),
    "empty every queue": _with_store(lambda _, store, key: store.queue_pop(key, False)),
    "delete every key": _with_store(lambda _, store, key: store.delete_key(key)),
}
ANSWER_FIRST = "answer first at the rendezvous"  # during the whole job, at ports where its processes may look
NAMES = {*ATTEMPTS, ANSWER_FIRST}


def main() -> None:
    """Answer at some ports, try everything at the ports that the input names, and stay until the input ends."""
    assert "TUTTI_SECRET" not in os.environ and "TUTTI_SECRET_FILE" not in os.environ
    folder, *wanted = sys.argv[1:]
    intruder = Intruder(Path(folder))
    servers = []
    for port in map(int, wanted):
        with contextlib.suppress(OSError):  # somebody else has it
            servers.append(socket.create_server((HERE, port)))
            threading.Thread(target=intruder.answer_first, args=(servers[-1],), daemon=True).start()
    print(json.dumps([server.getsockname()[1] for server in servers]), flush=True)
    for line in sys.stdin:
        given = json.loads(line)
        report = intruder.attack(given["ports"], [bytes.fromhex(each) for each in given["recorded"]])
        print(json.dumps(report), flush=True)
    print(json.dumps(intruder.fakes), flush=True)
    os._exit(0)  # a client of the store may still wait


# For tests.


class Intrusion:
    """The intruder's process, as a test sees it."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self.process = process
        self.executed = folder / "executed"
        self.fake_ports: list[int] = self._read()
        self.report: dict[str, Any] = {}

    def attack(self, processes: Iterable[int], recorded: list[bytes]) -> None:
        """Have everything tried at the ports of some processes; connections stay open afterwards."""
        assert recorded, "nothing was recorded that could be replayed"
        assert self.process.stdin is not None
        given = {"ports": listening_ports(processes), "recorded": [each.hex() for each in recorded]}
        self.process.stdin.write(json.dumps(given) + "\n")
        self.process.stdin.flush()
        self.report = self._read()

    def end(self) -> None:
        """Check, once the job has ended, that every attempt was made and none has succeeded."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        callers, deceived = self._read()
        tried = {name for names in self.report["tried"].values() for name in names}
        tried |= {ANSWER_FIRST} if callers else set()
        assert tried == NAMES and len(NAMES) >= LEAST_ATTEMPTS
        assert all(set(names) == set(ATTEMPTS) for names in self.report["tried"].values())
        assert self.report["ours"] and self.report["stores"], "a server of tutti and a store of torch were attacked"
        assert self.report["held"] >= _HELD
        assert self.report["believed"] == [] and deceived == 0
        assert not self.executed.exists(), "a process of the job ran what the intruder sent"

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the intruder has ended with {self.process.wait()}"
        return json.loads(line)


@contextlib.contextmanager
def intruding(folder: Path, fake_ports: Iterable[int] = (0,)) -> Iterator[Intrusion]:
    """Start an intruder that answers at some ports; at the end everything must have been tried in vain."""
    from conftest import environment
    from prepared import PYTHON

    folder.mkdir()
    given = environment(HOME=str(folder), XDG_CONFIG_HOME=str(folder), PYTHONPATH=str(Path(__file__).parent))
    process = subprocess.Popen(
        [PYTHON, str(Path(__file__)), str(folder), *map(str, fake_ports)],
        cwd=folder,
        env={name: value for name, value in given.items() if not name.startswith("TUTTI_SECRET")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        intrusion = Intrusion(process, folder)
        yield intrusion
        intrusion.end()
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


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


def processes_in(folder: Path) -> list[int]:
    """The processes whose working directory a folder is."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "cwd") == str(folder):
                found.append(int(process.name))
    return found


def record_sent(folder: Path) -> None:
    """Have what this process sends over connections kept in files, as somebody on the way would see it."""
    send = socket.socket.sendall

    def send_and_record(self: socket.socket, content: Any, *more: Any) -> None:
        if self.family != socket.AF_UNIX:
            with (folder / f"sent-{os.getpid()}-{self.getsockname()[1]}").open("ab") as file:
                file.write(content)
        send(self, content, *more)

    socket.socket.sendall = send_and_record  # pyright: ignore[reportAttributeAccessIssue]


def recorded_in(folder: Path) -> list[bytes]:
    """What processes of the job have sent to a server of tutti."""
    sent = [path.read_bytes() for path in sorted(folder.glob("sent-*"))]
    return [content for content in sent if content.startswith(_HELLO) and len(content) > 100]


if __name__ == "__main__":
    main()
