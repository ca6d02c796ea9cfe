"""What the rank that stands for its host does: measure its links and its clock, and look at the run's folder."""

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tutti.doctor.exchange import Exchange
from tutti.doctor.links import CONNECT_SECONDS, STALL_SECONDS, close_all, connect_all, measure, measure_clock
from tutti.doctor.plan import Plan
from tutti.doctor.shared_folder import LOOK_SECONDS, find_marks, leave_mark, remove_mark
from tutti.doctor.sweep import Link, Pair, Round

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
