"""The tests of hosts: links, clocks, the run folder and an all-reduce, gathered by rank 0."""

import contextlib
import os
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tutti import units
from tutti.doctor.exchange import StoreExchange, decode
from tutti.doctor.findings import Finding, compare_clocks, fault, name_hosts, warning
from tutti.doctor.judge import judge, suspects
from tutti.doctor.links import CONNECT_SECONDS, STALL_SECONDS, close_all, connect_all, measure, measure_clock
from tutti.doctor.plan import HostTests, Link, LinkPlan, Pair, Round, disjoint, gather_links
from tutti.ranks.group import release_tensors
from tutti.ranks.placement import Placement

LOOK_SECONDS = 4.0


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the nearest above it that is there."""
    place = path.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    return place


def leave_mark(folder: Path, secret: str, number: int) -> str | None:
    """Write this host's mark; why it cannot, or nothing."""
    if not folder.is_dir():
        return "it is not there"
    try:
        with open(_mark(folder, secret, number), "w") as file:
            file.write(secret)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"it cannot be written: {error.strerror}"
    return None


def find_marks(folder: Path, secret: str, numbers: Sequence[int], seconds: float = LOOK_SECONDS) -> list[int]:
    """Whose marks are seen here; network file systems may take a moment to show them."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            names = set(os.listdir(folder))
            seen = [number for number in numbers if _mark(folder, secret, number).name in names]
            if len(seen) == len(numbers):
                return seen
        if time.monotonic() > deadline:
            return [number for number in numbers if _mark(folder, secret, number).is_file()]
        time.sleep(0.05)


def remove_mark(folder: Path, secret: str, number: int) -> None:
    with contextlib.suppress(OSError):
        _mark(folder, secret, number).unlink()


def judge_folder(
    folder: str, hosts: Sequence[str], errors: Mapping[int, str], seen: Mapping[int, Sequence[int]]
) -> list[Finding]:
    """Hosts, by their numbers, that cannot write into the folder or have another one of that name."""
    findings = [
        fault(f"host {hosts[number]} cannot use the run's folder {folder}: {why}. Choose one that all hosts share.")
        for number, why in errors.items()
    ]
    apart = [
        number
        for number in range(len(hosts))
        if number not in errors and number > 0 and (0 not in seen.get(number, []) or number not in seen.get(0, []))
    ]
    if apart and 0 not in errors:
        findings.append(
            fault(
                f"{name_hosts([hosts[number] for number in apart])} and host {hosts[0]} do not share {folder}: what "
                "one writes there the other does not see. Choose a folder on a file system that all hosts share, "
                "with out=FOLDER."
            )
        )
    return findings


def _mark(folder: Path, secret: str, number: int) -> Path:
    return folder / f".tutti-doctor-{secret[:12]}-{number}"


ALL_REDUCE_SECONDS = 30.0
_SMALL, _LARGE, _LEAST = 8, 8_000_000, 250_000
_LONGEST_SECONDS = 1.5
_REPEATS = 5
_REST_SECONDS = 5.0  # for the others, once rank 0 has failed


def choose_bytes(links: Sequence[Link]) -> int:
    """8 MB, or less where the slowest link would make that long."""
    slowest = min((min(link.there, link.back) for link in links if not link.error), default=float("inf"))
    return int(max(_LEAST, min(_LARGE, slowest * _LONGEST_SECONDS / 2)))


def all_reduce(store: dist.Store, placement: Placement, interface: str, large: int) -> list[dict[str, Any]] | str:
    """Bytes and seconds of a small and a large all-reduce, or why there was none; every rank must enter."""
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    deadline = timedelta(seconds=ALL_REDUCE_SECONDS)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("all_reduce", store),
            rank=placement.rank,
            world_size=placement.world_size,
            timeout=deadline,
        )
        _reduce(_SMALL)
        small = statistics.median(_reduce(_SMALL) for _ in range(_REPEATS))
        times = [{"bytes": _SMALL, "seconds": small}, {"bytes": large, "seconds": _reduce(large)}]
        dist.barrier()
        release_tensors()
        dist.destroy_process_group()
        return times
    except RuntimeError as error:
        return str(error).splitlines()[0]


def lead_all_reduce(
    exchange: StoreExchange, store: dist.Store, placement: Placement, interface: str, size: int
) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Rank 0's all-reduce, and what is wrong where it or another rank could not do it."""
    answer = all_reduce(store, placement, interface, size)
    keys = {rank: f"all_reduce/{rank}" for rank in range(1, placement.world_size)}
    others = exchange.collect(keys.values(), ALL_REDUCE_SECONDS if isinstance(answer, list) else _REST_SECONDS)
    failed = {0: answer} | {
        rank: others.get(f"all_reduce/{rank}", "no answer") for rank in range(1, placement.world_size)
    }
    failed = {rank: text for rank, text in failed.items() if isinstance(text, str)}
    if isinstance(answer, list) and not failed:
        return answer, []
    rank = min(failed)
    text = (
        f"an all-reduce over Gloo failed on {units.ranks(sorted(failed))} of {placement.world_size}, on rank {rank} "
        f"with: {failed[rank]}. The links work by themselves: check GLOO_SOCKET_IFNAME and the limit of open files."
    )
    return [], [fault(text)]


def _reduce(size: int) -> float:
    values = torch.ones(max(1, size // 4))
    begin = time.perf_counter()
    dist.all_reduce(values)
    seconds = time.perf_counter() - begin
    if not bool((values == dist.get_world_size()).all()):
        raise RuntimeError(f"an all-reduce of {size} bytes of ones gave other numbers than {dist.get_world_size()}")
    return seconds


_MEET_SECONDS = 2 * STALL_SECONDS


def examine_host(exchange: StoreExchange, plan: LinkPlan, number: int) -> HostTests:
    """All tests of this host; every host must enter, in step."""
    connections = _reach(plan, number)
    try:
        deadline = time.monotonic() + plan.seconds / 2
        links = _sweep(exchange, plan, number, plan.rounds, connections, "round", deadline)
        clock = _measure_clock(connections.get(0))
    finally:
        close_all(list(connections.values()))
    unreachable = {other: why for other, why in connections.items() if isinstance(why, str)}
    return HostTests(clock, tuple(links), unreachable, *_share(exchange, plan, number))


def look_again(exchange: StoreExchange, plan: LinkPlan, number: int, rounds: list[Round]) -> list[Link]:
    """Measure some links again, for longer."""
    mine = {second for each in rounds for first, second in each if first == number}
    connections = connect_all({other: plan.places[other] for other in mine}, plan.secret)
    try:
        deadline = time.monotonic() + plan.seconds / 2
        return _sweep(exchange, plan, number, rounds, connections, "again", deadline)
    finally:
        close_all(list(connections.values()))


def _measure_clock(connection: socket.socket | str | None) -> tuple[float, float] | None:
    if isinstance(connection, socket.socket):
        with contextlib.suppress(OSError):
            return measure_clock(connection)
    return None


def _reach(plan: LinkPlan, number: int) -> dict[int, socket.socket | str]:
    """Connect to every host that this one is paired with, both ways: a firewall may let one pass; and to rank 0's."""
    others = {place for each in plan.rounds for pair in each if number in pair for place in pair} | {0}
    return connect_all({other: plan.places[other] for other in sorted(others - {number})}, plan.secret)


def _sweep(
    exchange: StoreExchange,
    plan: LinkPlan,
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


def _share(exchange: StoreExchange, plan: LinkPlan, number: int) -> tuple[str | None, tuple[int, ...]]:
    """Leave a mark in the run's folder; rank 0's host looks for all marks, the others for its."""
    folder, count = Path(plan.folder), len(plan.places)
    error = leave_mark(folder, plan.secret, number)
    exchange.meet("marked", count, _MEET_SECONDS)
    written = range(count) if number == 0 else [0]
    seen = find_marks(folder, plan.secret, list(written), LOOK_SECONDS)
    exchange.meet("looked", count, _MEET_SECONDS + LOOK_SECONDS)
    remove_mark(folder, plan.secret, number)
    return error, tuple(seen)


_MOST_REPEATED_ROUNDS = 8  # rounds


def follow_tests(exchange: StoreExchange, plan: LinkPlan, number: int) -> None:
    """Do what is to be measured on this host, and again what seemed slow."""
    exchange.put(f"measured/{number}", examine_host(exchange, plan, number))
    rounds = exchange.take("again", 2 * plan.seconds)
    if rounds:
        exchange.put(f"measured again/{number}", look_again(exchange, plan, number, rounds))


def lead_tests(
    exchange: StoreExchange, plan: LinkPlan, strict: bool
) -> tuple[dict[str, float], list[Link], list[Finding]]:
    """Rank 0's host tests with the others, and what all have found: clocks, links, and what is wrong with them."""
    count, names = len(plan.places), [place.host for place in plan.places]
    if exchange.rank not in plan.first_ranks:
        return {}, [], []
    answers: list[HostTests | None] = [examine_host(exchange, plan, 0)]
    others = exchange.collect([f"measured/{number}" for number in range(1, count)], plan.seconds)
    answers += [_decode(others.get(f"measured/{number}"), names[number]) for number in range(1, count)]
    silent = [names[number] for number, answer in enumerate(answers) if answer is None]
    findings = [fault(f"host {host} stopped answering during the link tests.") for host in silent]
    links = gather_links(plan, answers)
    again = _measure_suspects(exchange, plan, links)
    links = [link.better_of(again.get((link.first, link.second), link)) for link in links]
    known = {number: answer for number, answer in enumerate(answers) if answer}
    clocks = {names[0]: 0.0} | {names[n]: answer.clock[0] for n, answer in known.items() if answer.clock}
    errors = {n: answer.folder_error for n, answer in known.items() if answer.folder_error}
    seen = {n: answer.seen for n, answer in known.items()}
    findings += judge_folder(plan.folder, names, errors, seen) + judge(links, strict) + compare_clocks(clocks)
    pairs = sum(map(len, plan.rounds))
    if len(links) < pairs and not silent:
        findings.append(warning(f"{pairs - len(links)} of {pairs} links were not measured: the time was over."))
    return clocks, links, findings


def _measure_suspects(exchange: StoreExchange, plan: LinkPlan, links: Sequence[Link]) -> dict[tuple[str, str], Link]:
    """Measure links that seem slow again, since other traffic may have disturbed the first measurement."""
    number = {place.host: index for index, place in enumerate(plan.places)}
    pairs = [(number[link.first], number[link.second]) for link in suspects(links)]
    rounds = disjoint(pairs)[:_MOST_REPEATED_ROUNDS]
    exchange.put("again", rounds)
    if not rounds:
        return {}
    measured = look_again(exchange, plan, 0, rounds)
    others = exchange.collect([f"measured again/{n}" for n in range(1, len(plan.places))], plan.seconds)
    for key, value in others.items():
        measured += decode(value, list[Link], f"host {plan.places[int(key.rpartition('/')[2])].host}")
    return {(link.first, link.second): link for link in measured}


def _decode(value: Any, host: str) -> HostTests | None:
    return None if value is None else decode(value, HostTests, f"host {host}")
