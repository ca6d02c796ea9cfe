"""The tests of hosts: links, clocks and the run folder, measured by one rank a host and gathered by rank 0."""

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tutti.doctor.compare import compare_clocks
from tutti.doctor.exchange import Exchange
from tutti.doctor.findings import Finding, fault, warning
from tutti.doctor.judge import judge, suspects
from tutti.doctor.links import CONNECT_SECONDS, STALL_SECONDS, close_all, connect_all, measure, measure_clock
from tutti.doctor.plan import Link, Pair, Plan, Round, disjoint, gather_links
from tutti.doctor.shared_folder import LOOK_SECONDS, find_marks, judge_folder, leave_mark, remove_mark

_MEET_SECONDS = 2 * STALL_SECONDS


def examine_host(exchange: Exchange, plan: Plan, number: int) -> dict[str, Any]:
    """All tests of this host; every host must enter, in step."""
    connections = _reach(plan, number)
    try:
        deadline = time.monotonic() + plan.seconds / 2
        links = _sweep(exchange, plan, number, plan.rounds, connections, "round", deadline)
        clock = _measure_clock(connections.get(0))
    finally:
        close_all(list(connections.values()))
    return {
        "clock": clock,
        "links": [link.plain() for link in links],
        "unreachable": {other: why for other, why in connections.items() if isinstance(why, str)},
        **_share(exchange, plan, number),
    }


def look_again(exchange: Exchange, plan: Plan, number: int, rounds: list[Round]) -> list[dict[str, Any]]:
    """A second and longer look at some links."""
    mine = {second for each in rounds for first, second in each if first == number}
    connections = connect_all({other: plan.places[other] for other in mine}, plan.word)
    try:
        deadline = time.monotonic() + plan.seconds / 2
        return [link.plain() for link in _sweep(exchange, plan, number, rounds, connections, "again", deadline)]
    finally:
        close_all(list(connections.values()))


def _measure_clock(connection: socket.socket | str | None) -> tuple[float, float] | None:
    if isinstance(connection, socket.socket):
        with contextlib.suppress(OSError):
            return measure_clock(connection)
    return None


def _reach(plan: Plan, number: int) -> dict[int, socket.socket | str]:
    """Connect to every host that this one is paired with, both ways: a firewall may let one pass; and to rank 0's."""
    others = {place for each in plan.rounds for pair in each if number in pair for place in pair} | {0}
    return connect_all({other: plan.places[other] for other in sorted(others - {number})}, plan.word)


def _sweep(
    exchange: Exchange,
    plan: Plan,
    number: int,
    rounds: Sequence[Round],
    connections: Mapping[int, socket.socket | str],
    key: str,
    deadline: float,
) -> list[Link]:
    """The links that this host measures, in rounds that begin together; what is late is left out."""
    links = []
    for place, each in enumerate(rounds):
        exchange.meet(f"{key}/{place}", len(plan.places), CONNECT_SECONDS + _MEET_SECONDS)
        for first, second in _mine(each, number):
            connection = connections.get(second)
            if isinstance(connection, socket.socket) and time.monotonic() < deadline:
                names = plan.places[first].host, plan.places[second].host
                links.append(measure(connection, *names, plan.transfer_seconds * (2 if key == "again" else 1)))
    return links


def _mine(pairs: Round, number: int) -> list[Pair]:
    return [pair for pair in pairs if pair[0] == number]


def _share(exchange: Exchange, plan: Plan, number: int) -> dict[str, Any]:
    """Leave a mark in the run's folder; rank 0's host looks for all marks, the others for its."""
    folder, count = Path(plan.folder), len(plan.places)
    error = leave_mark(folder, plan.word, number)
    exchange.meet("marked", count, _MEET_SECONDS)
    written = range(count) if number == 0 else [0]
    seen = find_marks(folder, plan.word, list(written), LOOK_SECONDS)
    exchange.meet("looked", count, _MEET_SECONDS + LOOK_SECONDS)
    remove_mark(folder, plan.word, number)
    return {"folder_error": error, "seen": seen}


_MOST_SECOND_LOOKS = 8  # rounds


def follow_tests(exchange: Exchange, plan: Plan, number: int) -> None:
    """Do what is to be measured on this host, and again what seemed slow."""
    exchange.put(f"measured/{number}", examine_host(exchange, plan, number))
    rounds = exchange.take("again", 2 * plan.seconds)
    if rounds:
        exchange.put(f"measured again/{number}", look_again(exchange, plan, number, rounds))


def lead_tests(exchange: Exchange, plan: Plan, strict: bool) -> tuple[dict[str, float], list[Link], list[Finding]]:
    """Rank 0's host tests with the others, and what all have found: clocks, links, and what is wrong with them."""
    count, names = len(plan.places), [place.host for place in plan.places]
    if exchange.rank not in plan.speakers:
        return {}, [], []
    answers = [examine_host(exchange, plan, 0)]
    others = exchange.collect([f"measured/{number}" for number in range(1, count)], plan.seconds)
    answers += [others.get(f"measured/{number}") for number in range(1, count)]
    silent = [names[number] for number, answer in enumerate(answers) if answer is None]
    findings = [fault(f"host {host} has stopped answering in the middle of the link tests.") for host in silent]
    links = gather_links(plan, answers)
    again = _doubt(exchange, plan, links)
    links = [link.better_of(again.get((link.first, link.second), link)) for link in links]
    clocks = {names[n]: answer["clock"][0] for n, answer in enumerate(answers) if answer and answer["clock"]}
    clocks = {names[0]: 0.0} | clocks
    errors = {n: answer["folder_error"] for n, answer in enumerate(answers) if answer and answer["folder_error"]}
    seen = {n: answer["seen"] for n, answer in enumerate(answers) if answer}
    findings += judge_folder(plan.folder, names, errors, seen) + judge(links, strict) + compare_clocks(clocks)
    pairs = sum(map(len, plan.rounds))
    if len(links) < pairs and not silent:
        findings.append(warning(f"{pairs - len(links)} of {pairs} links were not measured: the time was over."))
    return clocks, links, findings


def _doubt(exchange: Exchange, plan: Plan, links: Sequence[Link]) -> dict[tuple[str, str], Link]:
    """A second look at links that seem slow; something else may have disturbed the first."""
    number = {place.host: index for index, place in enumerate(plan.places)}
    pairs = [(number[link.first], number[link.second]) for link in suspects(links)]
    rounds = disjoint(pairs)[:_MOST_SECOND_LOOKS]
    exchange.put("again", rounds)
    if not rounds:
        return {}
    found = {"": look_again(exchange, plan, 0, rounds)}
    found |= exchange.collect([f"measured again/{n}" for n in range(1, len(plan.places))], plan.seconds)
    measured = [Link(**plain) for each in found.values() for plain in each]
    return {(link.first, link.second): link for link in measured}
