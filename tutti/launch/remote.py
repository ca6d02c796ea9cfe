"""What a launcher asks other hosts before it starts ranks: whether they can be used, and where ranks may meet."""

import random
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from tutti.errors import LaunchError
from tutti.launch.hosts import is_local, own_address
from tutti.launch.workers import Ssh

_PORTS = range(15_000, 31_000)  # below those that the system hands out
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


def check_hosts(hosts: Sequence[str], ssh: Ssh, environment: Mapping[str, str]) -> None:
    """Refuse hosts that ssh does not reach, before anything starts."""
    others = [host for host in dict.fromkeys(hosts) if not is_local(host)]
    if others:
        with ThreadPoolExecutor(min(32, len(others))) as pool:
            list(pool.map(lambda host: ssh.ask(host, "command -v setsid >/dev/null", environment), others))


def meeting_point(
    hosts: Sequence[str], ssh: Ssh, environment: Mapping[str, str], interfaces: Sequence[str] = ()
) -> tuple[str, int]:
    """The address and a free port of the first host, where rank 0 holds the store."""
    first, others = hosts[0], [host for host in hosts if not is_local(host)]
    if not is_local(first):
        said = ssh.ask(first, f"for each in python3 python; do $each -c '{_PROBE}' && exit; done; exit 1", environment)
        return first, int(said.rpartition("free port")[2])
    interface = interfaces[0] if interfaces else None
    return own_address(interface, others[0] if others else None), free_port()


def free_port() -> int:
    """A port that nobody listens on here."""
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:
                continue
    raise LaunchError(f"no free port of 100 tried between {_PORTS.start} and {_PORTS.stop}. End what holds them.")
