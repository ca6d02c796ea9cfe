"""The address and interface at which the other hosts reach this one."""

import os
import socket
from ipaddress import ip_address

from tutti.doctor.exchange import Exchange
from tutti.runtime.interfaces import interface_towards, interfaces
from tutti.runtime.placement import Placement

_LOOPBACK = "lo"


def own_address(placement: Placement, exchange: Exchange, seconds: float) -> tuple[str, str]:
    """What GLOO_SOCKET_IFNAME says; else on the way to the first host, and there on the way to another.

    Every rank enters. An address that is not there is empty.
    """
    several = placement.world_size > placement.local_size
    own = _way_to(placement.address) if several else None
    exchange.tell_any("elsewhere", own, placement.world_size)
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if not name and several:
        other = placement.address if own else exchange.take("elsewhere", seconds)
        name = interface_towards(other) if other else None
    name = name or _LOOPBACK
    return next(iter(interfaces().get(name, [])), ""), name


def _way_to(host: str | None) -> str | None:
    """This host's address on the way to another; nothing where the other is this one."""
    if host is None:
        return None
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            source = probe.getsockname()[0]
    except OSError:
        return None
    here = source in [str(each[4][0]) for each in found] or ip_address(source).is_loopback
    return None if here else source
