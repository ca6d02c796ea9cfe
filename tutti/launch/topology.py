"""The cores of this host as the kernel tells them: hardware threads, memory domains, and the GPUs next to them."""

import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_SYSTEM = Path("/sys/devices/system")
_PCI = Path("/sys/bus/pci/devices")
_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader")
_QUERY_SECONDS = 10


@dataclass(frozen=True)
class Core:
    """A physical core: the numbers of its hardware threads, and the memory domain (NUMA) it is next to."""

    cpus: tuple[int, ...]
    domain: int


Topology = tuple[Core, ...]


def read_topology(system: Path = _SYSTEM) -> Topology:
    """The cores that are switched on, domain by domain; where the kernel does not say, every processor is a core."""
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
    """The processors next to each visible GPU, in the order in which ranks take them; empty where that is not known."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, check=True, timeout=_QUERY_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return []
    found = [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines()]
    near = [_read_list(pci / bus[-12:].lower() / "local_cpulist") for *_, bus in visible_gpus(found, env)]
    return near if all(near) else []


def visible_gpus(found: list[list[str]], env: Mapping[str, str]) -> list[list[str]]:
    """Those of the GPUs (index, uuid, bus) that CUDA_VISIBLE_DEVICES shows, in its order.

    As in CUDA itself, what follows a name that does not exist does not count.
    """
    wish = env.get("CUDA_VISIBLE_DEVICES")
    if wish is None:
        return found
    shown: list[list[str]] = []
    for name in wish.split(","):
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


def format_list(numbers: Iterable[int]) -> str:
    """Numbers in the kernel's short form."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _read_list(path: Path) -> set[int]:
    try:
        return parse_list(path.read_text())
    except (OSError, ValueError):
        return set()
