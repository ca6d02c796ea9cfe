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
    """The folder itself, or the nearest existing one above it."""
    place = path.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    return place


def write_test_file(folder: Path, secret: str, number: int) -> str | None:
    """Write the test file of this host; returns why it cannot be written, or None."""
    if not folder.is_dir():
        return "it does not exist"
    try:
        with open(_test_file(folder, secret, number), "w", opener=_open_private) as file:
            file.write(secret)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"it cannot be written: {error.strerror}"
    return None


def find_test_files(folder: Path, secret: str, numbers: Sequence[int], seconds: float = LOOK_SECONDS) -> list[int]:
    """The hosts whose test files are visible here; network file systems may take a moment to show them."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            names = set(os.listdir(folder))
            seen = [number for number in numbers if _test_file(folder, secret, number).name in names]
            if len(seen) == len(numbers):
                return seen
        if time.monotonic() > deadline:
            return [number for number in numbers if _test_file(folder, secret, number).is_file()]
        time.sleep(0.05)


def remove_test_file(folder: Path, secret: str, number: int) -> None:
    with contextlib.suppress(OSError):
        _test_file(folder, secret, number).unlink()


def judge_folder(
    folder: str, hosts: Sequence[str], errors: Mapping[int, str], seen: Mapping[int, Sequence[int]]
) -> list[Finding]:
    """Findings about hosts, by number, that cannot write to the folder or do not share it."""
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
                f"{name_hosts([hosts[number] for number in apart])} and host {hosts[0]} do not share {folder}: files "
                "of one are not visible to the other. Choose a folder on a file system that all hosts share, "
                "with out=FOLDER."
            )
        )
    return findings


def _open_private(path: str, flags: int) -> int:
    """Open a file that other users cannot read."""
    return os.open(path, flags, 0o600)


def _test_file(folder: Path, secret: str, number: int) -> Path:
    return folder / f".tutti-doctor-{secret[:12]}-{number}"


ALL_REDUCE_SECONDS = 30.0
_SMALL, _LARGE, _LEAST = 8, 8_000_000, 250_000
_LONGEST_SECONDS = 1.5
_REPEATS = 5
_AFTER_FAILURE_SECONDS = 5.0  # to wait for other ranks when rank 0 has failed


def choose_bytes(links: Sequence[Link]) -> int:
    """The size of the large all-reduce: 8 MB, or less if the slowest link would take too long."""
    slowest = min((min(link.there, link.back) for link in links if not link.error), default=float("inf"))
    return int(max(_LEAST, min(_LARGE, slowest * _LONGEST_SECONDS / 2)))


def all_reduce(store: dist.Store, placement: Placement, interface: str, large: int) -> list[dict[str, Any]] | str:
    """Bytes and seconds of a small and a large all-reduce, or why it failed; every rank must call this."""
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
    """The all-reduce of rank 0, and a finding if it failed on any rank."""
    answer = all_reduce(store, placement, interface, size)
    keys = {rank: f"all_reduce/{rank}" for rank in range(1, placement.world_size)}
    others = exchange.collect(keys.values(), ALL_REDUCE_SECONDS if isinstance(answer, list) else _AFTER_FAILURE_SECONDS)
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
    """Run all tests of this host; every host must call this at the same time."""
    connections = _reach(plan, number)
    try:
        deadline = time.monotonic() + plan.seconds / 2
        links = _sweep(exchange, plan, number, plan.rounds, connections, "round", deadline)
        clock = _measure_clock(connections.get(0))
    finally:
        close_all(list(connections.values()))
    unreachable = {other: why for other, why in connections.items() if isinstance(why, str)}
    return HostTests(clock, tuple(links), unreachable, *_test_folder(exchange, plan, number))


def look_again(exchange: StoreExchange, plan: LinkPlan, number: int, rounds: list[Round]) -> list[Link]:
    """Measure some links again, for a longer time."""
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
    """Connect to the host of rank 0 and to all paired hosts, in both directions: a firewall may block one."""
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
    """Measure the links of this host, in rounds that begin together; links after the deadline are left out."""
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


def _test_folder(exchange: StoreExchange, plan: LinkPlan, number: int) -> tuple[str | None, tuple[int, ...]]:
    """Write a test file to the run folder; rank 0's host looks for the files of all hosts, the others for its file."""
    folder, count = Path(plan.folder), len(plan.places)
    error = write_test_file(folder, plan.secret, number)
    exchange.meet("written", count, _MEET_SECONDS)
    written = range(count) if number == 0 else [0]
    seen = find_test_files(folder, plan.secret, list(written), LOOK_SECONDS)
    exchange.meet("looked", count, _MEET_SECONDS + LOOK_SECONDS)
    remove_test_file(folder, plan.secret, number)
    return error, tuple(seen)


_MOST_REPEATED_ROUNDS = 8  # rounds


def follow_tests(exchange: StoreExchange, plan: LinkPlan, number: int) -> None:
    """Run the tests of this host, and measure again the links that seemed slow."""
    exchange.put(f"measured/{number}", examine_host(exchange, plan, number))
    rounds = exchange.take("again", 2 * plan.seconds)
    if rounds:
        exchange.put(f"measured again/{number}", look_again(exchange, plan, number, rounds))


def lead_tests(
    exchange: StoreExchange, plan: LinkPlan, strict: bool
) -> tuple[dict[str, float], list[Link], list[Finding]]:
    """Run the tests of rank 0's host, and collect those of all hosts: clocks, links, and findings about them."""
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
        findings.append(warning(f"{pairs - len(links)} of {pairs} links were not measured, for lack of time."))
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
