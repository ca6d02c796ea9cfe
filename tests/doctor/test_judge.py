"""Measurements of made-up networks: slow and failed links and hosts are named, and nothing else."""

from itertools import combinations

import pytest

from tutti.doctor.findings import Finding
from tutti.doctor.judge import CEILING_BYTES_PER_SECOND, judge, suspects, usual_speed
from tutti.doctor.plan import Link, disjoint, plan_rounds

FAST = 25e6  # bytes a second: 200 Mbit/s


def network(hosts: int, slow: dict[tuple[str, str], float] | None = None, usual: float = FAST) -> list[Link]:
    """All links of hosts a, b, c, ...; slow directions by (from, to)."""
    slow = slow or {}
    names = [chr(ord("a") + number) for number in range(hosts)]
    return [
        Link(a, b, slow.get((a, b), usual), slow.get((b, a), usual), latency_seconds=5e-5)
        for a, b in combinations(names, 2)
    ]


def both(first: str, second: str, speed: float) -> dict[tuple[str, str], float]:
    return {(first, second): speed, (second, first): speed}


def of_host(host: str, hosts: str, speed: float, sends: bool = True, receives: bool = True) -> dict:
    others = [other for other in hosts if other != host]
    sent = {(host, other): speed for other in others} if sends else {}
    return sent | ({(other, host): speed for other in others} if receives else {})


def dead(links: list[Link], *pairs: str) -> list[Link]:
    broken = [Link(a, b, error=f"host {a} finds no connection to {b}") for a, b in pairs]
    return [link for link in links if link.first + link.second not in pairs] + broken


def texts(found: list[Finding]) -> list[str]:
    return [each.line() for each in found]


@pytest.mark.parametrize("hosts", [2, 3, 4, 9])
def test_equal_links_are_no_finding(hosts: int) -> None:
    assert judge(network(hosts)) == []
    assert suspects(network(hosts)) == []


@pytest.mark.parametrize("hosts", [3, 4, 9])
def test_one_slow_link_is_named_with_its_hosts_and_figures(hosts: int) -> None:
    (line,) = texts(judge(network(hosts, both("b", "c", FAST / 10))))
    assert line == (
        "fault: the link between hosts b and c is slow: 20 Mbit/s there, 20 Mbit/s back, 10.0 times slower than the "
        "usual 200 Mbit/s. Check the cable and the switch between b and c."
    )


def test_one_slow_direction_is_named_with_its_direction() -> None:
    (line,) = texts(judge(network(4, {("c", "b"): FAST / 10})))
    assert line.startswith("fault: the link from host c to host b is slow: 20 Mbit/s, 10.0 times slower")
    (line,) = texts(judge(network(2, {("b", "a"): FAST / 10})))
    assert line.startswith("fault: the link from host b to host a is slow: 20 Mbit/s")


def test_slower_than_half_is_a_warning_and_than_a_third_a_fault() -> None:
    for factor, level in ((1.9, None), (2.1, "warning"), (2.9, "warning"), (3.1, "fault")):
        found = judge(network(4, both("a", "b", FAST / factor)))
        assert [each.level for each in found] == ([level] if level else [])


def test_before_a_run_slow_links_are_warnings_and_dead_ones_faults() -> None:
    links = dead(network(4, both("b", "c", FAST / 10)), "ad")
    assert [each.level for each in judge(links, strict=False)] == ["fault", "warning"]


@pytest.mark.parametrize("hosts", ["abc", "abcd", "abcdefghi"])
@pytest.mark.parametrize(
    ("sends", "receives", "how"),
    [(True, True, "sends and receives"), (True, False, "sends"), (False, True, "receives")],
)
def test_a_host_whose_links_are_all_slow_is_named_alone(hosts: str, sends: bool, receives: bool, how: str) -> None:
    for host in (hosts[0], hosts[-1]):
        (line,) = texts(judge(network(len(hosts), of_host(host, hosts, FAST / 10, sends, receives))))
        assert line.startswith(f"fault: host {host} {how} slowly on all its links: 20 Mbit/s to 20 Mbit/s, 10.0 times")


def test_a_slow_host_and_a_slow_link_elsewhere_are_both_named() -> None:
    slow = of_host("e", "abcdef", FAST / 10) | both("a", "b", FAST / 5)
    found = texts(judge(network(6, slow)))
    assert [line.split(":")[1].strip() for line in found] == [
        "host e sends and receives slowly on all its links",
        "the link between hosts a and b is slow",
    ]


def test_two_racks_with_slow_links_between_them_are_no_finding() -> None:
    slow = {}
    for first in "abcd":
        for second in "efgh":
            slow |= both(first, second, FAST / 4)
    assert judge(network(8, slow)) == []


def test_beyond_what_one_stream_can_measure_no_link_is_slow() -> None:
    usual = 4 * CEILING_BYTES_PER_SECOND
    assert judge(network(4, both("a", "b", usual / 7), usual)) == []
    (line,) = texts(judge(network(4, both("a", "b", usual / 40), usual)))
    assert line.startswith("fault: the link between hosts a and b is slow: 1 Gbit/s there")


def test_a_dead_link_is_named_with_what_happened() -> None:
    (line,) = texts(judge(dead(network(4), "bc")))
    assert line.startswith(
        "fault: the link between hosts b and c does not work: host b finds no connection to c. Check the firewall"
    )


def test_a_host_without_a_working_link_is_named_once() -> None:
    (line,) = texts(judge(dead(network(4), "ac", "bc", "cd")))
    assert line.startswith("fault: no other host has a working link with host c (for example, host a finds")


def test_the_only_link_of_two_hosts_is_named_as_a_link() -> None:
    (line,) = texts(judge(dead(network(2), "ab")))
    assert line.startswith("fault: the link between hosts a and b does not work")


def test_a_link_that_answers_late_is_a_warning() -> None:
    links = network(4)
    links[0] = Link("a", "b", FAST, FAST, latency_seconds=0.02)
    assert texts(judge(links)) == ["warning: the link between hosts a and b answers after 20 ms, others after 50 us."]
    assert suspects(links) == [links[0]]


def test_the_usual_speed_is_moved_neither_by_a_slow_link_nor_by_a_slow_host() -> None:
    assert usual_speed(network(3, of_host("c", "abc", 1.0))) == FAST
    assert usual_speed(network(4, both("a", "b", 1.0))) == FAST
    assert usual_speed([]) == 0


def test_the_better_of_two_measurements_counts() -> None:
    first, second = Link("a", "b", 1, 9, 0.5), Link("a", "b", 8, 2, 0.1)
    assert first.better_of(second) == Link("a", "b", 8, 9, 0.1)
    assert first.better_of(Link("a", "b", error="it stalled")) == first
    assert Link("a", "b", error="it stalled").better_of(second) == second


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 7, 8, 64])
def test_a_tournament_has_every_pair_once_and_every_host_once_a_round(hosts: int) -> None:
    rounds = plan_rounds(hosts)
    pairs = [pair for each in rounds for pair in each]
    assert sorted(pairs) == list(combinations(range(hosts), 2))
    assert len(rounds) == (hosts - 1 if hosts % 2 == 0 else hosts if hosts > 1 else 0)
    for each in rounds:
        seen = [host for pair in each for host in pair]
        assert len(seen) == len(set(seen))


@pytest.mark.parametrize("hosts", [65, 128, 1000])
def test_many_hosts_are_measured_at_few_distances(hosts: int) -> None:
    rounds = plan_rounds(hosts)
    assert len(rounds) <= 3 * hosts.bit_length()
    distances = set()
    for each in rounds:
        seen = [host for pair in each for host in pair]
        assert len(seen) == len(set(seen))
        distances |= {min((b - a) % hosts, (a - b) % hosts) for a, b in each}
    assert {1, 2, 4, 8} <= distances
    assert {host for each in rounds for pair in each for host in pair} == set(range(hosts))


def test_pairs_that_share_a_host_are_put_into_different_rounds() -> None:
    assert disjoint([(0, 1), (0, 2), (1, 2), (3, 4)]) == [[(0, 1), (3, 4)], [(0, 2)], [(1, 2)]]
