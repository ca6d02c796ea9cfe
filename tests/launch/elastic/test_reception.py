"""Who may join an elastic job, and what a host hears that may not."""

from collections.abc import Iterator
from typing import Any

import pytest

from tutti.launch.elastic.messages import Reception, Wire, connect, listen

JOIN = {"host": "n2", "places": 2, "recipe": "digits", "version": "1.0", "order": 3}


@pytest.fixture
def reception() -> Iterator[tuple[Reception, Wire]]:
    listener = listen(0)
    found = Reception("digits", "1.0")
    found.open(listener)
    wire = connect("127.0.0.1", listener.getsockname()[1])
    yield found, wire
    wire.close()
    listener.close()


def test_a_host_joins_speaks_and_is_missed_when_it_is_gone(reception: tuple[Reception, Wire]) -> None:
    found, wire = reception
    wire.send("join", **JOIN)
    assert found.next(10) == (0, {"kind": "join", "places": 2, "order": 3})
    assert found.names == {0: "n2"}
    wire.send("nonsense")
    wire.send("leave")
    assert found.next(10) == (0, {"kind": "leave"})
    found.tell([0, 7], "stop")
    assert next(wire.messages()) == {"kind": "stop"}
    wire.close()
    assert found.next(10) == (0, {"kind": "gone"})
    found.tell_all("end")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"version": "0.9"}, "this host has tutti 0.9, the job 1.0: expected the same on all hosts."),
        ({"recipe": "mnist"}, "the job here trains 'digits', not 'mnist'. Join it with its own recipe."),
    ],
)
def test_a_host_of_another_kind_is_told_why_it_may_not_join(
    reception: tuple[Reception, Wire], wrong: dict[str, Any], text: str
) -> None:
    found, wire = reception
    wire.send("join", **JOIN | wrong)
    assert list(wire.messages()) == [{"kind": "end", "code": 2, "text": text}]
    assert found.names == {}


def test_a_stranger_hears_nothing(reception: tuple[Reception, Wire]) -> None:
    found, wire = reception
    wire.send("GET / HTTP/1.1")
    assert list(wire.messages()) == []
    assert found.next(0.01) is None
