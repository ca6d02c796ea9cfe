"""The cores and the memory of a host: topology, threads per rank, the binding of ranks to cores, free memory."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from tutti import units

_SYSTEM = Path("/sys/devices/system")
_PCI = Path("/sys/bus/pci/devices")
_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader")
_QUERY_SECONDS = 10


@dataclass(frozen=True)
class Core:
    """A physical core: the numbers of its hardware threads, and its NUMA node."""

    cpus: tuple[int, ...]
    domain: int


Topology = tuple[Core, ...]


def read_topology(system: Path = _SYSTEM) -> Topology:
    """The cores that are online, ordered by NUMA node; if the kernel does not report them, every CPU is a core."""
    online = _read_list(system / "cpu" / "online") or set(range(os.cpu_count() or 1))
    domains = {}
    for folder in (system / "node").glob("node[0-9]*"):
        domains |= dict.fromkeys(_read_list(folder / "cpulist"), int(folder.name.removeprefix("node")))
    cores: dict[tuple[int, ...], int] = {}
    for cpu in sorted(online):
        threads = _read_list(system / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list") & online
        cores[tuple(sorted(threads or {cpu}))] = domains.get(cpu, 0)
    return tuple(Core(*each) for each in sorted(cores.items(), key=lambda each: (each[1], each[0])))


def cores_near_gpus(env: Mapping[str, str], pci: Path = _PCI) -> list[set[int]]:
    """The CPUs near each visible GPU, in the order in which ranks use the GPUs; empty if unknown."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, check=True, timeout=_QUERY_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return []
    found = [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines()]
    near = [_read_list(pci / bus[-12:].lower() / "local_cpulist") for *_, bus in visible_gpus(found, env)]
    return near if all(near) else []


def visible_gpus(found: list[list[str]], env: Mapping[str, str]) -> list[list[str]]:
    """The GPUs (index, uuid, bus) that CUDA_VISIBLE_DEVICES lists, in its order.

    As in CUDA itself, entries after one that does not exist are ignored.
    """
    listed = env.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return found
    shown: list[list[str]] = []
    for name in listed.split(","):
        match = [gpu for gpu in found if name.strip() == gpu[0] or (name.strip() and gpu[1].startswith(name.strip()))]
        if len(match) != 1:
            break
        shown += match
    return shown


def parse_list(text: str) -> set[int]:
    """The kernel's short form of numbers: '0-3,8' is {0, 1, 2, 3, 8}."""
    numbers: set[int] = set()
    for item in filter(None, text.strip().split(",")):
        first, _, last = item.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def _read_list(path: Path) -> set[int]:
    try:
        return parse_list(path.read_text())
    except (OSError, ValueError):
        return set()


Mode = Literal["none", "compact", "spread"]


@dataclass(frozen=True)
class Binding:
    """The CPUs of a rank, and the reason for the choice."""

    mode: Mode
    bound: bool  # by tutti, not by the launcher
    cpus: tuple[int, ...]
    domains: tuple[int, ...]  # their NUMA nodes
    threads: int | None  # one for each physical core of a rank that is bound
    why: str

    def line(self) -> str:
        """The line about the cores of a rank on the screen."""
        domains = f" of memory domain {units.ranges(self.domains)}" if self.domains else ""
        return f"cores {units.ranges(self.cpus)}{domains} ({self.why})"

    def record(self) -> dict[str, Any]:
        """The binding as it is written to the record of a run."""
        return asdict(self)


def bind(mode: Mode, local_rank: int, local_size: int, shared: bool = False) -> Binding:
    """Bind this rank to cores; call it before threads are started, which would keep their own binding.

    `shared` means that the ranks of this host share the CPUs that this rank may use, because they are not bound yet.
    Without it, a rank that may use only a part of the host counts as bound by its launcher, and is not bound again.
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
    """The CPUs of a rank: whole cores, the same number for each rank; None if there are fewer cores than ranks.

    `compact` fills one NUMA node after the other, `spread` assigns ranks to the nodes in turn.
    """
    cores = _usable(allowed_cores, topology)
    if mode == "none" or len(cores) < local_size:
        return None
    domains = [list(group) for _, group in groupby(cores, key=lambda core: core.domain)]
    if mode == "compact":
        shares = _fill(domains, local_size)
    else:
        shares = _assign_in_turn(domains, local_size)
    return sorted(cpu for core in shares[local_rank] for cpu in core.cpus)


def choose_near_gpu(
    mode: Mode, local_rank: int, local_size: int, allowed: set[int], topology: Topology, near: Sequence[set[int]]
) -> list[int] | None:
    """The CPUs of a rank among those near its GPU, which it shares with ranks whose GPUs are near the same CPUs."""
    if len(near) < local_size:
        return None
    own = near[local_rank]
    others = [rank for rank in range(local_size) if near[rank] == own]
    return choose_cores(mode, others.index(local_rank), len(others), allowed & own, topology)


def _usable(allowed: set[int], topology: Topology) -> list[Core]:
    """The cores of which a rank may use some hardware threads, with these threads alone."""
    kept = (Core(tuple(cpu for cpu in core.cpus if cpu in allowed), core.domain) for core in topology)
    return [core for core in kept if core.cpus]


def _fill(domains: list[list[Core]], ranks: int) -> list[list[Core]]:
    """Neighbouring cores; a rank stays within a NUMA node if no rank loses a core by that."""
    share = sum(map(len, domains)) // ranks
    whole = [domain[i : i + share] for domain in domains for i in range(0, len(domain) - share + 1, share)]
    if len(whole) >= ranks:
        return whole[:ranks]
    cores = [core for domain in domains for core in domain]
    return [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]


def _assign_in_turn(domains: list[list[Core]], ranks: int) -> list[list[Core]]:
    """Assign ranks to NUMA nodes in turn, or nodes to ranks if there are fewer ranks."""
    if ranks <= len(domains):
        return _equal([[core for domain in domains[rank::ranks] for core in domain] for rank in range(ranks)])
    counts = [len(range(place, ranks, len(domains))) for place in range(len(domains))]
    share = min(len(domain) // count for domain, count in zip(domains, counts, strict=True))
    if share == 0:  # a NUMA node has fewer cores than ranks: ranks get cores of any node
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


def threads_per_rank(local_size: int, env: Mapping[str, str], given: int | None = None) -> int:
    """The number of threads: the given one, else the environment's, else the cores of the host divided by its ranks."""
    if given:
        return given
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
        if env.get(name, "").isdigit() and int(env[name]) > 0:
            return int(env[name])
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if allowed < (os.cpu_count() or 1):  # the launcher has bound this rank to cores of its own
        return allowed
    return max(1, allowed // local_size)


def read_memory(path: str = "/proc/meminfo") -> tuple[int, int]:
    """Bytes of available memory and of all memory; zeros if the system does not report them."""
    try:
        words = [line.split() for line in Path(path).read_text().splitlines()]
    except OSError:
        return 0, 0
    found = {word[0].rstrip(":"): int(word[1]) * 1024 for word in words if len(word) > 1}
    return found.get("MemAvailable", found.get("MemFree", 0)), found.get("MemTotal", 0)
