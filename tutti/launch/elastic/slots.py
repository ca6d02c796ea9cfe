"""Which slots of which hosts take part in an elastic job, and as which ranks; pure logic.

Two restart policies use it. `tutti train --min-ranks` trains in rounds that restart from a checkpoint, and the slot of
a rank that was lost cools down. `horovodrun --min-np` keeps its workers alive from one generation of ranks to the next,
and the whole host of a worker that failed cools down.
"""

import math
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tutti.launch.hosts import fill_hosts
from tutti.ranks.failures import Failure

Key = TypeVar("Key", int, str)


@dataclass(frozen=True)
class RankLimits:
    """How many ranks a job can use."""

    min_ranks: int
    max_ranks: int | None = None
    parts: int | None = None  # into which a global batch can be divided; None: any number of ranks can train

    def world_size(self, slots: int) -> int:
        """Return the largest number of ranks for so many slots; 0 where that is below the minimum."""
        most = slots if self.max_ranks is None else min(slots, self.max_ranks)
        size = most if self.parts is None else usable_ranks(slots, most, self.parts)
        return size if size >= self.min_ranks else 0


def usable_ranks(slots: int, max_ranks: int, parts: int) -> int:
    """Return the largest number of ranks over which a global batch splits; 0 where there is none."""
    return max((count for count in range(1, min(slots, max_ranks) + 1) if parts % count == 0), default=0)


@dataclass(frozen=True)
class CoolDown:
    """How long slots are unused after a failure on their host: twice as long each time, and in the end for good."""

    first_seconds: float
    max_seconds: float = math.inf
    failures_allowed: float = math.inf  # of one host
    whole_host: bool = False  # a failure takes all slots of its host out of use; otherwise one

    def seconds(self, failures: int) -> float:
        """Return the time after so many failures of a host; infinite for good."""
        if failures > self.failures_allowed:
            return math.inf
        return min(self.max_seconds, self.first_seconds * 2 ** (failures - 1))


@dataclass
class HostSlots:
    """The slots that a host offers to an elastic job."""

    name: str
    slots: int
    order: int = 0  # its ranks come after those of hosts with a lower one
    failures: int = 0
    cooling: list[float] = field(default_factory=list)  # when each cool-down ends

    def unused(self, now: float) -> int:
        """Return the number of cool-downs that have not ended."""
        return sum(end > now for end in self.cooling)


@dataclass
class SlotPool(Generic[Key]):
    """The hosts of a job by their keys, and which of their slots can be used."""

    cool_down: CoolDown
    hosts: dict[Key, HostSlots] = field(default_factory=dict)

    def add(self, key: Key, name: str, slots: int, order: int = 0) -> None:
        """Add a host, or change the slots of one; its failures are remembered."""
        host = self.hosts.setdefault(key, HostSlots(name, slots, order))
        host.slots, host.order = slots, order

    def remove(self, key: Key) -> None:
        """Forget a host."""
        self.hosts.pop(key, None)

    def fail(self, key: Key, now: float) -> float:
        """Start a cool-down after a failure on a host; return its seconds, infinite for good."""
        host = self.hosts[key]
        if self.cool_down.whole_host and host.unused(now):  # another worker of the same failure
            return max(host.cooling) - now
        host.failures += 1
        seconds = self.cool_down.seconds(host.failures)
        host.cooling.append(now + seconds)
        return seconds

    def usable(self, now: float) -> dict[Key, int]:
        """Return the slots of each host that can be used, in the order of ranks."""
        hosts = sorted(self.hosts.items(), key=lambda item: item[1].order)
        return {key: self._usable_of(host, now) for key, host in hosts}

    def cooling_hosts(self, now: float) -> list[str]:
        """Return the names of hosts of which slots cool down."""
        return [host.name for host in self.hosts.values() if host.unused(now)]

    def next_change(self, now: float) -> float | None:
        """Return when the next cool-down ends."""
        ends = (end for host in self.hosts.values() for end in host.cooling if now < end < math.inf)
        return min(ends, default=None)

    def _usable_of(self, host: HostSlots, now: float) -> int:
        unused = host.unused(now)
        if self.cool_down.whole_host:
            return 0 if unused else host.slots
        return host.slots - unused


@dataclass(frozen=True)
class Round:
    """Ranks that train together until one is lost or others come."""

    number: int
    shares: dict[int, int]  # ranks of each host, in the order of ranks
    present: int  # slots that could be used, spares included

    @property
    def world_size(self) -> int:
        return sum(self.shares.values())

    @property
    def spares(self) -> int:
        return self.present - self.world_size

    def ranks_of(self, host: int) -> range:
        """Return the ranks on a host."""
        before = 0
        for other, count in self.shares.items():
            if other == host:
                return range(before, before + count)
            before += count
        return range(0)


@dataclass(frozen=True)
class RoundShare:
    """The part of one host in a round: which ranks it starts, and where they meet."""

    round: int
    first_rank: int
    ranks: int  # on this host
    world_size: int
    host: int  # its index among the hosts of the round
    hosts: int
    port: int  # of the round's store in the first launcher
    address: str = ""  # of the first launcher as other hosts of the round see it; "" where this host knows it


@dataclass(frozen=True)
class RankEnd:
    """How a rank that did not complete its work has ended."""

    failure: Failure
    killed: bool  # by a signal that was not the agent's


@dataclass(frozen=True)
class RoundEnd:
    """A host's report that its ranks of a round have ended."""

    round: int
    ranks: list[RankEnd]  # those that did not complete their work


@dataclass
class Rounds:
    """The hosts of a job that restarts from checkpoints, and the rounds that they can form."""

    limits: RankLimits
    pool: SlotPool[int]
    count: int = 0

    def lose(self, host: int, now: float) -> bool:
        """Note that a rank of this host was killed; return whether its slot is used again later."""
        return self.pool.fail(host, now) < math.inf

    def present(self, now: float) -> int:
        """Return the number of slots that can be used, of all hosts."""
        return sum(self.pool.usable(now).values())

    def next_round(self, now: float) -> Round | None:
        """Return the largest round that is possible; None while there are too few ranks."""
        usable = self.pool.usable(now)
        present = sum(usable.values())
        world_size = self.limits.world_size(present)
        if not world_size:
            return None
        self.count += 1
        return Round(self.count, fill_hosts(usable, world_size), present)

    def grows(self, current: Round, now: float) -> bool:
        """Return whether a new round would have more ranks."""
        return self.limits.world_size(self.present(now)) > current.world_size
