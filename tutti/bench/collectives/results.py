"""The results of measuring collectives: times, lines, models and message sizes; read without torch."""

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.bench.collectives.model import (
    BUS_FACTORS,
    FRAME_BYTES,
    FRAME_PAYLOAD_BYTES,
    Line,
    MessageTime,
    Model,
    fit_line,
    fit_model,
    wire_bits_per_second,
)
from tutti.errors import ConfigError, FolderError
from tutti.runs.files import read_json, to_dataclass, write_durably

OPERATIONS = tuple(BUS_FACTORS)
FILE, PICTURE = "collectives.json", "collectives.png"
CONVENTIONS = {
    "bytes": "of the operation, as nccl-tests count them: the tensor that is reduced or sent, or all that is gathered",
    "bus_bytes_per_second": "bytes / seconds times 2 (n-1)/n for all_reduce, (n-1)/n for all_gather, 1 for broadcast",
    "calls": "a stream, one after the other; broadcasts are from rank 0, one may begin while the last still arrives",
    "seconds": "of a call, the slowest rank's: median over trials, with the lowest and highest",
    "line": "t^p = latency^p + (bytes / bandwidth)^p with p = blend; 1 is latency + bytes / bandwidth",
    "link": f"TCP over Ethernet: {FRAME_BYTES} bytes of a frame carry {FRAME_PAYLOAD_BYTES} (MTU 1500)",
}


@dataclass(frozen=True)
class Measured:
    """One operation, number of ranks and size: the seconds of a call in each trial."""

    operation: str
    ranks: int
    hosts: int
    bytes: int
    calls: int  # of a trial
    trials_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS or not self.trials_seconds:
            raise ValueError(f"{self.operation!r:.40} is no operation, or has no trials")

    @property
    def seconds(self) -> float:
        return statistics.median(self.trials_seconds)

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds

    @property
    def bus_bytes_per_second(self) -> float:
        """The bus bandwidth of nccl-tests: that of the busiest link of a ring, comparable over numbers of ranks."""
        return BUS_FACTORS[self.operation](self.ranks) * self.bytes_per_second


@dataclass(frozen=True)
class Dropped:
    """A size that would have taken too long."""

    operation: str
    ranks: int
    bytes: int
    expected_seconds: float  # of a call, at most


@dataclass(frozen=True)
class Results:
    """All that was measured, under which conditions; `hosts` names the host of every rank."""

    conditions: Mapping[str, Any]
    points: Sequence[Measured]
    dropped: Sequence[Dropped]

    def __post_init__(self) -> None:
        _check_hosts(self.conditions)
        for key in ("hosts", "backend"):
            if not self.conditions.get(key):
                raise ValueError(f"conditions.{key} is missing")

    def lines(self) -> Iterator[tuple[Measured, Line]]:
        """The fit of every operation and number of ranks, with its largest message."""
        for operation in OPERATIONS:
            for ranks in sorted({point.ranks for point in self.points}):
                points = [each for each in self.points if (each.operation, each.ranks) == (operation, ranks)]
                if line := fit_line(as_points(points)):
                    yield points[-1], line

    def models(self) -> list[Model]:
        """The model of every operation over numbers of ranks."""
        hosts = self.conditions["hosts"]
        pipelined = self.conditions["backend"] == "nccl"
        found = [
            fit_model(
                each, as_points([p for p in self.points if p.operation == each]), hosts.count(hosts[0]), pipelined
            )
            for each in OPERATIONS
        ]
        return [model for model in found if model]

    def fastest_between_hosts(self) -> Measured | None:
        """The message with the highest bandwidth between hosts, over TCP."""
        between = [point for point in self.points if point.hosts > 1 and self.conditions["backend"] == "gloo"]
        return max(between, key=lambda point: point.bus_bytes_per_second, default=None)

    def content(self) -> dict[str, Any]:
        """The content of `collectives.json`: what was measured, and what follows from it."""
        link = self.fastest_between_hosts()
        return {
            "format": 1,
            "conventions": CONVENTIONS,
            "conditions": dict(self.conditions),
            "points": [_with_rates(point) for point in self.points],
            "dropped": [dataclasses.asdict(each) for each in self.dropped],
            "lines": [_with_place(point, line) for point, line in self.lines()],
            "models": [dataclasses.asdict(model) for model in self.models()],
            "link": link
            and {
                "payload_bytes_per_second": link.bus_bytes_per_second,
                "wire_bits_per_second": wire_bits_per_second(link.bus_bytes_per_second),
            },
        }

    def write(self, folder: Path) -> None:
        write_durably(folder / FILE, json.dumps(self.content(), indent=2) + "\n")


def read_results(folder: Path) -> Results:
    """The results in a folder."""
    path = folder / FILE
    try:
        return to_dataclass(read_json(path), Results, extra="ignore")
    except (OSError, ValueError) as error:
        raise FolderError(
            f"{path} is no measurement of collectives ({error}): expected a file of `tutti bench collectives`."
        ) from error


def read_conditions(path: Path) -> Mapping[str, Any]:
    """The conditions of a measurement in a file; raises ValueError if it has none."""
    content = read_json(path)
    found = content.get("conditions") if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise ValueError("conditions: expected a JSON object")
    _check_hosts(found)
    return found


def _check_hosts(conditions: Mapping[str, Any]) -> None:
    hosts = conditions.get("hosts", [])
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise ValueError(f"conditions.hosts is {hosts!r:.40}: expected names")


def _with_rates(point: Measured) -> dict[str, Any]:
    more = {"seconds": point.seconds, "lowest_seconds": min(point.trials_seconds)}
    more |= {"highest_seconds": max(point.trials_seconds), "bytes_per_second": point.bytes_per_second}
    return dataclasses.asdict(point) | more | {"bus_bytes_per_second": point.bus_bytes_per_second}


def as_points(measured: Sequence[Measured]) -> list[MessageTime]:
    return [MessageTime(each.ranks, each.bytes, each.seconds) for each in measured]


def _with_place(point: Measured, line: Line) -> dict[str, Any]:
    bandwidth = line.bytes_per_second if math.isfinite(line.bytes_per_second) else None  # JSON knows no infinity
    return {
        "operation": point.operation,
        "ranks": point.ranks,
        "hosts": point.hosts,
        **dataclasses.asdict(line),
        "bytes_per_second": bandwidth,
        "bus_bytes_per_second": bandwidth and bandwidth * BUS_FACTORS[point.operation](point.ranks),
    }


DEFAULT_SIZES = tuple(4**power * 1024 for power in range(9))  # 1 KB to 64 MB
_UNITS = {"": 1, "B": 1, "KB": 1024, "MB": 1024**2, "GB": 1024**3, "KIB": 1024, "MIB": 1024**2, "GIB": 1024**3}
_EXPECTED = "expected sizes of 4 B or more, in B, KB, MB or GB, as in --sizes 1KB,1MB."


def parse_sizes(text: str | None) -> tuple[int, ...]:
    """The sizes in a list such as 1KB,1MB, smallest first; without a list, the default sizes."""
    if text is None:
        return DEFAULT_SIZES
    return tuple(sorted({_parse(word.strip()) for word in text.split(",")}))


def _parse(word: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", word)
    factor = _UNITS.get(found[2].upper()) if found else None
    if found is None or factor is None or (size := int(float(found[1]) * factor)) < 4:
        raise ConfigError(f"--sizes: {word!r} is not the size of a message: {_EXPECTED}")
    return size
