"""Messages are believed only from processes that hold the secret of the job."""

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tutti.errors import LaunchError
from tutti.ranks import messages, secret
from tutti.ranks.messages import Connection, Event, MessageServer, NotOfThisJob, Peer, connect, listen
from tutti.ranks.secret import ForgedContent, Secret, find_secret, make_secret, read_secret, user_secret, write_secret

SECRET = Secret(b"s" * 32)


class EchoServer(MessageServer):
    """Admits peers by a number that they give, and repeats what they send."""

    kinds = ("say",)

    def admit(self, arrival: int, message: dict[str, Any], peer: Peer) -> Event | None:
        match message:
            case {"kind": "hello", "number": int(number)}:
                return number, message
        self.reply(peer, "refused")
        return None

    def on_message(self, number: int, message: dict[str, Any]) -> None:
        if message["kind"] == "say":
            self.send([number], "said", text=message["text"])
        super().on_message(number, message)


@pytest.fixture
def server() -> Iterator[tuple[EchoServer, int]]:
    found = EchoServer(SECRET)
    port = found.start(listen(0, "127.0.0.1"))
    yield found, port
    found.close()


@pytest.fixture(autouse=True)
def opened() -> Iterator[ExitStack]:
    """What a test has opened; it is closed at its end."""
    global _opened
    with ExitStack() as _opened:
        yield _opened


_opened = ExitStack()


def joined(port: int, number: int = 1) -> Connection:
    connection = _opened.enter_context(connect("127.0.0.1", port, SECRET))
    connection.send("hello", number=number)
    return connection


def raw(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def test_messages_go_both_ways_and_the_end_of_a_peer_is_an_event(server: tuple[EchoServer, int]) -> None:
    found, port = server
    connection = joined(port)
    assert found.next(30) == (1, {"kind": "hello", "number": 1})
    connection.send("unknown")
    connection.send("say", text="ä" * 300_000)
    assert next(connection.messages()) == {"kind": "said", "text": "ä" * 300_000}
    assert found.next(30) == (1, {"kind": "say", "text": "ä" * 300_000})
    connection.close()
    assert found.next(30) == (1, {"kind": "disconnected"})
    found.send_all("nobody is left")


def test_a_refused_peer_gets_the_reason_and_the_end_of_its_connection(server: tuple[EchoServer, int]) -> None:
    connection = _opened.enter_context(connect("127.0.0.1", server[1], SECRET))
    connection.send("say", text="without a number")
    assert list(connection.messages()) == [{"kind": "refused"}]


def test_more_than_the_socket_takes_at_once_arrives_whole_and_in_order(server: tuple[EchoServer, int]) -> None:
    found, port = server
    connection = joined(port)
    found.next(30)
    texts = [str(number) * 200_000 for number in range(100)]
    for text in texts:
        found.send([1], "said", text=text)
    received = connection.messages()
    assert [next(received)["text"] for _ in texts] == texts


def test_what_was_sent_before_the_server_closed_arrives(server: tuple[EchoServer, int]) -> None:
    found, port = server
    connection = joined(port)
    found.next(30)
    found.send_all("said", text="x" * 3_000_000)
    arrived: list[dict[str, Any]] = []
    reader = threading.Thread(target=lambda: arrived.extend(connection.messages()))
    reader.start()
    found.close()
    reader.join(60)
    assert [len(message["text"]) for message in arrived] == [3_000_000]


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n" + b"x" * 200,
        b"tutti/1\n" + b"n" * 32 + b"p" * 32,
        b"\0" * 1_000_000,
        json.dumps({"kind": "hello", "number": 1}).encode() + b"\n" + b" " * 100,
    ],
    ids=["http", "a guessed proof", "zeros", "an old message"],
)
def test_a_stranger_is_disconnected_and_causes_no_event(server: tuple[EchoServer, int], sent: bytes) -> None:
    found, port = server
    with raw(port) as stranger:
        try:
            stranger.sendall(sent)
            while stranger.recv(4096):
                pass
        except ConnectionError:
            pass
    joined(port)
    assert found.next(30) == (1, {"kind": "hello", "number": 1})


def test_a_client_does_not_believe_a_server_without_the_secret() -> None:
    impostor = EchoServer(make_secret())
    port = impostor.start(listen(0, "127.0.0.1"))
    with pytest.raises(NotOfThisJob, match="without the secret of this job"):
        connect("127.0.0.1", port, SECRET, timeout_seconds=0.2)
    impostor.close()


def test_many_idle_connections_do_not_keep_a_peer_out(
    server: tuple[EchoServer, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, port = server
    monkeypatch.setattr(messages, "_MAX_STRANGERS", 20)
    monkeypatch.setattr(messages, "_PROOF_SECONDS", 3600.0)
    idle = [raw(port) for _ in range(100)]
    joined(port)
    assert found.next(30) == (1, {"kind": "hello", "number": 1})
    assert [each.recv(1) for each in idle[:80]] == [b""] * 80, "the oldest are closed"
    for each in idle:
        each.close()


def test_a_connection_that_proves_nothing_is_closed_in_time(
    server: tuple[EchoServer, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_PROOF_SECONDS", 0.2)
    with raw(server[1]) as idle:
        idle.sendall(b"tutti/1\n")
        assert idle.recv(1) == b""


def recorded_session(port: int) -> tuple[socket.socket, list[bytes], Connection]:
    """A connection whose sent bytes are recorded, as somebody on its way would see them."""
    inner = raw(port)
    sent: list[bytes] = []

    class Recorded(socket.socket):
        def sendall(self, content: Any, *_: Any) -> None:
            sent.append(bytes(content))
            super().sendall(content)

    outer = Recorded(fileno=inner.detach())
    outer.settimeout(30)
    return outer, sent, _opened.enter_context(Connection(outer, SECRET))


def test_a_repeated_message_ends_the_connection(server: tuple[EchoServer, int]) -> None:
    found, port = server
    outer, sent, connection = recorded_session(port)
    connection.send("hello", number=4)
    connection.send("say", text="once")
    assert found.next(30) == (4, {"kind": "hello", "number": 4})
    assert found.next(30) == (4, {"kind": "say", "text": "once"})
    outer.sendall(sent[-1])
    assert found.next(30) == (4, {"kind": "disconnected"})


def test_a_recorded_session_cannot_be_repeated(server: tuple[EchoServer, int]) -> None:
    found, port = server
    _, sent, connection = recorded_session(port)
    connection.send("hello", number=4)
    assert found.next(30) == (4, {"kind": "hello", "number": 4})
    with raw(port) as replay:
        replay.sendall(b"".join(sent))
        try:
            while replay.recv(4096):
                pass
        except ConnectionError:
            pass
    connection.send("say", text="still here")
    assert found.next(30) == (4, {"kind": "say", "text": "still here"})


def test_a_changed_message_and_one_that_is_too_long_end_the_connection(server: tuple[EchoServer, int]) -> None:
    found, port = server
    for spoil in (
        lambda content: content.replace(b"once", b"evil"),
        lambda content: content[:-1] + b"]",
        lambda _: struct.pack("!I", 1 << 31) + b"x" * 16,
    ):
        outer, sent, connection = recorded_session(port)
        connection.send("hello", number=4)
        connection.send("say", text="once")
        assert found.next(30) == (4, {"kind": "hello", "number": 4})
        assert found.next(30) == (4, {"kind": "say", "text": "once"})
        socket.socket.sendall(outer, spoil(sent[-1]))
        assert found.next(30) == (4, {"kind": "disconnected"})


def test_a_message_above_the_limit_is_not_sent(server: tuple[EchoServer, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(ValueError, match="expected at most 100"):
        joined(server[1]).send("say", text="x" * 100)


def test_signed_content_is_verified_for_its_purpose() -> None:
    signed = SECRET.sign(b"content", "one")
    assert SECRET.verify(signed, "one") == b"content"
    for wrong, purpose in ((signed, "two"), (signed[:-1], "one"), (b"", "one"), (signed + b"x", "one")):
        with pytest.raises(ForgedContent):
            SECRET.verify(wrong, purpose)
    with pytest.raises(ForgedContent):
        make_secret().verify(signed, "one")


def test_the_secret_is_taken_from_the_environment_a_file_or_the_home_folder(tmp_path: Path) -> None:
    write_secret(tmp_path / "own", SECRET)
    home = {"HOME": str(tmp_path)}
    made = find_secret(home)
    assert made == user_secret(home) == read_secret(tmp_path / ".config" / "tutti" / "secret")
    assert (tmp_path / ".config" / "tutti" / "secret").stat().st_mode & 0o777 == 0o600
    assert find_secret(home | {secret.FILE_VARIABLE: str(tmp_path / "own")}) == SECRET
    assert find_secret(home | make_secret().environment() | SECRET.environment()) == SECRET
    assert SECRET.value.hex() not in repr(SECRET)


def test_a_secret_that_others_can_read_or_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_secret(path, SECRET)
    path.chmod(0o640)
    with pytest.raises(LaunchError, match="mode 640"):
        read_secret(path)
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(LaunchError, match="holds 5 characters: expected 64 hexadecimal digits"):
        read_secret(path)
    with pytest.raises(LaunchError, match="cannot be read: No such file"):
        read_secret(tmp_path / "none")
    with pytest.raises(LaunchError, match="TUTTI_SECRET holds 3 characters"):
        find_secret({secret.SECRET_VARIABLE: "abc"})


def test_ranks_that_create_the_secret_of_a_user_at_once_get_the_same(tmp_path: Path) -> None:
    found: list[Secret] = []
    ranks = [threading.Thread(target=lambda: found.append(user_secret({"HOME": str(tmp_path)}))) for _ in range(16)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(found) == 16
    assert len(set(found)) == 1
