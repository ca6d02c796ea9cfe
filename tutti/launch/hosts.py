"""The hosts of a job: how they are written, which ranks they get, how they are reached, and their addresses."""

import base64
import random
import re
import shlex
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from tutti.errors import LaunchError

LOOPBACK = "127.0.0.1"
_HOST = re.compile(r"(?P<name>\w[\w.-]*)(?::(?P<slots>\d{1,9}))?")
_LINE = re.compile(
    r"(?P<name>\w[\w.-]*)(?:\s+slots\s*=\s*(?P<slots>\d{1,9})|:(?P<colon>\d{1,9}))?(?:\s+max[-_]slots\s*=\s*\d+)?"
)
_SSH_SECONDS = 30

# Variables of the launcher's own host or terminal.
_BOUND_TO_HOST = re.compile(
    r"BASH_FUNC_.*|_|OLDPWD|PWD|SHLVL|HOME|HOSTNAME|HOST|USER|LOGNAME|SHELL|MAIL|DISPLAY|TERM|TMPDIR|SSH_.*|XDG_.*|DBUS_.*"
    r"|SLURMD_.*"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PORTS = range(15_000, 31_000)  # below the ephemeral ports of the kernel
_PROBE = f"""
import random, socket
for port in random.sample(range({_PORTS.start}, {_PORTS.stop}), 100):
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            continue
        print("free port", port)
        break
"""


@dataclass(frozen=True)
class Host:
    """A machine, and how many ranks it takes."""

    name: str
    slots: int


@dataclass(frozen=True)
class Slot:
    """One rank and its position among the hosts."""

    host: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int  # index of its host among the hosts that have this local rank
    cross_size: int
    node_rank: int


@dataclass(frozen=True)
class Candidate:
    """A process that is to get a rank."""

    number: int  # of the process
    host: str
    slot: int  # of its host
    generation: int = -1  # of ranks, in which it last took part
    rank: int = -1  # that it had there
    has_state: bool = False  # it holds the state that the training has reached


def parse_hosts(text: str) -> list[Host]:
    """Parse the hosts of `-H`: h1:2,h2:4."""
    found = []
    for item in text.split(","):
        match = _HOST.fullmatch(item.strip())
        if not match:
            raise LaunchError(f"-H {text}: {item!r} is no host. Expected host:slots with commas, such as h1:2,h2:2.")
        found.append(Host(match["name"], int(match["slots"] or 1)))
    return _merged(found, f"-H {text}")


def read_hostfile(path: str) -> list[Host]:
    """Read hosts from a file with a line `host slots=N` for each."""
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
    """Return one slot per rank; hosts are filled in the given order."""
    hosts = list(hosts)
    total = sum(host.slots for host in hosts)
    if count > total:
        raise LaunchError(
            f"-np {count}, but {', '.join(f'{host.name}:{host.slots}' for host in hosts)} has {total} slots. "
            f"Ask for {total} processes at most, or name more slots with -H or --hostfile."
        )
    filled = fill_hosts({host.name: host.slots for host in hosts}, count)
    places = [(name, slot) for name, taken in filled.items() for slot in range(taken)]
    ranked = assign_ranks([Candidate(number, name, slot) for number, (name, slot) in enumerate(places)])
    return [ranked[number] for number in range(count)]


Name = TypeVar("Name", int, str)


def fill_hosts(slots: Mapping[Name, int], count: int) -> dict[Name, int]:
    """Return how many of `count` ranks each host gets; hosts are filled in their order."""
    filled, left = {}, count
    for host, offered in slots.items():
        if taken := min(offered, left):
            filled[host] = taken
            left -= taken
    return filled


def assign_ranks(candidates: Sequence[Candidate]) -> dict[int, Slot]:
    """Assign ranks by number: first to those that hold the training state, then to other survivors, then to new ones.

    Survivors keep their order. The local rank is the slot where that is possible, so that a survivor keeps its GPU.
    """
    newest = max((candidate.generation for candidate in candidates), default=-1)

    def order(candidate: Candidate) -> tuple[bool, bool, int, int]:
        survives = candidate.generation == newest >= 0
        has_state = survives and candidate.has_state
        return not has_state, not survives, candidate.rank if survives else 0, candidate.number

    ranked = sorted(candidates, key=order)
    on_host: dict[str, list[Candidate]] = {}
    for candidate in ranked:
        on_host.setdefault(candidate.host, []).append(candidate)
    nodes = {host: node_rank for node_rank, host in enumerate(on_host)}
    local_ranks: dict[int, int] = {}
    for here in on_host.values():
        free = iter(set(range(len(here))) - {candidate.slot for candidate in here})
        for candidate in here:
            local_ranks[candidate.number] = candidate.slot if candidate.slot < len(here) else next(free)
    assigned = {}
    for rank, candidate in enumerate(ranked):
        local_rank, local_size = local_ranks[candidate.number], len(on_host[candidate.host])
        across = [host for host, here in on_host.items() if len(here) > local_rank]
        cross_rank, node_rank = across.index(candidate.host), nodes[candidate.host]
        slot = Slot(candidate.host, rank, len(ranked), local_rank, local_size, cross_rank, len(across), node_rank)
        assigned[candidate.number] = slot
    return assigned


@cache
def is_local(host: str) -> bool:
    """Return whether a host is this machine; loopback addresses other than 127.0.0.1 count as other hosts."""
    own = socket.gethostname()
    if host in ("localhost", LOOPBACK, own, own.partition(".")[0], socket.getfqdn()):
        return True
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return False  # a name that ssh's configuration alone may know
    if address.startswith("127."):
        return address == LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def own_address(interface: str | None, towards: str | None) -> str:
    """Return an address of this machine: of a network interface, else the one that another host sees."""
    if interface is not None:
        return interface_address(interface, "--network-interfaces ")
    if towards is not None:
        return _source_towards(towards) or socket.gethostname()
    return LOOPBACK


def listening_address(hosts: Iterable[str], interfaces: Sequence[str], others_may_come: bool) -> str:
    """Return the address at which a launcher listens for its ranks; "", all of them, where it cannot be known."""
    if interfaces:
        return interface_address(interfaces[0], "--network-interfaces ")
    if others_may_come:
        return ""
    sources = {_source_towards(host) for host in hosts if not is_local(host)} or {LOOPBACK}
    return (sources.pop() or "") if len(sources) == 1 else ""


def address_for(host: str, listening: str) -> str:
    """Return the address at which a host reaches a launcher on this one, which listens there or everywhere."""
    return listening or (LOOPBACK if is_local(host) else own_address(None, host))


def _source_towards(host: str) -> str | None:
    """Return the address of this machine that another host sees, if a route to it is known."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing; the kernel chooses the route
            return probe.getsockname()[0]
        except OSError:
            return None


def interface_address(interface: str, given_by: str) -> str:
    """Return the address of a network interface, which an option or variable names."""
    import fcntl
    import struct

    known = [name for _, name in socket.if_nameindex()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", interface.encode()[:15])
            answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
        except OSError as error:
            raise LaunchError(
                f"{given_by}{interface}: {error.strerror or error}. Expected one with an address, of "
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


@dataclass(frozen=True)
class Ssh:
    """The options of ssh to other hosts."""

    port: int | None = None
    identity_file: str | None = None

    def words(self, host: str) -> list[str]:
        """Return the words before a command that is to run on a host."""
        options = ["PasswordAuthentication=no", "BatchMode=yes", "LogLevel=ERROR"]
        options += ["StrictHostKeyChecking=accept-new"] if _asks_for_host_keys(host) else []
        options += [f"ConnectTimeout={_SSH_SECONDS}", "ServerAliveInterval=15", "ServerAliveCountMax=4"]
        words = ["ssh", *(word for option in options for word in ("-o", option))]
        if self.port is not None:
            words += ["-p", str(self.port)]
        if self.identity_file is not None:
            words += ["-i", self.identity_file]
        return [*words, host]

    def read(self, host: str, command: str, environment: Mapping[str, str]) -> str:
        """Run a short shell command on a host and return what it prints."""
        words = [*self.words(host), as_one_word(export_lines(environment, ("PATH",)) + command)]
        try:
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=2 * _SSH_SECONDS, check=False
            )
            problem = done.stderr.strip().replace("\n", " ") or f"exit code {done.returncode}"
            if done.returncode == 0:
                return done.stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
        raise LaunchError(
            f"host {host} cannot be used by ssh: {problem.rstrip('.')}. Expected a login without a password. "
            f"Try: {shlex.join([*self.words(host), 'true'])}"
        )


@cache
def _asks_for_host_keys(host: str) -> bool:
    """Return whether ssh would ask the user about the key of a new host, since the user's configuration does not say.

    Nobody can answer. Such keys are accepted once, and one that has changed is refused; every other setting stays.
    """
    try:
        asked = subprocess.run(
            ["ssh", "-G", host], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return True
    said = re.search(r"^stricthostkeychecking (\S+)", asked.stdout, re.MULTILINE)
    return said is None or said[1] == "ask"


def as_one_word(script: str) -> str:
    """Quote a script for /bin/sh so that every login shell accepts it, csh included."""
    code = base64.b64encode(script.encode(errors="surrogateescape")).decode()
    return f"/bin/sh -c 'eval \"$(echo {code} | base64 -d)\"'"


def export_lines(environment: Mapping[str, str], only: Iterable[str] | None = None) -> str:
    """Return shell lines that set the variables which are valid on another host."""
    names = environment if only is None else [name for name in only if name in environment]
    return "".join(f"export {name}={shlex.quote(environment[name])}\n" for name in names if is_portable(name))


def is_portable(name: str) -> bool:
    """Return whether a variable of this process is valid on another host."""
    return bool(_NAME.fullmatch(name)) and not _BOUND_TO_HOST.fullmatch(name)


def check_hosts(hosts: Sequence[str], ssh: Ssh, environment: Mapping[str, str]) -> None:
    """Refuse hosts that ssh does not reach, before anything starts."""
    others = [host for host in dict.fromkeys(hosts) if not is_local(host)]
    if others:
        with ThreadPoolExecutor(min(32, len(others))) as pool:
            list(pool.map(lambda host: ssh.read(host, "command -v setsid >/dev/null", environment), others))


def rendezvous_address(
    hosts: Sequence[str], ssh: Ssh, environment: Mapping[str, str], interfaces: Sequence[str], held: ExitStack
) -> tuple[str, int]:
    """Return the address and a free port of the first host, where rank 0 holds the store.

    A port of this host is reserved until `held` is closed. One of another host is not: it lies outside of the range
    that the kernel hands out, so that only a program that asks for this very port can be first, which rank 0 reports.
    """
    first, others = hosts[0], [host for host in hosts if not is_local(host)]
    if not is_local(first):
        printed = ssh.read(
            first, f"for each in python3 python; do $each -c '{_PROBE}' && exit; done; exit 1", environment
        )
        return first, int(printed.rpartition("free port")[2])
    interface = interfaces[0] if interfaces else None
    reserved = held.enter_context(reserve_port())
    return own_address(interface, others[0] if others else None), reserved.getsockname()[1]


def reserve_port() -> socket.socket:
    """Bind a port of this host: until the socket is closed, only a server that reuses addresses can listen there."""
    for port in random.sample(_PORTS, 100):
        reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            reserved.bind(("", port))
            return reserved
        except OSError:
            reserved.close()
    raise LaunchError(f"no free port of 100 tried between {_PORTS.start} and {_PORTS.stop}. End what holds them.")


# Variables in which another launcher describes this process; they are wrong for the ranks that it starts.
_OF_ANOTHER_LAUNCHER = re.compile(
    r"OMPI_COMM_WORLD_.*|PMI_.*|PMIX_.*|MPI_LOCAL.*|PALS_.*|TORCHELASTIC_.*|HOROVOD_(LOCAL_|CROSS_)?(RANK|SIZE)|TUTTI_RUN_FOLDER|TUTTI_FAILURE_NOTES"
)


def without_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of other launchers."""
    return {name: value for name, value in environment.items() if not _OF_ANOTHER_LAUNCHER.fullmatch(name)}
