"""Where the ranks of a job meet: the hub of rank 0, and the store by which torch connects them.

After the start nothing of ours is read from the store, which torch does not protect; during the start one value is, the
address of the hub, which is signed.
"""

import os
import platform
import socket
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address

import torch.distributed as dist

from tutti.errors import DeadlineError, LaunchError
from tutti.ranks.hub import HubServer
from tutti.ranks.hub_client import HubClient
from tutti.ranks.interfaces import source_towards
from tutti.ranks.messages import listen
from tutti.ranks.placement import Placement
from tutti.ranks.rendezvous import job_secret, listen_for_ranks, reach, rendezvous_ports
from tutti.ranks.secret import ForgedContent, Secret, make_secret

_LOOPBACK = "127.0.0.1"
_HUB = "hub"  # the key of its address, and the purpose of the signature
_LOOK_SECONDS = 5.0  # for one attempt to reach the hub whose address is in the store
_meetings: Counter[str] = Counter()  # of this process, by start: at the store of an agent, which outlives them


@dataclass(frozen=True)
class Meeting:
    """A rank's connection to the hub, and the store for torch."""

    hub: HubClient
    store: dist.Store


def meet(placement: Placement, seconds: float) -> Meeting:
    """Connect to rank 0 of the job, and to the store, which rank 0, the agent of torchrun or a driver holds."""
    if placement.world_size == 1:
        return Meeting(HubClient(0, 1).hold(), dist.HashStore())
    if placement.address is None or placement.port is None:
        raise LaunchError(f"{placement.launcher} does not say where rank 0 is. Set MASTER_ADDR and MASTER_PORT.")
    secret = start_secret(placement)
    if placement.key is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        hub, store = _meet_at_store(placement, secret, seconds)
    elif placement.rank == 0:
        hub, store = _hold(placement, secret, seconds)
    else:
        ports = [placement.port] if placement.key is None else rendezvous_ports(secret)
        hub, port = _connect(secret, _address(placement), ports, placement, seconds)
        store = _store(placement.rank, _address(placement), port, seconds)
    return Meeting(hub, dist.PrefixStore(secret.key("store").hex(), store))


def start_secret(placement: Placement) -> Secret:
    """Return the secret of one start of a job: messages of another job or an earlier start are not believed."""
    if placement.world_size == 1:
        return make_secret()
    job = placement.key or f"at port {placement.port} of {placement.world_size} ranks"
    return job_secret(job).derive(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}")


def _address(placement: Placement) -> str:
    """Return the address of rank 0: that of this host where all ranks are here."""
    assert placement.address
    return _LOOPBACK if placement.local_size == placement.world_size else placement.address


def _hold(placement: Placement, secret: Secret, seconds: float) -> tuple[HubClient, dist.Store]:
    """Open the hub at the given port or a derived one, and a store at any free one, which the hub announces."""
    if placement.key is not None:
        _check_that_rank_0_is_here(placement)
    address = _own_address(_address(placement))
    if placement.key is not None:
        listener = listen_for_ranks(secret, address)
    else:
        assert placement.port is not None
        try:
            listener = listen(placement.port, address)
        except OSError as error:
            raise LaunchError(
                f"rank 0 cannot listen on {placement.address}:{placement.port}: the port is in use. "
                "Set MASTER_PORT to a free one, on all ranks."
            ) from error
    held = listen(0, address)
    port = held.getsockname()[1]
    store = dist.TCPStore(
        address or _LOOPBACK,
        port,
        is_master=True,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=held.detach(),
    )
    return _serve(placement, secret, listener, port), store


def _serve(placement: Placement, secret: Secret, listener: socket.socket, store_port: int) -> HubClient:
    server = HubServer(secret, placement.world_size, store_port)
    hub = HubClient(0, placement.world_size).hold(server)
    server.start(listener)
    return hub


def _connect(
    secret: Secret, address: str, ports: list[int], placement: Placement, seconds: float
) -> tuple[HubClient, int]:
    """Return this rank's connection to the hub, and the port of the store."""
    numbers = placement.rank, placement.world_size
    connection, answer = reach(secret, address, ports, seconds, *numbers, host=platform.node())
    return HubClient(placement.rank, placement.world_size).read(connection), int(answer["store_port"])


def _meet_at_store(placement: Placement, secret: Secret, seconds: float) -> tuple[HubClient, dist.Store]:
    """Find the hub through a store that another process holds: rank 0 writes its address there, signed."""
    assert placement.address and placement.port
    store = _store(placement.rank, placement.address, placement.port, seconds)
    begun = secret.key("hub").hex()
    _meetings[begun] += 1  # a script may open several runs, and the store has the addresses of those before
    key = f"{begun}/{_HUB} {_meetings[begun]}"
    of_meeting = dist.PrefixStore(f"meeting {_meetings[begun]}", store)
    if placement.rank == 0:
        one_host = placement.local_size == placement.world_size
        address = _LOOPBACK if one_host else source_towards(placement.address) or placement.address
        listener = listen(0, address if one_host else "")
        signed = secret.sign(f"{address} {listener.getsockname()[1]}".encode(), _HUB)
        store.set(key, signed)  # pyright: ignore[reportArgumentType]
        return _serve(placement, secret, listener, 0), of_meeting
    deadline = time.monotonic() + seconds
    while True:  # the agent may have started new processes, and the address is still that of the ones before
        left = max(deadline - time.monotonic(), 0.1)
        address, port = _read_address(store, key, secret, placement, left)
        try:
            return _connect(secret, address, [port], placement, min(left, _LOOK_SECONDS))[0], of_meeting
        except DeadlineError:
            if time.monotonic() > deadline:
                raise


def _read_address(store: dist.Store, key: str, secret: Secret, placement: Placement, seconds: float) -> tuple[str, int]:
    try:
        store.wait([key], timedelta(seconds=seconds))
        address, port = secret.verify(store.get(key), _HUB).decode().split()
        return address, int(port)
    except ForgedContent as error:
        raise LaunchError(
            f"a stranger writes into the store of this job at {placement.address}:{placement.port}: {error}. "
            "Start the job again, on an interface that only its hosts can reach."
        ) from error
    except dist.DistError as error:
        raise DeadlineError(
            f"rank {placement.rank} on host {platform.node()} waited {seconds:.0f} s at the start of the run: missing "
            "rank 0, which has not announced its address. Look at the log of rank 0."
        ) from error


def _store(rank: int, address: str, port: int, seconds: float) -> dist.TCPStore:
    timeout = timedelta(seconds=seconds)
    try:
        return dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except dist.DistError as error:
        raise DeadlineError(
            f"rank {rank} on host {platform.node()} could not reach the store at {address}:{port} within "
            f"{seconds:g} s. Check that its process runs there and that the network between the hosts is open."
        ) from error


def _own_address(host: str) -> str:
    """Return the one address of this host that a name stands for everywhere; "" where all must be listened at.

    A name may resolve to the loopback on its own host, and be the name of a service in front of it.
    """
    with suppress(OSError):
        found = {str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        if len(found) == 1 and (host == _LOOPBACK or not ip_address(next(iter(found))).is_loopback):
            address = found.pop()
            listen(0, address).close()
            return address
    return ""


def _check_that_rank_0_is_here(placement: Placement) -> None:
    """Refuse a job whose rank 0 is not on the first host of its host list, where the other ranks look for it."""
    if "MASTER_ADDR" in os.environ:  # may be the address of a service in front of this host
        return
    for family, kind, protocol, _, address in _resolved(placement):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind((address[0], 0))
            except OSError:
                continue
            return
    raise LaunchError(
        f"rank 0 runs on host {platform.node()}, but the first host of this {placement.launcher} job is "
        f"{placement.address}, where the other ranks look for it. Set MASTER_ADDR={platform.node()} for all ranks."
    )


def _resolved(placement: Placement) -> list[tuple]:
    try:
        return socket.getaddrinfo(placement.address, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(
            f"the host of rank 0, {placement.address}, is not known on host {platform.node()}: {error.strerror}. "
            "Set MASTER_ADDR to a name or address that all hosts know."
        ) from error
