"""Measurements over real sockets of this host, test files in real folders, and the messages when they fail."""

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tutti.doctor.exchange import decode
from tutti.doctor.facts import Facts
from tutti.doctor.hosts import find_test_files, judge_folder, nearest_folder, remove_test_file, write_test_file
from tutti.doctor.links import Server, close_all, connect, connect_all, measure, measure_clock
from tutti.doctor.plan import (
    HostAddress,
    HostTests,
    Link,
    LinkPlan,
    check_addresses,
    gather_links,
    make_plan,
    name_hosts_apart,
)

SECRET = "a secret of this job"


@pytest.fixture
def place() -> Iterator[HostAddress]:
    server = Server("127.0.0.1", SECRET)
    yield HostAddress("here", "127.0.0.1", server.port)
    server.close()


def test_a_link_has_latency_and_speed_both_ways(place: HostAddress) -> None:
    with connect(place, SECRET) as connection:
        link = measure(connection, "here", "there", seconds=0.001)
        offset, error = measure_clock(connection)
    assert link.error is None
    assert min(link.there, link.back, link.latency_seconds) > 0
    assert abs(offset) <= max(error, 1e-3)


def test_a_client_without_the_secret_is_refused(place: HostAddress) -> None:
    with pytest.raises(ConnectionError, match="the other end has closed the connection"):
        connect(place, "x" * len(SECRET))


def test_connections_are_tried_at_once_and_failures_give_their_reason(place: HostAddress) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    found = connect_all({0: place, 7: HostAddress("gone", "127.0.0.1", port)}, SECRET)
    assert isinstance(found[0], socket.socket)
    assert found[7] == f"127.0.0.1:{port} on host gone: connection refused"
    close_all(list(found.values()))
    assert connect_all({}, SECRET) == {}


def test_a_link_that_ends_in_the_middle_is_an_error_of_the_link() -> None:
    near, far = socket.socketpair()
    threading.Thread(target=far.close).start()
    with near:
        link = measure(near, "a", "b", 0.01)
    assert link.error and link.error.startswith("it connects, but then ")


def ranks() -> list[Facts]:
    return [
        Facts(rank=0, host="a", address="10.0.0.1", port=1000),
        Facts(rank=1, host="a", address="10.0.0.1", local_rank=1),
        Facts(rank=2, host="b", address="10.0.0.2", port=2000),
        Facts(rank=3, host="c", address="10.0.0.3", port=3000),
    ]


def test_one_rank_is_chosen_for_each_host() -> None:
    plan = make_plan(ranks(), "/runs", SECRET, quick=False)
    assert plan.ranks == [0, 1, 2, 3]
    assert plan.first_ranks == [0, 2, 3]
    assert plan.places[1] == HostAddress("b", "10.0.0.2", 2000)
    assert decode(json.loads(json.dumps(asdict(plan))), LinkPlan, "rank 0") == plan


def test_connections_that_fail_one_way_or_both_are_dead_links() -> None:
    plan = make_plan(ranks(), "/runs", SECRET, quick=False)
    answers = [
        HostTests(links=(Link("a", "b", 5.0, 6.0, 1.0), Link("a", "c", 5.0, 6.0, 1.0))),
        HostTests(unreachable={2: "c: no answer"}),
        HostTests(unreachable={0: "a: no answer", 1: "b: no answer"}),
    ]
    links = {(link.first, link.second): link for link in gather_links(plan, answers)}
    assert links["a", "b"].error is None
    assert links["a", "c"].error == "host c finds no connection to a: no answer (in the other direction there is one)"
    assert links["b", "c"].error == "host b finds no connection to c: no answer"
    assert len(gather_links(plan, [answers[0], None, None])) == 2


def test_addresses_that_no_host_reaches_are_faults() -> None:
    facts = [
        *ranks(),
        Facts(rank=4, host="d", address="", interface="eth7"),
        Facts(rank=5, host="e", address="127.0.1.1"),
    ]
    first, second = (each.line() for each in check_addresses(facts))
    assert first.startswith("fault: rank 4 on host d: the interface eth7 has no address there.")
    assert second.startswith("fault: rank 5 on host e would be at 127.0.1.1")
    assert check_addresses([Facts(host="a", address="127.0.0.1")]) == []


def test_hosts_of_one_name_are_distinguished_by_their_addresses() -> None:
    facts = [
        Facts(host="node", address="10.0.0.1"),
        Facts(rank=1, host="node", address="10.0.0.2"),
        Facts(rank=2, host="b"),
    ]
    assert [each.host for each in name_hosts_apart(facts)] == ["node (10.0.0.1)", "node (10.0.0.2)", "b"]


def test_test_files_are_visible_to_hosts_that_share_the_folder(tmp_path: Path) -> None:
    assert write_test_file(tmp_path, SECRET, 0) is None
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600], "it holds a secret"
    assert write_test_file(tmp_path, SECRET, 2) is None
    assert find_test_files(tmp_path, SECRET, [0, 2], seconds=0) == [0, 2]
    assert find_test_files(tmp_path, SECRET, [0, 1, 2], seconds=0) == [0, 2]
    for number in (0, 1, 2):
        remove_test_file(tmp_path, SECRET, number)
    assert list(tmp_path.iterdir()) == []
    assert write_test_file(tmp_path / "nothing", SECRET, 0) == "it does not exist"
    assert find_test_files(tmp_path / "nothing", SECRET, [0], seconds=0) == []
    assert nearest_folder(tmp_path / "a" / "b") == tmp_path


def test_hosts_without_the_shared_folder_are_named() -> None:
    hosts = ["a", "b", "c", "d"]
    assert judge_folder("/runs", hosts, {}, {0: [0, 1, 2, 3], 1: [0], 2: [0], 3: [0]}) == []
    (apart,) = judge_folder("/runs", hosts, {}, {0: [0, 1], 1: [0], 2: [], 3: []})
    assert apart.line().startswith("fault: hosts c, d and host a do not share /runs: files of one are not visible")
    absent, apart = judge_folder("/runs", hosts, {2: "it does not exist"}, {0: [0, 1], 1: [0], 2: [], 3: [0]})
    assert absent.line().startswith("fault: host c cannot use the run's folder /runs: it does not exist.")
    assert apart.line().startswith("fault: host d and host a do not share /runs")
