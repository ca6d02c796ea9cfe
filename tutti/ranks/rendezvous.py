"""Rendezvous without a given port: at a port derived from the job, rank 0 answers with the port of its store.

The port may be in use, by another program or by another job. Therefore several ports are derived from the job: rank 0
listens at the first free one, and the other ranks try them in turn with a key that belongs to this job.
"""

import contextlib
import random
import socket
import threading
import time
import zlib

from tutti.errors import DeadlineError, LaunchError

_FIRST_PORT, _PORTS = 15_000, 16_000  # below those that the system hands out
_TRIES = 8
_ANSWER_SECONDS = 2.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # seconds; thousands of ranks may wait for the first
_PREFIX = b"tutti "


def rendezvous_ports(key: str) -> list[int]:
    """Return the ports derived from a key, in the order in which they are tried."""
    ports = (_FIRST_PORT + zlib.crc32(f"{key} {number}".encode()) % _PORTS for number in range(_TRIES))
    return list(dict.fromkeys(ports))


def serve_store_port(key: str, store_port: int, callers: int, seconds: float) -> int:
    """Answer requests that carry the key, in a thread, until `callers` ranks have asked; returns the port used."""
    ports = rendezvous_ports(key)
    for port in ports:
        with contextlib.suppress(OSError):
            server = listen(port)
            server.settimeout(seconds)
            arguments = (server, key.encode(), b"%d" % store_port, callers)
            threading.Thread(target=_answer, args=arguments, name="rendezvous", daemon=True).start()
            return port
    raise LaunchError(
        f"rank 0 on host {socket.gethostname()} cannot listen: ports {', '.join(map(str, ports))} are all in use. "
        "Set MASTER_PORT to a free one, on all ranks."
    )


def find_store_port(key: str, address: str, rank: int, seconds: float) -> int:
    """Ask rank 0 at an address for the port of the store."""
    deadline = time.monotonic() + seconds
    answers: dict[int, str] = {}
    pause = _SHORTEST_PAUSE
    while True:
        for port in rendezvous_ports(key):
            found = _ask(address, port, key.encode(), rank)
            if isinstance(found, int):
                return found
            answers[port] = found
            if time.monotonic() > deadline:
                raise DeadlineError(_no_answer(address, rank, answers, seconds))
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(pause * 1.5, _LONGEST_PAUSE)


def _no_answer(address: str, rank: int, answers: dict[int, str], seconds: float) -> str:
    ports = {answer: [port for port, same in answers.items() if same == answer] for answer in answers.values()}
    told = ", ".join(f"{address}:{'|'.join(map(str, found))} ({answer})" for answer, found in ports.items())
    return (
        f"rank {rank} on host {socket.gethostname()} could not reach rank 0 within {seconds:g} s at {told}. "
        f"Check that rank 0 runs on host {address} and that the network between the hosts is open, "
        "or set MASTER_ADDR and MASTER_PORT."
    )


def listen(port: int) -> socket.socket:
    """Listen on IPv4, and on IPv6 where the host has it; port 0 takes a free one."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=4096)


def _answer(server: socket.socket, key: bytes, answer: bytes, callers: int) -> None:
    seen: set[bytes] = set()
    with server:
        while len(seen) < callers:
            try:
                caller, _ = server.accept()
            except OSError:  # the deadline has passed
                return
            with caller, contextlib.suppress(OSError):
                caller.settimeout(_ANSWER_SECONDS)
                words = caller.recv(256).removeprefix(_PREFIX).split()
                if len(words) == 2 and words[0] == key:
                    caller.sendall(_PREFIX + answer)
                    seen.add(words[1])


def _ask(address: str, port: int, key: bytes, rank: int) -> int | str:
    """Return the port of the store, or a description of the failure."""
    try:
        with socket.create_connection((address, port), timeout=_ANSWER_SECONDS) as caller:
            caller.sendall(_PREFIX + key + b" %d" % rank)
            answer = caller.recv(256)
    except socket.gaierror as error:
        return f"no such host: {error.strerror}"
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    if answer.startswith(_PREFIX):
        return int(answer.removeprefix(_PREFIX))
    return "another program answers" if answer else "another program listens"
