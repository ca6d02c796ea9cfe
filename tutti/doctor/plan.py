"""The plan of link tests: one rank for each host, and pairs of hosts in rounds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tutti.doctor.facts import Facts
from tutti.doctor.findings import Finding, fault

MOST_HOSTS_IN_PAIRS = 64  # more are measured at distances 1, 2, 4, ... only

Pair = tuple[int, int]
Round = list[Pair]


@dataclass(frozen=True)
class Link:
    """A measured pair of hosts: bytes per second from the first to the second and back, or an error."""

    first: str
    second: str
    there: float = 0.0
    back: float = 0.0
    latency_seconds: float = 0.0
    error: str | None = None

    def better_of(self, other: "Link") -> "Link":
        """The best of two measurements: disturbances only make a link slower."""
        if self.error or other.error:
            return other if self.error else self
        latency = min(self.latency_seconds, other.latency_seconds)
        return replace(
            self, there=max(self.there, other.there), back=max(self.back, other.back), latency_seconds=latency
        )


@dataclass(frozen=True)
class HostTests:
    """What the tests of one host have found."""

    clock: tuple[float, float] | None = None  # seconds ahead of rank 0's clock, and by how much that may be wrong
    links: tuple[Link, ...] = ()
    unreachable: dict[int, str] = field(default_factory=dict)  # why, by the number of the other host
    folder_error: str | None = None  # why the run folder cannot be written
    seen: tuple[int, ...] = ()  # the hosts whose files in the run folder are visible here


def plan_rounds(hosts: int) -> list[Round]:
    """Rounds in which every host is in at most one pair: all pairs, or those at distances 1, 2, 4, ..."""
    if hosts <= MOST_HOSTS_IN_PAIRS:
        return _tournament(hosts)
    distance, rounds = 1, []
    while distance < hosts:
        pairs = [(host, (host + distance) % hosts) for host in range(hosts)]
        rounds += disjoint(dict.fromkeys((min(pair), max(pair)) for pair in pairs))
        distance *= 2
    return rounds


def disjoint(pairs: Iterable[Pair]) -> list[Round]:
    """Distribute pairs to rounds in which no host is in two pairs."""
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
    """The circle method of round-robin tournaments: one host is fixed, the others rotate by one place a round."""
    seats: list[int | None] = [*range(hosts), *([None] if hosts % 2 else [])]
    rounds: list[Round] = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [each for each in rounds if each]


_TRANSFER_SECONDS, _QUICK_TRANSFER_SECONDS = 0.06, 0.02


@dataclass(frozen=True)
class HostAddress:
    """The address of a host for link tests."""

    host: str
    address: str
    port: int


@dataclass(frozen=True)
class LinkPlan:
    """The ranks and hosts that take part, as rank 0 has found them; hosts are numbered as in `places`."""

    ranks: list[int]
    places: list[HostAddress]
    first_ranks: list[int]  # the rank that runs the tests of each host
    folder: str
    secret: str
    transfer_seconds: float

    @property
    def rounds(self) -> list[Round]:
        return plan_rounds(len(self.places))

    @property
    def seconds(self) -> float:
        """The time limit for all tests of a host."""
        return 30 + 1.5 * len(self.rounds)


def make_plan(facts: Sequence[Facts], folder: str, secret: str, quick: bool) -> LinkPlan:
    """Choose a rank for each host: the first that accepts link tests."""
    first_ranks: dict[str, Facts] = {}
    for each in facts:
        if each.port and facts[0].port:  # rank 0's host is number 0
            first_ranks.setdefault(each.host, each)
    places = [HostAddress(each.host, each.address, each.port) for each in first_ranks.values()]
    ranks, seconds = [each.rank for each in facts], _QUICK_TRANSFER_SECONDS if quick else _TRANSFER_SECONDS
    return LinkPlan(ranks, places, [each.rank for each in first_ranks.values()], folder, secret, seconds)


def name_hosts_apart(facts: Sequence[Facts]) -> list[Facts]:
    """Add the address to the names of hosts that have the same name and different addresses."""
    addresses: dict[str, set[str]] = {}
    for each in facts:
        addresses.setdefault(each.host, set()).add(each.address)
    return [
        replace(each, host=f"{each.host} ({each.address})") if len(addresses[each.host]) > 1 else each for each in facts
    ]


def check_addresses(facts: Sequence[Facts]) -> list[Finding]:
    """Findings about ranks without an address that other hosts can reach."""
    several = len({each.host for each in facts}) > 1
    findings = []
    for each in facts:
        who = f"rank {each.rank} on host {each.host}"
        if not each.address:
            findings.append(
                fault(
                    f"{who}: the interface {each.interface} has no address there. "
                    "Set GLOO_SOCKET_IFNAME to one that has, or unset it."
                )
            )
        elif several and each.address.startswith("127."):
            findings.append(
                fault(
                    f"{who} would be at {each.address} ({each.interface}), where no other host reaches it. "
                    "Set GLOO_SOCKET_IFNAME to the interface between the hosts."
                )
            )
    return findings


def gather_links(plan: LinkPlan, answers: Sequence[HostTests | None]) -> list[Link]:
    """The measured links, and those without a connection in one direction or both."""
    names = [place.host for place in plan.places]
    links = {(link.first, link.second): link for answer in answers if answer for link in answer.links}
    for number, answer in enumerate(answers):
        for other, why in answer.unreachable.items() if answer else ():
            here = names[number]
            known = names[min(number, other)], names[max(number, other)]
            error = f"host {here} finds no connection to {why}"
            if known in links and not links[known].error:
                error += " (in the other direction there is one)"
            if known not in links or not links[known].error:
                links[known] = Link(*known, error=error)
    planned = {(names[first], names[second]) for each in plan.rounds for first, second in each}
    return [link for pair, link in links.items() if pair in planned]
