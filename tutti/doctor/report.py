"""The report of `tutti doctor`: a table, findings and a closing line, and all measurements in a record."""

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from tutti import units
from tutti.doctor.facts import Facts
from tutti.doctor.findings import Finding
from tutti.doctor.plan import Link
from tutti.runs.files import write_durably

_MOST_ROWS = 40


@dataclass(frozen=True)
class DoctorReport:
    """Facts, measurements and findings of all ranks."""

    world_size: int
    hosts: list[str]
    facts: list[Facts]
    clocks: dict[str, float] = field(default_factory=dict)  # seconds that a host's clock is ahead of rank 0's
    links: list[Link] = field(default_factory=list)
    all_reduce: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def faults(self) -> list[str]:
        return [each.text for each in self.findings if each.level == "fault"]

    @property
    def warnings(self) -> list[str]:
        return [each.text for each in self.findings if each.level == "warning"]

    def closing(self) -> str:
        """The last line."""
        if not self.faults:
            return f"ready: {units.count(self.world_size, 'rank')} on {units.count(len(self.hosts), 'host')}"
        return f"not ready: {units.count(len(self.faults), 'fault')}"

    def content(self) -> dict[str, Any]:
        """The content of the record: names are added to it over time, and readers must accept that some are missing."""
        return {
            "ready": not self.faults,
            "ended": time.time(),
            "seconds": self.seconds,
            "world_size": self.world_size,
            "hosts": self.hosts,
            "faults": self.faults,
            "warnings": self.warnings,
            "clock_offset_seconds": self.clocks,
            "links": [asdict(link) for link in self.links],
            "all_reduce": self.all_reduce,
            "ranks": [asdict(each) for each in self.facts],
        }


def write_record(report: DoctorReport, path: Path) -> None:
    """Write the record as a JSON file."""
    write_durably(path, json.dumps(report.content(), indent=2) + "\n")


def print_report(report: DoctorReport) -> None:
    """Print the table of hosts, a line each for links and all-reduce, the findings, and the closing line."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    _print_hosts(report)
    for line in (*_staged_lines(report.facts), *_link_lines(report.links), *_reduce_lines(report)):
        console.print(line)
    for each in report.findings:
        console.print(each.line(), style="red" if each.level == "fault" else "yellow")
    console.print(f"{report.closing()} ({units.duration(report.seconds)})", style="bold")


def _print_hosts(report: DoctorReport) -> None:
    """A row for each host."""
    titles = ("ranks", "host", "address", "device", "cores", "threads", "free memory", "scratch", "run folder", "clock")
    rows = [
        _row(host, [each for each in report.facts if each.host == host], report.clocks.get(host))
        for host in report.hosts[:_MOST_ROWS]
    ]
    units.print_table(titles, rows, left=titles)
    if len(report.hosts) > _MOST_ROWS:
        print(f"and {len(report.hosts) - _MOST_ROWS} more hosts, in the record", flush=True)


def _row(host: str, here: Sequence[Facts], clock: float | None) -> list[str]:
    first = here[0]
    cpus = {cpu for each in here for cpu in each.cpus}
    return [
        units.ranges(each.rank for each in here),
        host,
        f"{first.address} {first.interface}".strip(),
        _device(here),
        units.ranges(cpus) if len(units.ranges(cpus)) <= 24 else f"{len(cpus)}",
        "/".join(dict.fromkeys(str(each.threads) for each in here)),
        f"{units.size(first.memory_free)} of {units.size(first.memory_total)}",
        _free(first.scratch_free),
        _free(first.folder_free),
        "unknown" if clock is None else f"{round(clock * 1e3, 1) + 0.0:+.1f} ms",
    ]


def _device(here: Sequence[Facts]) -> str:
    kinds = list(dict.fromkeys(each.devices[0] if each.devices else each.device for each in here))
    most = max(len(each.devices) for each in here)
    return f"{most} x {kinds[0]}" if most > 1 else ", ".join(kinds)


def _free(size: int) -> str:
    return "unknown" if size < 0 else units.size(size)


def _staged_lines(facts: Sequence[Facts]) -> list[str]:
    """A line for each environment that hosts start their ranks from, where a job stages it."""
    hosts = Counter(each.staged.kind for each in facts if each.staged is not None)
    return [f"environment: {kind}, on {units.count(count, 'host')}" for kind, count in hosts.items()]


def _link_lines(links: Sequence[Link]) -> list[str]:
    alive = [link for link in links if not link.error]
    if not alive:
        return []
    speeds = sorted(speed for link in alive for speed in (link.there, link.back))
    late = sorted(link.latency_seconds for link in alive)
    low, middle, high = (units.bit_rate(speeds[place]) for place in (0, len(speeds) // 2, -1))
    return [
        f"links: {units.count(len(alive), 'pair')} of hosts, {low} to {high} (median {middle}), "
        f"round trip {units.duration(late[0])} to {units.duration(late[-1])}"
    ]


def _reduce_lines(report: DoctorReport) -> list[str]:
    if not report.all_reduce:
        return []
    parts = [f"{units.size(each['bytes'])} in {units.duration(each['seconds'])}" for each in report.all_reduce]
    return [f"all-reduce of {report.world_size} ranks over Gloo: {', '.join(parts)}"]
