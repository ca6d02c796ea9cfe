"""The address and interface at which the other hosts reach this one."""

import os
from contextlib import suppress

from tutti.doctor.exchange import Exchange
from tutti.runtime.interfaces import interface_towards, interfaces, source_towards
from tutti.runtime.placement import Placement

_LOOPBACK = "lo"


def own_address(placement: Placement, exchange: Exchange, seconds: float) -> tuple[str, str]:
    """What GLOO_SOCKET_IFNAME says; else on the way to the first host, and there on the way to another.

    Every rank enters. An address that is not there is empty.
    """
    several = placement.world_size > placement.local_size
    own = None
    if several and placement.address:
        with suppress(OSError):  # the name is not known here: the links will tell
            own = source_towards(placement.address)
    exchange.tell_any("elsewhere", own, placement.world_size)
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if not name and several:
        other = placement.address if own else exchange.take("elsewhere", seconds)
        name = interface_towards(other) if other else None
    name = name or _LOOPBACK
    return next(iter(interfaces().get(name, [])), ""), name
