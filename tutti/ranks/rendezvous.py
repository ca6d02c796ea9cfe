"""Where ranks of a job find each other: a door at a port that all derive from the job, which tells where the store is.

The port may be taken, by a stranger or by the door of another job. So the job stands for several ports: rank 0 opens
its door at the first that is free, and the others knock at one after the other, with a key that only this door knows.
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
_GREETING = b"tutti "


def door_ports(key: str) -> list[int]:
    """The ports that a key stands for, in the order in which they are tried."""
    ports = (_FIRST_PORT + zlib.crc32(f"{key} {number}".encode()) % _PORTS for number in range(_TRIES))
    return list(dict.fromkeys(ports))


def open_door(key: str, store_port: int, callers: int, seconds: float) -> int:
    """Tell who knows the key where the store is, in a thread, until as many ranks have asked; the port of the door."""
    ports = door_ports(key)
    for port in ports:
        with contextlib.suppress(OSError):
            door = _listen(port)
            door.settimeout(seconds)
            arguments = (door, key.encode(), b"%d" % store_port, callers)
            threading.Thread(target=_answer, args=arguments, name="door", daemon=True).start()
            return port
    raise LaunchError(
        f"rank 0 on host {socket.gethostname()} cannot listen: ports {', '.join(map(str, ports))} are all in use. "
        "Set MASTER_PORT to a free one, on all ranks."
    )


def find_store(key: str, address: str, rank: int, seconds: float) -> int:
    """The port of the store, as the door at an address tells it to who knows the key."""
    deadline = time.monotonic() + seconds
    answers: dict[int, str] = {}
    pause = _SHORTEST_PAUSE
    while True:
        for port in door_ports(key):
            found = _knock(address, port, key.encode(), rank)
            if isinstance(found, int):
                return found
            answers[port] = found
            if time.monotonic() > deadline:
                raise DeadlineError(_nobody(address, rank, answers, seconds))
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(pause * 1.5, _LONGEST_PAUSE)


def _nobody(address: str, rank: int, answers: dict[int, str], seconds: float) -> str:
    ports = {answer: [port for port, same in answers.items() if same == answer] for answer in answers.values()}
    told = ", ".join(f"{address}:{'|'.join(map(str, found))} ({answer})" for answer, found in ports.items())
    return (
        f"rank {rank} on host {socket.gethostname()} could not reach rank 0 within {seconds:g} s at {told}. "
        f"Check that rank 0 runs on host {address} and that the network between the hosts is open, "
        "or set MASTER_ADDR and MASTER_PORT."
    )


def _listen(port: int) -> socket.socket:
    """A door for IPv4 and IPv6 where there is IPv6."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=4096)


def _answer(door: socket.socket, key: bytes, answer: bytes, callers: int) -> None:
    seen: set[bytes] = set()
    with door:
        while len(seen) < callers:
            try:
                caller, _ = door.accept()
            except OSError:  # its time is over
                return
            with caller, contextlib.suppress(OSError):
                caller.settimeout(_ANSWER_SECONDS)
                words = caller.recv(256).removeprefix(_GREETING).split()
                if len(words) == 2 and words[0] == key:
                    caller.sendall(_GREETING + answer)
                    seen.add(words[1])


def _knock(address: str, port: int, key: bytes, rank: int) -> int | str:
    """The port of the store, or what came instead."""
    try:
        with socket.create_connection((address, port), timeout=_ANSWER_SECONDS) as caller:
            caller.sendall(_GREETING + key + b" %d" % rank)
            answer = caller.recv(256)
    except socket.gaierror as error:
        return f"no such host: {error.strerror}"
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    if answer.startswith(_GREETING):
        return int(answer.removeprefix(_GREETING))
    return "another program answers" if answer else "another program listens"
