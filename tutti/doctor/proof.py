"""The proof: one Gloo all-reduce of all ranks, as training will do it."""

import os
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tutti.doctor.exchange import Exchange
from tutti.doctor.findings import Finding, fault
from tutti.doctor.plan import Link
from tutti.ranks.fingerprint import name_ranks
from tutti.ranks.group import release_tensors
from tutti.ranks.placement import Placement

PROOF_SECONDS = 30.0
_SMALL, _LARGE, _LEAST = 8, 8_000_000, 250_000
_LONGEST_SECONDS = 1.5
_REPEATS = 5
_REST_SECONDS = 5.0  # for the others, once rank 0 has failed


def choose_bytes(links: Sequence[Link]) -> int:
    """8 MB, or less where the slowest link would make that long."""
    slowest = min((min(link.there, link.back) for link in links if not link.error), default=float("inf"))
    return int(max(_LEAST, min(_LARGE, slowest * _LONGEST_SECONDS / 2)))


def all_reduce(store: dist.Store, placement: Placement, interface: str, large: int) -> list[dict[str, Any]] | str:
    """Bytes and seconds of a small and a large all-reduce, or why there was none; every rank must enter."""
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    deadline = timedelta(seconds=PROOF_SECONDS)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("proof", store),
            rank=placement.rank,
            world_size=placement.world_size,
            timeout=deadline,
        )
        _reduce(_SMALL)
        small = statistics.median(_reduce(_SMALL) for _ in range(_REPEATS))
        times = [{"bytes": _SMALL, "seconds": small}, {"bytes": large, "seconds": _reduce(large)}]
        dist.barrier()
        release_tensors()
        dist.destroy_process_group()
        return times
    except RuntimeError as error:
        return str(error).splitlines()[0]


def lead_proof(
    exchange: Exchange, store: dist.Store, placement: Placement, interface: str, size: int
) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Rank 0's all-reduce, and what is wrong where it or another rank could not do it."""
    answer = all_reduce(store, placement, interface, size)
    keys = [f"proof/{rank}" for rank in range(1, placement.world_size)]
    others = exchange.collect(keys, PROOF_SECONDS if isinstance(answer, list) else _REST_SECONDS)
    failed = {0: answer} | {rank: others.get(f"proof/{rank}", "no answer") for rank in range(1, placement.world_size)}
    failed = {rank: text for rank, text in failed.items() if isinstance(text, str)}
    if isinstance(answer, list) and not failed:
        return answer, []
    rank = min(failed)
    text = (
        f"an all-reduce over Gloo failed on {name_ranks(sorted(failed))} of {placement.world_size}, on rank {rank} "
        f"with: {failed[rank]}. The links work by themselves: look at GLOO_SOCKET_IFNAME and the limit of open files."
    )
    return [], [fault(text)]


def _reduce(size: int) -> float:
    values = torch.ones(max(1, size // 4))
    begin = time.perf_counter()
    dist.all_reduce(values)
    seconds = time.perf_counter() - begin
    if not bool((values == dist.get_world_size()).all()):
        raise RuntimeError(f"an all-reduce of {size} bytes of ones gave other numbers than {dist.get_world_size()}")
    return seconds
