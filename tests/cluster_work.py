"""What ranks on the test cluster run; each prints one line of JSON."""

import json
import os
import socket
import sys
from dataclasses import asdict, replace
from pathlib import Path

from intruder import Intruder

from tutti.ranks.environments import discover, slurm
from tutti.ranks.placement import Placement
from tutti.ranks.rendezvous import rendezvous_ports
from tutti.ranks.store import start_secret


def tell(**found: object) -> None:
    """Print one line in one piece: ranks share the output of their job."""
    os.write(1, (json.dumps(found) + "\n").encode())


def who() -> None:
    """Who this rank is and where it runs."""
    tell(host=socket.gethostname(), **asdict(discover(os.environ)))


def together() -> None:
    """Join, add up the ranks, and tell over which interface."""
    tell(**_join(discover(os.environ), float(sys.argv[2])))


def mistakes() -> None:
    """Join with one thing wrong after the other; what each leads to."""
    placement = discover(os.environ)
    assert placement.key
    is_second = placement.rank == 1
    taken = socket.create_server(("", 0)) if placement.rank == 0 else None
    wrongs: list[tuple[str, dict[str, str], Placement]] = [
        ("nothing", {}, placement),
        ("no such interface", {"GLOO_SOCKET_IFNAME": "nosuch"} if is_second else {}, placement),
        ("loopback", {"GLOO_SOCKET_IFNAME": "lo"}, placement),
        ("same address everywhere", {"GLOO_SOCKET_IFNAME": "docker0"}, placement),
        ("no such host", {}, replace(placement, address="10.80.0.99") if is_second else placement),
        ("port in use", {}, replace(placement, port=taken.getsockname()[1] if taken else 1, key=None)),
    ]
    for number, (wrong, variables, place) in enumerate(wrongs):
        key = place.key and f"{place.key}{number}"
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        os.environ.update(variables)
        tell(wrong=wrong, **_join(replace(place, key=key), 4 if number > 3 else 30))
    if taken:
        taken.close()


def stranger() -> None:
    """Sit on the first two ports of this job's first step, once in silence and once with answers, until killed."""
    placement = slurm.read(os.environ | {"SLURM_STEP_ID": "0", "SLURM_LOCALID": "0"})
    assert placement.key and placement.world_size > 1
    servers = [socket.create_server(("", port)) for port in rendezvous_ports(start_secret(placement))[:2]]
    Path(sys.argv[2]).touch()
    Intruder(Path("intruder")).answer_first(servers[1])


def _join(placement: Placement, seconds: float) -> dict[str, object]:
    import torch

    from tutti.config.schema import RuntimeConfig
    from tutti.errors import TuttiError
    from tutti.ranks.group import join

    found: dict[str, object] = {"host": socket.gethostname(), "rank": placement.rank, "port": placement.port}
    try:
        group = join(placement, RuntimeConfig(start_timeout_seconds=seconds))
    except TuttiError as error:
        return found | {"error": type(error).__name__, "message": str(error), "agreed": error.agreed}
    total = group.sum(torch.tensor(float(placement.rank))).item()
    group.leave()
    return found | {"sum": total, "interface": os.environ.get("GLOO_SOCKET_IFNAME")}


if __name__ == "__main__":
    globals()[sys.argv[1]]()
