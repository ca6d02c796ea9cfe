"""Ranks bound to cores of their own, so that they neither wander between memory domains nor push each other aside."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal

from tutti.launch.topology import Core, Topology, cores_near_gpus, format_list, read_topology

Mode = Literal["none", "compact", "spread"]


@dataclass(frozen=True)
class Binding:
    """The processors of a rank, and why it has them."""

    mode: Mode
    bound: bool  # whether they were set here
    cpus: tuple[int, ...]
    domains: tuple[int, ...]  # the memory domains (NUMA) they are next to
    threads: int | None  # one for each physical core of a rank that is bound
    why: str

    def line(self) -> str:
        """What the screen says of a rank's cores."""
        domains = f" of memory domain {format_list(self.domains)}" if self.domains else ""
        return f"cores {format_list(self.cpus)}{domains} ({self.why})"

    def record(self) -> dict[str, Any]:
        """What the record of a run keeps."""
        return asdict(self)


def bind(mode: Mode, local_rank: int, local_size: int, shared: bool = False) -> Binding:
    """Bind this rank as the mode says; to be called before threads are started, which would stay where they are.

    `shared` says that the ranks of this host share the processors this one may use, because nobody has bound them yet.
    Without it, a rank that may use less than the whole host counts as bound by its launcher, and stays as it is.
    """
    if not hasattr(os, "sched_setaffinity"):
        return Binding(mode, False, (), (), None, "this system does not bind processes to cores")
    topology, allowed = read_topology(), os.sched_getaffinity(0)
    if mode == "none":
        return _as_it_is(mode, allowed, topology, "not bound")
    if not shared and allowed < {cpu for core in topology for cpu in core.cpus}:
        return _as_it_is(mode, allowed, topology, "as the launcher has bound it")
    near = cores_near_gpus(os.environ)
    cpus = choose_near_gpu(mode, local_rank, local_size, allowed, topology, near)
    why = f"{mode}, next to its GPU" if cpus else mode
    cpus = cpus or choose_cores(mode, local_rank, local_size, allowed, topology)
    if cpus is None:
        usable = len(_usable(allowed, topology))
        return _as_it_is(mode, allowed, topology, f"not bound: {local_size} ranks share {usable} core(s)")
    os.sched_setaffinity(0, cpus)
    return _describe(mode, True, set(cpus), topology, why)


def choose_cores(
    mode: Mode, local_rank: int, local_size: int, allowed_cores: set[int], topology: Topology
) -> list[int] | None:
    """The processors of a rank: whole cores, as many for each rank; nothing where there are fewer cores than ranks.

    `compact` fills one memory domain after the other, `spread` deals ranks to the domains in turn.
    """
    cores = _usable(allowed_cores, topology)
    if mode == "none" or len(cores) < local_size:
        return None
    domains = [list(group) for _, group in groupby(cores, key=lambda core: core.domain)]
    if mode == "compact":
        shares = _fill(domains, local_size)
    else:
        shares = _deal(domains, local_size)
    return sorted(cpu for core in shares[local_rank] for cpu in core.cpus)


def choose_near_gpu(
    mode: Mode, local_rank: int, local_size: int, allowed: set[int], topology: Topology, near: Sequence[set[int]]
) -> list[int] | None:
    """The processors of a rank among those next to its GPU, shared with the ranks whose GPUs are next to the same."""
    if len(near) < local_size:
        return None
    own = near[local_rank]
    others = [rank for rank in range(local_size) if near[rank] == own]
    return choose_cores(mode, others.index(local_rank), len(others), allowed & own, topology)


def _usable(allowed: set[int], topology: Topology) -> list[Core]:
    """The cores of which a rank may use some hardware threads, with those."""
    kept = (Core(tuple(cpu for cpu in core.cpus if cpu in allowed), core.domain) for core in topology)
    return [core for core in kept if core.cpus]


def _fill(domains: list[list[Core]], ranks: int) -> list[list[Core]]:
    """Neighbouring cores; a rank stays inside a domain where that costs nobody a core."""
    share = sum(map(len, domains)) // ranks
    whole = [domain[i : i + share] for domain in domains for i in range(0, len(domain) - share + 1, share)]
    if len(whole) >= ranks:
        return whole[:ranks]
    cores = [core for domain in domains for core in domain]
    return [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]


def _deal(domains: list[list[Core]], ranks: int) -> list[list[Core]]:
    """Ranks to domains in turn, or domains to ranks where those are fewer."""
    if ranks <= len(domains):
        return _equal([[core for domain in domains[rank::ranks] for core in domain] for rank in range(ranks)])
    guests = [len(range(place, ranks, len(domains))) for place in range(len(domains))]
    share = min(len(domain) // count for domain, count in zip(domains, guests, strict=True))
    if share == 0:  # a small domain cannot keep its guests: they get their cores wherever these are
        return _fill(domains, ranks)
    starts = [(rank % len(domains), rank // len(domains) * share) for rank in range(ranks)]
    return [domains[place][start : start + share] for place, start in starts]


def _equal(shares: list[list[Core]]) -> list[list[Core]]:
    least = min(map(len, shares))
    return [share[:least] for share in shares]


def _as_it_is(mode: Mode, allowed: set[int], topology: Topology, why: str) -> Binding:
    return _describe(mode, False, allowed, topology, why)


def _describe(mode: Mode, bound: bool, cpus: set[int], topology: Topology, why: str) -> Binding:
    cores = _usable(cpus, topology)
    domains = tuple(sorted({core.domain for core in cores}))
    return Binding(mode, bound, tuple(sorted(cpus)), domains, len(cores) if bound else None, why)
