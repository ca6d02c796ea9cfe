"""The store of a job: ranks connect to it and wait for each other, and absent ranks are named."""

import os
import platform
import socket
from datetime import timedelta

import torch.distributed as dist

from tutti import units
from tutti.errors import DeadlineError, LaunchError
from tutti.ranks.placement import Placement
from tutti.ranks.rendezvous import find_store_port, serve_store_port

_STAY_SECONDS = 5.0


def connect_store(placement: Placement, seconds: float) -> dist.Store:
    """Connect to the store of the job, which rank 0 or the agent of torchrun holds."""
    if placement.world_size == 1:
        return dist.HashStore()
    if placement.address is None or placement.port is None:
        raise LaunchError(f"{placement.launcher} does not say where rank 0 is. Set MASTER_ADDR and MASTER_PORT.")
    if placement.key is None:
        held_here = placement.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = _store(placement.rank, placement.address, placement.port, held_here, seconds)
    elif placement.rank == 0:
        _check_that_rank_0_is_here(placement)
        store = _store(0, "127.0.0.1", 0, True, seconds)  # at any free port, for all addresses of this host
        serve_store_port(placement.key, store.port, placement.world_size - 1, seconds)
    else:
        port = find_store_port(placement.key, placement.address, placement.rank, seconds)
        store = _store(placement.rank, placement.address, port, False, seconds)
    return dist.PrefixStore(f"start/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _store(rank: int, address: str, port: int, held_here: bool, seconds: float) -> dist.TCPStore:
    timeout = timedelta(seconds=seconds)
    try:
        return dist.TCPStore(address, port, is_master=held_here, timeout=timeout, wait_for_workers=False)
    except dist.DistError as error:
        where = f"{address}:{port}"
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise LaunchError(
                f"rank 0 cannot listen on {where}: the port is in use. Set MASTER_PORT to a free one, on all ranks."
            ) from error
        raise DeadlineError(
            f"rank {rank} on host {platform.node()} could not reach rank 0 at {where} within {seconds:g} s. "
            "Check that rank 0 runs there and that the network between the hosts is open."
        ) from error


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


def wait_for_all(store: dist.Store, rank: int, world_size: int, key: str, what: str, seconds: float) -> None:
    """Wait until every rank has called this; raise an error that names the absent ranks at the deadline."""
    store.set(f"{key}/{rank}", "")
    if store.add(f"{key}/count", 1) == world_size:
        store.set(f"{key}/open", "")
    try:
        store.wait([f"{key}/open"], timedelta(seconds=seconds))
    except dist.DistError as error:
        raise DeadlineError(
            f"rank {rank} on host {platform.node()} waited {seconds:g} s at {what}: "
            f"{_describe_missing(store, rank, world_size, key)} Look at the logs of the missing ranks."
        ) from error


def _describe_missing(store: dist.Store, rank: int, world_size: int, key: str) -> str:
    """Name the missing ranks; rank 0, which may hold the store, waits until the ranks that arrived have read it."""
    try:
        here = [other for other in range(world_size) if store.check([f"{key}/{other}"])]
        store.set(f"{key}/{rank}/told", "")
        if rank == 0:
            store.wait([f"{key}/{other}/told" for other in here], timedelta(seconds=_STAY_SECONDS))
    except dist.DistError:
        return "rank 0, which holds the store, has ended or does not answer."
    missing = [other for other in range(world_size) if other not in here]
    return f"missing {units.ranks(missing)}, arrived {units.ranks(here)} of {world_size}."
