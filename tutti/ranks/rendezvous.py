"""Rendezvous: a rank finds the process of its job that it looks for, and neither believes a stranger.

Where no port is given, several are derived from the secret of the job, of which others cannot know: rank 0 listens at
the first that is free, and the other ranks try them in turn. Both sides prove that they hold the secret.
"""

import contextlib
import random
import socket
import threading
import time
import zlib
from collections.abc import Sequence
from typing import Any

from tutti.errors import DeadlineError, LaunchError
from tutti.ranks.hub import allow_seconds
from tutti.ranks.messages import Connection, Event, MessageServer, Peer, connect, listen
from tutti.ranks.secret import NotOfThisJob, Secret, find_secret

_FIRST_PORT, _PORTS = 15_000, 16_000  # below those that the system hands out
_TRIES = 8
_ANSWER_SECONDS, _LONGEST_ANSWER_SECONDS = 2.0, 20.0  # to prove that it holds the secret
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # seconds; thousands of ranks may wait for the first


def derive_ports(text: str) -> list[int]:
    """Return the ports derived from a text, in the order in which they are tried."""
    ports = (_FIRST_PORT + zlib.crc32(f"{text} {number}".encode()) % _PORTS for number in range(_TRIES))
    return list(dict.fromkeys(ports))


def rendezvous_ports(secret: Secret) -> list[int]:
    """Return the ports at which the processes that hold a secret find each other."""
    return derive_ports(secret.key("rendezvous").hex())


def job_secret(key: str) -> Secret:
    """Return the secret of one of the user's jobs, given what all of its processes know of it."""
    return find_secret().derive(f"job {key}")


def listen_for_ranks(secret: Secret, address: str = "") -> socket.socket:
    """Listen at the first free port that is derived from the secret."""
    ports = rendezvous_ports(secret)
    for port in ports:
        with contextlib.suppress(OSError):
            return listen(port, address)
    raise LaunchError(
        f"rank 0 on host {socket.gethostname()} cannot listen: ports {', '.join(map(str, ports))} are all in use. "
        "Set MASTER_PORT to a free one, on all ranks."
    )


def reach(
    secret: Secret, address: str, ports: Sequence[int], seconds: float, rank: int, world_size: int, **joins: Any
) -> tuple[Connection, dict[str, Any]]:
    """Connect to the process of this job at one of the ports, and join it; return its answer, too."""
    deadline = time.monotonic() + seconds
    joins |= {"rank": rank, "world_size": world_size}
    answers: dict[int, str] = {}
    pause, patience = _SHORTEST_PAUSE, allow_seconds(_ANSWER_SECONDS, world_size)
    while True:
        for port in ports:
            found = _try(secret, address, port, patience, deadline, joins)
            if not isinstance(found, str):
                return found
            answers[port] = found
            if time.monotonic() > deadline:
                raise DeadlineError(_describe_failure(address, rank, answers, seconds))
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause, patience = min(pause * 1.5, _LONGEST_PAUSE), min(patience * 1.5, _LONGEST_ANSWER_SECONDS)


def _try(
    secret: Secret, address: str, port: int, patience: float, deadline: float, joins: dict[str, Any]
) -> tuple[Connection, dict[str, Any]] | str:
    """Return a connection and the answer to joining, or why there is none."""
    try:
        connection = connect(address, port, secret, max(min(patience, deadline - time.monotonic()), 0.1))
    except socket.gaierror as error:
        return f"no such host: {error.strerror}"
    except NotOfThisJob:
        return "another program answers"
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    connection.send("join", **joins)
    answer = connection.receive(max(deadline - time.monotonic(), 0.1))  # from a process of this job: it will come
    if answer is not None and answer["kind"] == "welcome":
        return connection, answer
    connection.close()
    return f"refused: {answer.get('why')}" if answer else "no answer"


def _describe_failure(address: str, rank: int, answers: dict[int, str], seconds: float) -> str:
    ports = {answer: [port for port, same in answers.items() if same == answer] for answer in answers.values()}
    told = ", ".join(f"{address}:{'|'.join(map(str, found))} ({answer})" for answer, found in ports.items())
    return (
        f"rank {rank} on host {socket.gethostname()} could not reach rank 0 within {seconds:g} s at {told}. "
        f"Check that rank 0 runs on host {address}, that the network between the hosts is open and that all ranks "
        "have the same secret, or set MASTER_ADDR and MASTER_PORT."
    )


class PortServer(MessageServer):
    """Tells the processes of a job the port that they look for, and closes once all have been told."""

    def __init__(self, secret: Secret, port: int, callers: int) -> None:
        super().__init__(secret)
        self._port = port
        self._left = set(range(1, callers + 1))

    def admit(self, arrival: int, message: dict[str, Any], peer: Peer) -> Event | None:
        match message:
            case {"kind": "join", "rank": int(rank)}:
                self.reply(peer, "welcome", port=self._port)
                self._left.discard(rank)
                if not self._left:
                    threading.Thread(target=self.close, daemon=True).start()
        return None


def serve_store_port(key: str, port: int, callers: int, seconds: float) -> int:
    """Tell processes 1 to `callers` of a job a port, in a thread, for this time at most; return the port used."""
    secret = job_secret(key)
    server = PortServer(secret, port, callers)
    used = server.start(listen_for_ranks(secret))
    timer = threading.Timer(seconds, server.close)
    timer.daemon = True
    timer.start()
    return used


def find_store_port(key: str, address: str, rank: int, seconds: float) -> int:
    """Ask the first process of a job at an address for the port that it serves."""
    secret = job_secret(key)
    connection, answer = reach(secret, address, rendezvous_ports(secret), seconds, rank, rank + 1)
    connection.close()
    return int(answer["port"])
