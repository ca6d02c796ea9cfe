"""The hosts of a job: how they are written, which of them is this machine, and which ranks they get."""

import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tutti.errors import LaunchError

_HOST = re.compile(r"(?P<name>[\w.-]+)(?::(?P<slots>\d{1,9}))?")
_LINE = re.compile(
    r"(?P<name>[\w.-]+)(?:\s+slots\s*=\s*(?P<slots>\d{1,9})|:(?P<colon>\d{1,9}))?(?:\s+max[-_]slots\s*=\s*\d+)?"
)


@dataclass(frozen=True)
class Host:
    """A machine, and how many ranks it takes."""

    name: str
    slots: int


@dataclass(frozen=True)
class Slot:
    """The place of one rank among the hosts."""

    host: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int  # the place of its host among those that have a rank of this local rank
    cross_size: int
    node_rank: int


def parse_hosts(text: str) -> list[Host]:
    """The hosts of `-H`: h1:2,h2:4."""
    found = []
    for item in text.split(","):
        match = _HOST.fullmatch(item.strip())
        if not match:
            raise LaunchError(f"-H {text}: {item!r} is no host. Expected host:slots with commas, such as h1:2,h2:2.")
        found.append(Host(match["name"], int(match["slots"] or 1)))
    return _merged(found, f"-H {text}")


def read_hostfile(path: str) -> list[Host]:
    """The hosts of a file with a line `host slots=N` for each."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            f"--hostfile {path} cannot be read: {getattr(error, 'strerror', None) or error}. "
            "Give a file with a line such as 'h1 slots=2' for each host."
        ) from error
    found = []
    for number, line in enumerate(lines, start=1):
        content = line.partition("#")[0].strip()
        match = _LINE.fullmatch(content)
        if content and not match:
            raise LaunchError(f"--hostfile {path}, line {number}: {line!r}. Expected a line such as 'h1 slots=2'.")
        if match:
            found.append(Host(match["name"], int(match["slots"] or match["colon"] or 1)))
    return _merged(found, f"--hostfile {path}")


def assign_slots(hosts: Iterable[Host], count: int) -> list[Slot]:
    """One slot a rank: hosts are filled in their order."""
    hosts = list(hosts)
    total = sum(host.slots for host in hosts)
    if count > total:
        raise LaunchError(
            f"-np {count}, but {', '.join(f'{host.name}:{host.slots}' for host in hosts)} has {total} slots. "
            f"Ask for {total} processes at most, or name more slots with -H or --hostfile."
        )
    sizes: list[tuple[str, int]] = []
    left = count
    for host in hosts:
        taken = min(host.slots, left)
        left -= taken
        if taken:
            sizes.append((host.name, taken))
    slots = []
    for node_rank, (name, local_size) in enumerate(sizes):
        for local_rank in range(local_size):
            cross = [node for node, (_, size) in enumerate(sizes) if size > local_rank]
            place, across = cross.index(node_rank), len(cross)
            slots.append(Slot(name, len(slots), count, local_rank, local_size, place, across, node_rank))
    return slots


@cache
def is_local(host: str) -> bool:
    """Whether a host is this machine; other loopback addresses than 127.0.0.1 are taken for other hosts."""
    own = socket.gethostname()
    if host in ("localhost", "127.0.0.1", own, own.partition(".")[0], socket.getfqdn()):
        return True
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return False  # a name that ssh's configuration alone may know
    if address.startswith("127."):
        return address == "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def own_address(interface: str | None, towards: str | None) -> str:
    """An address of this machine: of a network interface, else the one that another host sees."""
    if interface is not None:
        return _interface_address(interface)
    if towards is not None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((towards, 9))  # sends nothing: it asks for the way
                return probe.getsockname()[0]
            except OSError:
                return socket.gethostname()
    return "127.0.0.1"


def _interface_address(interface: str) -> str:
    import fcntl
    import struct

    known = [name for _, name in socket.if_nameindex()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", interface.encode()[:15])
            answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
        except OSError as error:
            raise LaunchError(
                f"--network-interfaces {interface}: {error.strerror or error}. Expected one with an address, of "
                f"{', '.join(known)}."
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _merged(hosts: list[Host], given: str) -> list[Host]:
    slots: dict[str, int] = {}
    for host in hosts:
        if host.slots < 1:
            raise LaunchError(f"{given}: {host.name} has {host.slots} slots. Expected 1 or more.")
        slots[host.name] = slots.get(host.name, 0) + host.slots
    if not slots:
        raise LaunchError(f"{given}: it names no host. Expected at least one.")
    return [Host(name, count) for name, count in slots.items()]
