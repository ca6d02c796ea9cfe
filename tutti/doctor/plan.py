"""Who measures what: one rank for each host, and what their answers say about links; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tutti.doctor.facts import Facts
from tutti.doctor.findings import Finding, fault
from tutti.doctor.sweep import Link, Round, plan_rounds

_TRANSFER_SECONDS, _QUICK_TRANSFER_SECONDS = 0.06, 0.02


@dataclass(frozen=True)
class Place:
    """Where a host answers."""

    host: str
    address: str
    port: int


@dataclass(frozen=True)
class Plan:
    """Who takes part, as rank 0 has seen it: one place a host, by number."""

    ranks: list[int]
    places: list[Place]
    speakers: list[int]  # the rank that stands for each host
    folder: str
    word: str
    transfer_seconds: float

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Plan":
        return cls(**{**plain, "places": [Place(**place) for place in plain["places"]]})

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def rounds(self) -> list[Round]:
        return plan_rounds(len(self.places))

    @property
    def seconds(self) -> float:
        """How long all the tests of a host may take."""
        return 30 + 1.5 * len(self.rounds)


def make_plan(facts: Sequence[Facts], folder: str, word: str, quick: bool) -> Plan:
    """One rank for each host: the first that answers link tests."""
    speakers: dict[str, Facts] = {}
    for each in facts:
        if each.port and facts[0].port:  # rank 0's host is number 0
            speakers.setdefault(each.host, each)
    places = [Place(each.host, each.address, each.port) for each in speakers.values()]
    ranks, seconds = [each.rank for each in facts], _QUICK_TRANSFER_SECONDS if quick else _TRANSFER_SECONDS
    return Plan(ranks, places, [each.rank for each in speakers.values()], folder, word, seconds)


def name_hosts_apart(facts: Sequence[Facts]) -> list[Facts]:
    """Hosts of one name and several addresses get these into their names."""
    addresses: dict[str, set[str]] = {}
    for each in facts:
        addresses.setdefault(each.host, set()).add(each.address)
    return [
        replace(each, host=f"{each.host} ({each.address})") if len(addresses[each.host]) > 1 else each for each in facts
    ]


def check_addresses(facts: Sequence[Facts]) -> list[Finding]:
    """Ranks that the others cannot reach at all, whatever the links."""
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


def gather_links(plan: Plan, answers: Sequence[dict[str, Any] | None]) -> list[Link]:
    """The measured links, and those over which no connection came about, one way or both."""
    names = [place.host for place in plan.places]
    links = {(p["first"], p["second"]): Link(**p) for answer in answers if answer for p in answer["links"]}
    for number, answer in enumerate(answers):
        for other, why in (answer or {"unreachable": {}})["unreachable"].items():
            here = names[number]
            known = names[min(number, int(other))], names[max(number, int(other))]
            error = f"host {here} finds no connection to {why}"
            if known in links and not links[known].error:
                error += " (the other way round there is one)"
            if known not in links or not links[known].error:
                links[known] = Link(*known, error=error)
    planned = {(names[first], names[second]) for each in plan.rounds for first, second in each}
    return [link for pair, link in links.items() if pair in planned]
