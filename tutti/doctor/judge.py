"""Findings about links and hosts from the measurements of all links; pure."""

from collections.abc import Mapping, Sequence
from statistics import median, median_high

from tutti import units
from tutti.doctor.findings import Finding, fault, name_hosts, warning
from tutti.doctor.plan import Link

WARNING_FACTOR = 2.0  # a link slower than the typical one by this is a warning,
FAULT_FACTOR = 3.0  # and by this a fault
CEILING_BYTES_PER_SECOND = 1.25e9  # above 10 Gbit/s one stream is limited by the CPU, and no link counts as slow
LATENCY_FACTOR = 10.0
LATENCY_SECONDS = 1e-3  # a lower latency is never a finding


def usual_speed(links: Sequence[Link]) -> float:
    """The typical speed: the median over hosts of their median speed, which a slow link or host does not change."""
    speeds: dict[str, list[float]] = {}
    for (source, target), speed in _directions(links).items():
        speeds.setdefault(source, []).append(speed)
        speeds.setdefault(target, []).append(speed)
    return median_high([median_high(each) for each in speeds.values()]) if speeds else 0.0


def suspects(links: Sequence[Link]) -> list[Link]:
    """Links that seem slow, to be measured again."""
    usual, latency = usual_speed(links), _usual_latency(links)
    slow = [link for link in links if not link.error and _is_slow(min(link.there, link.back), usual)]
    late = [link for link in links if not link.error and _is_late(link, latency)]
    return list(dict.fromkeys(slow + late))


def judge(links: Sequence[Link], strict: bool = True) -> list[Finding]:
    """Findings about links that fail, are slow or have a high latency; the host is named if all its links do.

    A slow link is a fault only if `strict`: a run still completes with it.
    """
    slow = _judge_slow(links)
    return _judge_dead(links) + (slow if strict else [warning(each.text) for each in slow]) + _judge_late(links)


def _directions(links: Sequence[Link]) -> dict[tuple[str, str], float]:
    alive = [link for link in links if not link.error]
    there = {(link.first, link.second): link.there for link in alive}
    return there | {(link.second, link.first): link.back for link in alive}


def _judge_dead(links: Sequence[Link]) -> list[Finding]:
    dead = [link for link in links if link.error]
    unreachable = _shared_by_all([(link.first, link.second) for link in dead], links)
    findings = []
    for host in unreachable:
        error = next(link.error for link in dead if host in (link.first, link.second))
        findings.append(
            fault(
                f"no other host has a working link with host {host} (for example, {error}). "
                "Check its network and firewall, or exclude the host."
            )
        )
    return findings + [
        fault(
            f"the link between hosts {link.first} and {link.second} does not work: {link.error}. "
            "Check the firewall, the interface (GLOO_SOCKET_IFNAME) and the cable between them."
        )
        for link in dead
        if link.first not in unreachable and link.second not in unreachable
    ]


def _judge_slow(links: Sequence[Link]) -> list[Finding]:
    usual, speeds = usual_speed(links), _directions(links)
    slow = {direction: speed for direction, speed in speeds.items() if _is_slow(speed, usual)}
    hosts = dict.fromkeys(host for pair in speeds for host in pair)
    findings = []
    for host in hosts:
        sent = _all_slow(slow, speeds, [pair for pair in speeds if pair[0] == host])
        received = _all_slow(slow, speeds, [pair for pair in speeds if pair[1] == host])
        if not sent and not received:
            continue
        how = "sends and receives" if sent and received else "sends" if sent else "receives"
        figures = sorted(slow[pair] for pair in (*sent, *received))
        span = f"{units.bit_rate(figures[0])} to {units.bit_rate(figures[-1])}"
        findings.append(
            _slow(
                f"host {host} {how} slowly on all its links: {span}",
                median(figures),
                usual,
                f"Check the cable, port and settings of {host}, or exclude the host.",
            )
        )
        for pair in (*sent, *received):
            speeds.pop(pair, None)
    left = {pair: speed for pair, speed in slow.items() if pair in speeds}
    return findings + [_slow_link(pair, left, usual) for pair in left if pair < pair[::-1] or pair[::-1] not in left]


def _all_slow(
    slow: Mapping[tuple[str, str], float], speeds: Mapping[tuple[str, str], float], mine: list[tuple[str, str]]
) -> list[tuple[str, str]]:
    """The directions of a host, if there are at least two, all of them are slow, and others are not."""
    whole = len(mine) > 1 and all(pair in slow for pair in mine) and len(mine) < len(speeds)
    return mine if whole else []


def _slow_link(pair: tuple[str, str], slow: Mapping[tuple[str, str], float], usual: float) -> Finding:
    first, second = pair
    if (second, first) in slow:
        speeds = f"{units.bit_rate(slow[pair])} there, {units.bit_rate(slow[second, first])} back"
        worst = min(slow[pair], slow[second, first])
        text = f"the link between hosts {first} and {second} is slow: {speeds}"
    else:
        worst = slow[pair]
        text = f"the link from host {first} to host {second} is slow: {units.bit_rate(worst)}"
    return _slow(text, worst, usual, f"Check the cable and the switch between {first} and {second}.")


def _is_slow(speed: float, usual: float, factor: float = WARNING_FACTOR) -> bool:
    return speed * factor < min(usual, CEILING_BYTES_PER_SECOND)


def _slow(text: str, speed: float, usual: float, fix: str) -> Finding:
    message = f"{text}, {usual / speed:.1f} times slower than the usual {units.bit_rate(usual)}. {fix}"
    return fault(message) if _is_slow(speed, usual, FAULT_FACTOR) else warning(message)


def _usual_latency(links: Sequence[Link]) -> float:
    return median([link.latency_seconds for link in links if not link.error] or [0.0])


def _is_late(link: Link, usual: float) -> bool:
    return link.latency_seconds > max(LATENCY_FACTOR * usual, LATENCY_SECONDS)


def _judge_late(links: Sequence[Link]) -> list[Finding]:
    usual = _usual_latency(links)
    late = [link for link in links if not link.error and _is_late(link, usual)]
    hosts = _shared_by_all([(link.first, link.second) for link in late], links)
    text = f"{name_hosts(hosts)}: the latency of all links is high, expected {units.duration(usual)}." if hosts else ""
    findings = [warning(text)] if hosts else []
    return findings + [
        warning(
            f"the link between hosts {link.first} and {link.second} answers after "
            f"{units.duration(link.latency_seconds)}, others after {units.duration(usual)}."
        )
        for link in late
        if link.first not in hosts and link.second not in hosts
    ]


def _shared_by_all(pairs: Sequence[tuple[str, str]], links: Sequence[Link]) -> list[str]:
    """The hosts with at least two links whose links are all among the pairs; none if the pairs are all links."""
    if len(pairs) == len(links):
        return []
    of_host: dict[str, int] = {}
    for link in links:
        for host in (link.first, link.second):
            of_host[host] = of_host.get(host, 0) + 1
    return [host for host, count in of_host.items() if count > 1 and sum(host in pair for pair in pairs) == count]
