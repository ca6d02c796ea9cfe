"""Numbers, units, intervals and tables as text: one spelling for each kind of quantity."""

import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence

EMA = "_ema"  # ends the names of metrics of averaged weights
_TIMES = ((3600.0, 3600.0, "h"), (120.0, 60.0, "min"), (1.0, 1.0, "s"), (1e-3, 1e-3, "ms"), (0.0, 1e-6, "us"))
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")
_SIZE_UNITS = {"b": 1} | {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)}
_SIZE_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)}
_BANDWIDTHS = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "KB/s"), (1.0, "B/s"))
_LOWER_IS_BETTER = ("loss", "error", "mae", "mse", "perplexity")  # ends of the names of such metrics
_MOST_RANGES = 16
_MOST_NAMES = 8


def number(value: float, keep_zeros: bool = False) -> str:
    """Three significant digits, all digits from 100 on; in a column zeros at the end are kept."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if keep_zeros and value else f"{value:.3g}"


def count(value: float, noun: str = "") -> str:
    """A number of things with a comma at thousands, with their noun: `1 rank`, `1,024 ranks`."""
    shown = f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"
    return f"{shown} {noun}{'' if value == 1 else 's'}" if noun else shown


def percent(share: float, digits: int = 0) -> str:
    """A share of a whole in percent: `93.4%`."""
    return f"{share:z.{digits}%}"  # z: no minus sign before a zero


def duration(seconds: float, keep_zeros: bool = False) -> str:
    """A time in the unit that suits it: `45.6 us`, `12.3 ms`, `1.43 s`, `2.5 min`, `1.5 h`."""
    _, scale, unit = next(each for each in _TIMES if abs(seconds) >= each[0])
    return f"{number(seconds / scale, keep_zeros)} {unit}"


def size(num_bytes: float) -> str:
    """An amount of bytes in powers of 1024: `4 KiB`, `1.5 GiB`."""
    power = 0
    while abs(num_bytes) >= 1024 and power < len(_SIZES) - 1:
        num_bytes /= 1024
        power += 1
    return f"{number(num_bytes)} {_SIZES[power]}"


def parse_size(text: str) -> int:
    """The bytes that a text such as `40GB` or `24 GiB` stands for; raises ValueError for any other."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]+)\s*", text)
    if not found or found[2].lower() not in _SIZE_UNITS:
        raise ValueError(f"{text!r}: expected a number with a unit, such as 40GB or 24GiB.")
    return int(float(found[1]) * _SIZE_UNITS[found[2].lower()])


def bandwidth(bytes_per_second: float) -> str:
    """Bytes per second in powers of 1000: `1.20 GB/s`."""
    scale, unit = next((each for each in _BANDWIDTHS if bytes_per_second >= each[0]), _BANDWIDTHS[-1])
    return f"{number(bytes_per_second / scale, keep_zeros=scale > 1)} {unit}"


def bit_rate(bytes_per_second: float) -> str:
    """The speed of a network link: `10 Gbit/s`."""
    megabits = bytes_per_second * 8e-6
    return f"{number(megabits / 1e3)} Gbit/s" if megabits >= 1000 else f"{number(megabits)} Mbit/s"


def interval(show: Callable[[float], str], value: float, low: float, high: float) -> str:
    """A value with the interval around it: `74% (70% to 78%)`."""
    return f"{show(value)} ({show(low)} to {show(high)})"


def is_share(metric_name: str) -> bool:
    """Returns whether a metric is a share of a whole, to be shown in percent."""
    return metric_name.removesuffix(EMA).endswith(("accuracy", "top5"))


def is_lower_better(metric_name: str) -> bool:
    """Returns whether a smaller value of a metric is the better one: a loss or an error."""
    return metric_name.removesuffix(EMA).lower().endswith(_LOWER_IS_BETTER)


def metric(name: str, value: float) -> str:
    """The value of a loss or a metric: an accuracy as `99.17%`, any other as `0.2127`."""
    if is_share(name):
        return percent(value, 2)
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.4g}"


def metric_title(name: str) -> str:
    """The name of a metric in full words: `valid_accuracy` as `validation accuracy`."""
    return name.replace("valid_", "validation ").replace("train_", "training ").replace("_", " ")


def ranges(numbers: Iterable[int], separator: str = ",") -> str:
    """Whole numbers in the short form of Linux CPU lists: `0-3,8`."""
    return separator.join(_ranges(numbers))


def ranks(numbers: Iterable[int]) -> str:
    """Ranks by number: `rank 3`, `ranks 0-3, 8`; many are cut short."""
    numbers = list(numbers)
    parts = _ranges(numbers)
    more = ", ..." if len(parts) > _MOST_RANGES else ""
    return f"rank{'' if len(numbers) == 1 else 's'} {', '.join(parts[:_MOST_RANGES])}{more}"


def names(found: Sequence[str], most: int = _MOST_NAMES) -> str:
    """Names in a row; many are cut short: `n1, n2 and 3 more`."""
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] | None = None) -> list[str]:
    """Aligned lines, the titles first.

    The columns whose titles are in `left` (by default the first) hold words and are aligned to the left, the others
    hold numbers and are aligned to the right.
    """
    lines = [list(titles), *map(list, rows)]
    left = titles[:1] if left is None else left
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(_align(line, widths, [title in left for title in titles])).rstrip() for line in lines]


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] | None = None) -> None:
    """Print a table as wide as it is, with bold titles on a terminal."""
    head, *lines = table(titles, rows, left)
    print("\n".join([f"\033[1m{head}\033[0m" if sys.stdout.isatty() else head, *lines]), flush=True)


def _align(cells: Sequence[str], widths: Sequence[int], to_left: Sequence[bool]) -> list[str]:
    columns = zip(cells, widths, to_left, strict=True)
    return [cell.ljust(width) if words else cell.rjust(width) for cell, width, words in columns]


def _ranges(numbers: Iterable[int]) -> list[str]:
    found: list[list[int]] = []
    for each in sorted(numbers):
        if found and each == found[-1][1] + 1:
            found[-1][1] = each
        else:
            found.append([each, each])
    return [str(first) if first == last else f"{first}-{last}" for first, last in found]
