"""Which hosts may join an elastic job, and what the server answers to those that may not."""

from collections.abc import Iterator
from typing import Any

import pytest

from tutti.launch.elastic.leader import HostServer
from tutti.ranks.messages import Connection, connect, listen
from tutti.ranks.secret import make_secret

JOIN = {"host": "n2", "slots": 2, "recipe": "digits", "overrides": ["epochs=2"], "version": "1.0", "order": 3}
INCOMPLETE = "this host's request to join is not complete: expected its name, slots and order."


@pytest.fixture
def server() -> Iterator[tuple[HostServer, Connection]]:
    secret = make_secret()
    found = HostServer("digits", ["epochs=2"], "1.0", secret)
    connection = connect("127.0.0.1", found.start(listen(0, "127.0.0.1")), secret)
    yield found, connection
    connection.close()
    found.close()


def test_a_host_joins_sends_messages_and_is_reported_when_it_is_gone(server: tuple[HostServer, Connection]) -> None:
    found, connection = server
    connection.send("join", **JOIN)
    assert found.next(10) == (0, {"kind": "join", "slots": 2, "order": 3})
    assert found.names == {0: "n2"}
    connection.send("nonsense")
    connection.send("leave")
    assert found.next(10) == (0, {"kind": "leave"})
    found.send([0, 7], "stop")
    assert next(connection.messages()) == {"kind": "stop"}
    connection.close()
    assert found.next(10) == (0, {"kind": "disconnected"})
    found.send_all("end")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"version": "0.9"}, "this host has tutti 0.9, the job 1.0: expected the same on all hosts."),
        ({"recipe": "mnist"}, "the job here trains 'digits', not 'mnist'. Join it with its own recipe."),
        ({"overrides": []}, "the job here was resumed with epochs=2: expected the same on all hosts, not []."),
        ({"slots": 0}, "this host offers 0 slots: expected 1 to 1024. Give another number with -n."),
        ({"slots": 1 << 40}, "this host offers 1099511627776 slots: expected 1 to 1024. Give another number with -n."),
        ({"order": -1}, "this host asks for position -1 among the hosts: expected 0 to 1000000."),
        ({"slots": "2"}, INCOMPLETE),
        ({"host": "n2\nerror: no disk"}, INCOMPLETE),
    ],
)
def test_a_host_of_another_kind_is_told_why_it_may_not_join(
    server: tuple[HostServer, Connection], wrong: dict[str, Any], text: str
) -> None:
    found, connection = server
    connection.send("join", **JOIN | wrong)
    assert list(connection.messages()) == [{"kind": "end", "code": 2, "text": text}]
    assert found.names == {}


def test_a_stranger_gets_no_answer(server: tuple[HostServer, Connection]) -> None:
    found, connection = server
    connection.send("GET / HTTP/1.1")
    assert list(connection.messages()) == []
    assert found.next(0.01) is None


@pytest.mark.parametrize(
    "malformed",
    [
        {},
        {"round": 1},
        {"round": "1", "ranks": []},
        {"round": 1, "ranks": [{"killed": True}]},
        {"round": 1, "ranks": [], "more": 1},
        {"round": 1, "ranks": {"failure": None}},
    ],
)
def test_a_host_that_sends_a_malformed_message_is_disconnected(
    server: tuple[HostServer, Connection], malformed: dict[str, Any]
) -> None:
    found, connection = server
    connection.send("join", **JOIN)
    assert found.next(10) == (0, {"kind": "join", "slots": 2, "order": 3})
    connection.send("ended", **malformed)
    assert found.next(10) == (0, {"kind": "disconnected"})
