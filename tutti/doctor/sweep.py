"""Which pairs of hosts are measured, and in which round; pure."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

MOST_HOSTS_IN_PAIRS = 64  # more are measured at distances 1, 2, 4, ... only

Pair = tuple[int, int]
Round = list[Pair]


@dataclass(frozen=True)
class Link:
    """A measured pair of hosts: bytes a second from the first to the second and back, or what went wrong."""

    first: str
    second: str
    there: float = 0.0
    back: float = 0.0
    latency_seconds: float = 0.0
    error: str | None = None

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def better_of(self, other: "Link") -> "Link":
        """The best of two measurements: what disturbs a link only makes it slower."""
        if self.error or other.error:
            return other if self.error else self
        latency = min(self.latency_seconds, other.latency_seconds)
        return replace(
            self, there=max(self.there, other.there), back=max(self.back, other.back), latency_seconds=latency
        )


def plan_rounds(hosts: int) -> list[Round]:
    """Rounds in which every host is in one pair at most: a tournament of all pairs, or the distances 1, 2, 4, ..."""
    if hosts <= MOST_HOSTS_IN_PAIRS:
        return _tournament(hosts)
    distance, rounds = 1, []
    while distance < hosts:
        pairs = [(host, (host + distance) % hosts) for host in range(hosts)]
        rounds += disjoint(dict.fromkeys((min(pair), max(pair)) for pair in pairs))
        distance *= 2
    return rounds


def disjoint(pairs: Iterable[Pair]) -> list[Round]:
    """Pairs put into rounds in which no host is in two."""
    rounds: list[Round] = []
    busy: list[set[int]] = []
    for pair in pairs:
        number = next((i for i, hosts in enumerate(busy) if not hosts & set(pair)), len(rounds))
        if number == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[number].append(pair)
        busy[number] |= set(pair)
    return rounds


def _tournament(hosts: int) -> list[Round]:
    """The circle method: one host stays, the others move on by one seat a round."""
    seats: list[int | None] = [*range(hosts), *([None] if hosts % 2 else [])]
    rounds: list[Round] = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [each for each in rounds if each]
