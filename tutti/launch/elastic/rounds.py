"""Which hosts take part in the next round of an elastic job, and with how many ranks; pure logic.

A host offers places for ranks. The place of a rank that was lost rests for a while, longer each time, and in the end it
is given up. A round takes as many places as the global batch splits over; those that are left over wait as spares.
"""

from dataclasses import dataclass, field


@dataclass
class Host:
    """A host in the job."""

    number: int
    name: str
    places: int
    order: int = 0  # its ranks come after those of hosts with a lower one
    rests: list[float] = field(default_factory=list)  # when places may be used again
    losses: int = 0

    def ready(self, now: float) -> int:
        """Places that can be used."""
        return self.places - sum(end > now for end in self.rests)


@dataclass(frozen=True)
class Round:
    """Ranks that train together until one is lost or others come."""

    number: int
    shares: dict[int, int]  # ranks of each host, in the order of ranks
    present: int  # places that could be used, spares included

    @property
    def world_size(self) -> int:
        return sum(self.shares.values())

    @property
    def spares(self) -> int:
        return self.present - self.world_size

    def ranks_of(self, host: int) -> range:
        """The ranks on a host."""
        before = 0
        for other, count in self.shares.items():
            if other == host:
                return range(before, before + count)
            before += count
        return range(0)


@dataclass
class Rounds:
    """The hosts of a job, and the rounds that they can form."""

    min_ranks: int
    max_ranks: int
    parts: int  # into which a global batch can be divided
    pause_seconds: float
    losses_allowed: int = 5  # of the ranks of one host
    hosts: dict[int, Host] = field(default_factory=dict)
    count: int = 0

    def add(self, number: int, name: str, places: int, order: int = 0) -> None:
        self.hosts[number] = Host(number, name, places, order)

    def remove(self, number: int) -> None:
        self.hosts.pop(number, None)

    def lose(self, number: int, now: float) -> bool:
        """A rank of this host was killed; whether its place is used again later."""
        host = self.hosts[number]
        host.losses += 1
        if host.losses > self.losses_allowed:
            host.places -= 1
            return False
        host.rests.append(now + self.pause_seconds * 2 ** (host.losses - 1))
        return True

    def present(self, now: float) -> int:
        """Places that can be used, of all hosts."""
        return sum(host.ready(now) for host in self.hosts.values())

    def next_round(self, now: float) -> Round | None:
        """The largest round that is possible; None while there are too few ranks."""
        present = self.present(now)
        world_size = usable_ranks(present, self.max_ranks, self.parts)
        if world_size < self.min_ranks:
            return None
        left, shares = world_size, {}
        for host in sorted(self.hosts.values(), key=lambda host: host.order):
            if taken := min(left, host.ready(now)):
                shares[host.number] = taken
                left -= taken
        self.count += 1
        return Round(self.count, shares, present)

    def grows(self, current: Round, now: float) -> bool:
        """Whether a new round would have more ranks."""
        return usable_ranks(self.present(now), self.max_ranks, self.parts) > current.world_size

    def next_change(self, now: float) -> float | None:
        """When the next place has rested."""
        return min((end for host in self.hosts.values() for end in host.rests if end > now), default=None)


def usable_ranks(present: int, max_ranks: int, parts: int) -> int:
    """The largest number of ranks over which a global batch splits; 0 where there is none."""
    return max((count for count in range(1, min(present, max_ranks) + 1) if parts % count == 0), default=0)
