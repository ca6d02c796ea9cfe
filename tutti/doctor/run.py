"""`tutti doctor` on the ranks: gather facts, compare, measure links, test an all-reduce; and the preflight of a run."""

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tutti import units
from tutti.config.run import RunConfig
from tutti.doctor.exchange import StoreExchange, decode
from tutti.doctor.facts import Facts, find_facts
from tutti.doctor.findings import Finding, compare, fault
from tutti.doctor.hosts import (
    ALL_REDUCE_SECONDS,
    all_reduce,
    choose_bytes,
    follow_tests,
    lead_all_reduce,
    lead_tests,
    nearest_folder,
)
from tutti.doctor.links import Server, own_address
from tutti.doctor.plan import LinkPlan, check_addresses, make_plan, name_hosts_apart
from tutti.doctor.report import DoctorReport, write_record
from tutti.errors import LaunchError
from tutti.ranks.placement import Placement
from tutti.ranks.store import meet, start_secret

WAIT_SECONDS = 60.0
_LEAVE_SECONDS = 5.0


def examine(
    placement: Placement, config: RunConfig | None, folder: Path, wait_seconds: float = WAIT_SECONDS
) -> DoctorReport | None:
    """Run all checks as one of the ranks; rank 0 returns the report."""
    meeting = meet(placement, wait_seconds)
    try:
        return _examine(placement, config, folder, meeting.store, wait_seconds, quick=False)[1]
    finally:
        meeting.hub.close()


def preflight(placement: Placement, config: RunConfig, folder: Path, store: dist.Store | None = None) -> None:
    """The short checks at the start of a run; every rank raises faults, rank 0 prints warnings and writes a record.

    With the store of the rendezvous, the ranks need no second one.
    """
    seconds = config.runtime.start_timeout_seconds
    own = None if store else meet(placement, seconds)
    try:
        met = own.store if own else store
        assert met is not None
        faults, report = _examine(placement, config, folder, met, seconds, quick=True)
    finally:
        if own:
            own.hub.close()
    if report:
        with contextlib.suppress(OSError):  # that the folder cannot be written is among the faults
            write_record(report, folder / "doctor.json")
        for text in report.warnings:
            print(f"warning: {text}", flush=True)
    if faults:
        error = LaunchError("\n".join(["the preflight found faults:", *(f"  fault: {text}" for text in faults)]))
        error.agreed = True
        raise error


def _examine(
    placement: Placement, config: RunConfig | None, folder: Path, store: dist.Store, wait_seconds: float, quick: bool
) -> tuple[list[str], DoctorReport | None]:
    """The faults on every rank, and the report on rank 0."""
    begin = time.monotonic()
    own_secret = start_secret(placement)
    exchange = StoreExchange(dist.PrefixStore("doctor", store), placement.rank, own_secret)
    secret = own_secret.key("links").hex()
    address, interface = own_address(placement, exchange, wait_seconds)
    server = Server(address, secret) if address and placement.local_rank == 0 else None
    try:
        own = find_facts(placement, config, nearest_folder(folder), address, interface, server.port if server else 0)
        exchange.put(f"facts/{placement.rank}", own)
        if placement.rank == 0:
            left = max(1.0, wait_seconds - (time.monotonic() - begin))
            report = _lead(exchange, placement, store, own, secret, left, quick)
            exchange.put("faults", report.faults)
            exchange.collect([f"left/{rank}" for rank in _others(report.facts)], _LEAVE_SECONDS)
            return report.faults, _timed(report, begin)
        return _follow(exchange, placement, store, own, wait_seconds), None
    finally:
        if server:
            server.close()


def _lead(
    exchange: StoreExchange,
    placement: Placement,
    store: dist.Store,
    own: Facts,
    secret: str,
    seconds: float,
    quick: bool,
) -> DoctorReport:
    """The work of rank 0: gather facts, plan the tests, collect findings."""
    found = exchange.collect([f"facts/{rank}" for rank in range(placement.world_size)], seconds)
    facts = name_hosts_apart([decode(value, Facts, f"rank {key.rpartition('/')[2]}") for key, value in found.items()])
    hosts = list(dict.fromkeys(each.host for each in facts))
    findings = _find_absent(facts, placement.world_size, seconds) + compare(facts) + check_addresses(facts)
    plan = make_plan(facts, own.folder, secret, quick)
    exchange.put("plan", plan)
    clocks, links, measured = lead_tests(exchange, plan, strict=not quick)
    findings += measured
    reduced: list[dict[str, Any]] = []
    broken = any(link.error for link in links) or len(facts) < placement.world_size or check_addresses(facts)
    size = 0 if quick or broken or placement.world_size == 1 else choose_bytes(links)
    exchange.put("all_reduce", size)
    if size:
        reduced, failed = lead_all_reduce(exchange, store, placement, own.interface, size)
        findings += failed
    findings.sort(key=lambda each: each.level)
    return DoctorReport(placement.world_size, hosts, facts, clocks, links, reduced, findings)


def _follow(
    exchange: StoreExchange, placement: Placement, store: dist.Store, own: Facts, wait_seconds: float
) -> list[str]:
    """The work of another rank: the tests of its host if it is the first rank there, and the all-reduce."""
    sent = exchange.take("plan", wait_seconds + ALL_REDUCE_SECONDS)
    plan = None if sent is None else decode(sent, LinkPlan, "rank 0")
    if plan is None or placement.rank not in plan.ranks:
        raise LaunchError(
            f"rank {placement.rank} connected after rank 0 had stopped waiting for it. Start all ranks at once."
        )
    if placement.rank in plan.first_ranks:
        follow_tests(exchange, plan, plan.first_ranks.index(placement.rank))
    size = exchange.take("all_reduce", 3 * plan.seconds)
    if size:
        answer = all_reduce(store, placement, own.interface, size)
        exchange.put(f"all_reduce/{placement.rank}", answer)
    faults = exchange.take("faults", 3 * ALL_REDUCE_SECONDS)
    exchange.put(f"left/{placement.rank}", True)
    if faults is None:
        raise LaunchError("rank 0 did not send its findings. See its output.")
    return faults


def _find_absent(facts: Sequence[Facts], world_size: int, seconds: float) -> list[Finding]:
    absent = sorted(set(range(world_size)) - {each.rank for each in facts})
    if not absent:
        return []
    here = units.ranks(each.rank for each in facts)
    text = f"{units.ranks(absent)} of {world_size} did not connect within {seconds:.0f} s; {here} did."
    return [fault(f"{text} See the output of the missing ranks.")]


def _others(facts: Sequence[Facts]) -> list[int]:
    return [each.rank for each in facts if each.rank]


def _timed(report: DoctorReport, begin: float) -> DoctorReport:
    return dataclasses.replace(report, seconds=time.monotonic() - begin)
