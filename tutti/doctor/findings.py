"""What was found: faults that end a run, warnings that may; and how ranks and amounts are named."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_MOST_NAMES = 8


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, with its fix."""

    level: Literal["fault", "warning"]
    text: str

    def line(self) -> str:
        return f"{self.level}: {self.text}"


def fault(text: str) -> Finding:
    return Finding("fault", text)


def warning(text: str) -> Finding:
    return Finding("warning", text)


def name_hosts(hosts: Sequence[str]) -> str:
    """'host n1', or 'hosts n1, n2'; many are cut short."""
    shown = ", ".join(hosts[:_MOST_NAMES]) + (
        f" and {len(hosts) - _MOST_NAMES} more" if len(hosts) > _MOST_NAMES else ""
    )
    return f"host{'s' if len(hosts) > 1 else ''} {shown}"


def count(number: int, noun: str) -> str:
    """'1 rank', or '1,024 ranks'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_bytes(size: float) -> str:
    """Bytes with a unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_speed(bytes_per_second: float) -> str:
    """The speed of a link, in bits."""
    megabits = bytes_per_second * 8e-6
    return f"{megabits / 1000:.1f} Gbit/s" if megabits >= 1000 else f"{megabits:.3g} Mbit/s"


def format_seconds(seconds: float) -> str:
    """A time with a unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.0f} us"
