"""The network interface over which ranks on several hosts connect: chosen, tested, and named in errors."""

import fcntl
import os
import platform
import socket
import struct
from contextlib import ExitStack, suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any

from tutti.errors import LaunchError
from tutti.ranks.hub_client import HubClient
from tutti.ranks.placement import Placement

_VARIABLE = "GLOO_SOCKET_IFNAME"
_CONNECT_SECONDS = 10.0
_WHAT = "the choice of the interface"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_LOOPBACK = "lo"


def choose_interface(placement: Placement, hub: HubClient, seconds: float) -> None:
    """Select an interface for Gloo that other hosts can reach; all ranks call this, and all raise the error of one."""
    if placement.world_size == 1:
        return
    fitting, several_hosts = _fitting_interface(placement, hub, seconds)
    chosen = os.environ.get(_VARIABLE) or fitting
    problem = _problem(chosen, several_hosts)
    with ExitStack() as until_all_have_tried:
        if several_hosts:
            where = None if problem else _listen(chosen, until_all_have_tried)
            [other] = hub.meet(_WHAT, seconds, where, "next")
            problem = problem or (_cannot_reach((placement.rank + 1) % placement.world_size, other) if other else None)
        told = f"rank {placement.rank} on host {platform.node()}: {problem}" if problem else None
        count, *problems = hub.meet(_WHAT, seconds, told, "some")
    if count:
        more = f" (And {count - 1} more of {placement.world_size} ranks.)" if count > 1 else ""
        error = LaunchError(problems[0][1] + more)
        error.agreed = True
        raise error
    if chosen:
        os.environ[_VARIABLE] = chosen


def interface_towards(address: str) -> str | None:
    """Return the interface on the route to a host, if its address identifies one."""
    source = _source(address)
    return next((name for name, addresses in interfaces().items() if source in addresses), None)


def interfaces() -> dict[str, list[str]]:
    """Return the interfaces of this host with their addresses."""
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # this one has no address
                answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()))
                found[name] = [socket.inet_ntoa(answer[20:24])]
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            if not (address := IPv6Address(bytes.fromhex(digits))).is_link_local:
                found.setdefault(name, []).append(str(address))
    return found


def _fitting_interface(placement: Placement, hub: HubClient, seconds: float) -> tuple[str | None, bool]:
    """Return the interface towards the host of rank 0 (there: towards another), and whether there are several."""
    if placement.world_size == placement.local_size:
        return (_LOOPBACK if _LOOPBACK in interfaces() else None), False
    assert placement.address
    source = source_towards(placement.address)
    [elsewhere] = hub.meet(_WHAT, seconds, source, "any")
    if source is not None:
        return interface_towards(placement.address), True
    if elsewhere is not None:
        return interface_towards(elsewhere), True
    return _LOOPBACK, False  # several names of one host


def source_towards(host: str) -> str | None:
    """Return the source address of packets to a host; None if that host is this one."""
    source = _source(host)
    own = [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)]
    return None if source in own or ip_address(source).is_loopback else source


def _source(host: str) -> str:
    """Connecting a datagram socket sends nothing, but selects the source address."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def _problem(chosen: str | None, several_hosts: bool) -> str | None:
    """Describe what is wrong with the given interfaces on this host."""
    there = interfaces()
    for name in (chosen or "").split(","):
        is_loopback = name in there and ip_address(there[name][0]).is_loopback
        if is_loopback and several_hosts:
            return f"{_VARIABLE}={chosen}, but other hosts cannot reach it. {_advice()}"
        if name and there and name not in there:  # some systems do not list their interfaces
            return f"{_VARIABLE}={chosen}, but there is no such interface with an address. {_advice()}"
    return None


def _advice() -> str:
    listed = ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in interfaces().items())
    return f"Set {_VARIABLE} to the interface that connects the hosts, or unset it; there are {listed}."


def _listen(chosen: str | None, stack: ExitStack) -> list[Any] | None:
    """Listen for the previous rank; returns host, interface, address and port, or None if the address is unknown."""
    interface = (chosen or "").split(",")[0]
    if not (addresses := interfaces().get(interface)):
        return None
    family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
    listener = stack.enter_context(socket.create_server((addresses[0], 0), family=family))
    address, port = listener.getsockname()[:2]
    return [platform.node(), interface, address, port]


def _cannot_reach(rank: int, where: list[Any]) -> str | None:
    """Connect to the next rank and describe a failure; over all ranks this tests each pair of neighbouring hosts."""
    host, interface, address, port = where
    try:
        socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        return f"cannot reach rank {rank} on host {host} at {address}:{port}, its {interface}: {reason}. {_advice()}"
    return None
