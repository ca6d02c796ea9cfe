"""How ranks find the store of their job: beside other jobs, other programs, and hosts that do not answer."""

import contextlib
import re
import socket
import uuid
from collections.abc import Iterator

import pytest

from tutti.errors import DeadlineError, LaunchError
from tutti.ranks.interfaces import interface_towards, interfaces
from tutti.ranks.messages import NotOfThisJob, connect
from tutti.ranks.rendezvous import find_store_port, job_secret, rendezvous_ports, serve_store_port
from tutti.ranks.secret import make_secret

HERE = "127.0.0.1"


@pytest.fixture
def key() -> str:
    """The key of a job whose ports no other program of this machine has."""
    while not all(map(is_free, rendezvous_ports(job_secret(key := uuid.uuid4().hex)))):
        pass
    return key


def is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def taken(*ports: int) -> Iterator[list[socket.socket]]:
    """Strangers that listen and never answer."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_server(("", port))) for port in ports]


def test_a_key_stands_for_the_same_ports_everywhere_and_below_those_of_the_system(key: str) -> None:
    ports = rendezvous_ports(job_secret(key))
    assert ports == rendezvous_ports(job_secret(key)) != rendezvous_ports(job_secret(key + "x"))
    assert len(ports) == len(set(ports)) > 4
    assert all(15_000 <= port < 31_000 for port in ports)


def test_who_knows_the_key_is_told_where_the_store_is(key: str) -> None:
    assert serve_store_port(key, 4711, callers=2, seconds=30) == rendezvous_ports(job_secret(key))[0]
    assert [find_store_port(key, HERE, rank, 10) for rank in (1, 2)] == [4711, 4711]


def test_the_server_closes_when_every_rank_has_asked_once(key: str) -> None:
    serve_store_port(key, 4711, callers=2, seconds=30)
    for rank in (1, 1, 1, 2):
        assert find_store_port(key, HERE, rank, 10) == 4711
    with pytest.raises(DeadlineError, match="connection refused"):
        find_store_port(key, HERE, 1, 0.5)


def test_a_port_that_a_stranger_has_is_passed_over_by_all_ranks(key: str) -> None:
    ports = rendezvous_ports(job_secret(key))
    with taken(ports[0]):
        assert serve_store_port(key, 4711, callers=1, seconds=30) == ports[1]
        assert find_store_port(key, HERE, 1, 10) == 4711


def test_the_server_of_another_job_does_not_tell_its_store(key: str) -> None:
    ports = rendezvous_ports(job_secret(key))
    with taken(*ports[1:]):
        serve_store_port(key, 4711, callers=1, seconds=30)
        with pytest.raises(NotOfThisJob):
            connect(HERE, ports[0], make_secret(), timeout_seconds=1)
        assert find_store_port(key, HERE, 1, 10) == 4711


def test_when_all_ports_are_taken_they_are_named_with_a_way_out(key: str) -> None:
    ports = rendezvous_ports(job_secret(key))
    with taken(*ports), pytest.raises(LaunchError) as caught:
        serve_store_port(key, 4711, callers=1, seconds=30)
    assert f"cannot listen: ports {', '.join(map(str, ports))} are all in use. Set MASTER_PORT" in str(caught.value)


def test_a_rank_that_finds_no_server_names_host_ports_and_what_it_met(key: str) -> None:
    first, *others = rendezvous_ports(job_secret(key))
    with taken(first), pytest.raises(DeadlineError) as caught:
        find_store_port(key, HERE, 3, 2.5)
    message = str(caught.value)
    assert message.startswith(f"rank 3 on host {socket.gethostname()} could not reach rank 0 within 2.5 s at ")
    found = re.findall(rf"{HERE}:([\d|]+) \(([^)]+)\)", message)
    told = {int(port): answer for ports, answer in found for port in ports.split("|")}
    assert set(told) == {first, *others} and told[first] == "no answer"
    refused = [port for port in others if told[port] == "connection refused"]
    assert f"{HERE}:{'|'.join(map(str, refused))} (connection refused)" in message
    assert len(refused) >= len(others) - 1, "a program that starts meanwhile may take one"
    assert f"Check that rank 0 runs on host {HERE}" in message and "set MASTER_ADDR and MASTER_PORT" in message


def test_the_way_to_this_host_leads_through_the_loopback() -> None:
    assert interface_towards(HERE) == "lo"
    assert HERE in interfaces()["lo"]
