"""How far the clocks of hosts are apart, measured between ranks."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tutti.bench.trace.merge import Clock
from tutti.ranks.group import Group

_ROUNDS = 40
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Exchange:
    """A question to rank 0 and its answer, in nanoseconds: when it was sent and came back here, when heard there."""

    sent: int
    heard: int
    came: int


def offset_of(exchanges: Sequence[Exchange]) -> tuple[int, int]:
    """How far this clock is ahead of rank 0's, from the quickest exchange, and how wrong that can be.

    Rank 0 has heard at some time between question and answer: half of the round trip is the most that the middle can be
    off.
    """
    best = min(exchanges, key=lambda one: one.came - one.sent)
    return (best.sent + best.came) // 2 - best.heard, (best.came - best.sent + 1) // 2


def clock_of(before: tuple[int, int], after: tuple[int, int], shared: bool) -> Clock:
    """What two measurements, before and after a trace, say: their middle, and what they differ by as a doubt more.

    Ranks under one kernel have one clock: its offset is nothing, whatever was measured.
    """
    measured = (before[0] + after[0]) // 2
    if shared:
        return Clock(0, 0, measured)
    return Clock(measured, max(before[1], after[1]) + abs(before[0] - after[0]) // 2, measured)


def measure_offset(group: Group) -> tuple[int, int]:
    """This rank's clock against rank 0's, and the uncertainty; every rank enters, one after the other has its turn."""
    message = torch.zeros(1, dtype=torch.int64)
    exchanges: list[Exchange] = [Exchange(0, 0, 0)]
    for rank in range(1, group.world_size):
        if group.is_first:
            for _ in range(_ROUNDS):
                dist.recv(message, src=rank)
                message[0] = time.time_ns()
                dist.send(message, dst=rank)
        elif rank == group.rank:
            exchanges = [_ask(message) for _ in range(_ROUNDS)]
    return offset_of(exchanges)


def _ask(message: torch.Tensor) -> Exchange:
    sent = time.time_ns()
    dist.send(message, dst=0)
    dist.recv(message, src=0)
    return Exchange(sent, int(message[0]), time.time_ns())


def shares_first_clock(group: Group) -> bool:
    """Whether this rank runs under the same kernel as rank 0; every rank enters."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else f"rank {group.rank}"
    boots = group.gather(boot)
    return boots[0] == boot
