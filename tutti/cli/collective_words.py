"""Measured collectives as a table, and their fits in words."""

from collections.abc import Iterator

from tutti.bench import numbers
from tutti.bench.collectives.model import (
    BUS_FACTORS,
    FRAME_BYTES,
    FRAME_PAYLOAD_BYTES,
    Line,
    Model,
    Regime,
    Residual,
    wire_bits_per_second,
)
from tutti.bench.collectives.results import Measured, Results, show_size
from tutti.cli.tables import print_table

_TITLES = ("operation", "ranks", "hosts", "size", "time", "lowest", "highest", "bandwidth", "bus")


def print_points(results: Results) -> None:
    """A row for every message: the median time of a call, its spread over trials, and bandwidths."""
    order = {operation: place for place, operation in enumerate(BUS_FACTORS)}
    points = sorted(results.points, key=lambda point: (order[point.operation], point.ranks, point.bytes))
    print_table(_TITLES, [_row(point) for point in points], _TITLES[1:])
    print("sizes in powers of 1024, rates in powers of 1000; time: median of trials, of the slowest rank")


def _row(point: Measured) -> list[str]:
    times = (point.seconds, min(point.trials_seconds), max(point.trials_seconds))
    rates = (point.bytes_per_second, point.bus_bytes_per_second)
    numbers = [point.operation, str(point.ranks), str(point.hosts), show_size(point.bytes)]
    return [*numbers, *map(show_seconds, times), *map(show_rate, rates)]


def describe(results: Results) -> Iterator[str]:
    """What was dropped, the fits, and what links between hosts carry."""
    for operation, ranks in dict.fromkeys((each.operation, each.ranks) for each in results.dropped):
        sizes = [each for each in results.dropped if (each.operation, each.ranks) == (operation, ranks)]
        yield (
            f"dropped: {operation} on {ranks} ranks of {', '.join(show_size(each.bytes) for each in sizes)}: "
            f"a call may take {show_seconds(sizes[0].expected_seconds)} or more. Give more time with --seconds."
        )
    lines = list(results.lines())
    for point, line in lines:
        yield _describe_line(point, line)
    if not lines:
        yield "no fit: it needs two sizes of messages."
    for model in results.models():
        yield from _describe_model(model)
    if any(line.blend > 1 for _, line in lines):
        yield "(blended, as bytes hide some of the latency: t^p = latency^p + (bytes / bandwidth)^p)"
    if link := results.fastest_between_hosts():
        payload = link.bus_bytes_per_second
        yield (
            f"links between hosts carry {show_rate(payload)} of payload ({link.operation} of {show_size(link.bytes)}, "
            f"{link.ranks} ranks): {wire_bits_per_second(payload) / 1e9:.3f} Gbit/s with headers, if it is TCP over "
            f"Ethernet at MTU 1500 ({FRAME_BYTES} bytes for {FRAME_PAYLOAD_BYTES})"
        )


def _describe_line(point: Measured, line: Line) -> str:
    bus = BUS_FACTORS[point.operation](point.ranks) * line.bytes_per_second
    text = (
        f"{point.operation} on {point.ranks} ranks, {_hosts(point.hosts)}: {show_seconds(line.latency_seconds)} + "
        f"bytes / {show_rate(line.bytes_per_second)} (bus {show_rate(bus)}), {_describe_residual(line.sum_residual)}"
    )
    return text if line.blend == 1 else f"{text}; blended with p={line.blend} {_describe_residual(line.residual)}"


def _describe_model(model: Model) -> Iterator[str]:
    for regime in model.regimes:
        ranks = ", ".join(map(str, regime.measured_ranks))
        place = "several hosts" if regime.across_hosts else "one host"
        yield (
            f"model of {model.operation} on n ranks of {place}: {regime.form}, {_describe_terms(regime)}, "
            f"p={regime.blend}, from {ranks} ranks, {_describe_residual(regime.residual)}"
        )


def _describe_terms(regime: Regime) -> str:
    """The numbers of a model; a rate is that of the bytes which the form has a link carry."""
    terms = [f"{show_seconds(regime.base_seconds)} + {show_seconds(regime.step_seconds)} a step"]
    if regime.own_seconds_per_byte:
        terms.append(f"{show_rate(1 / regime.own_seconds_per_byte)} a link")
    if regime.shared_seconds_per_byte:
        terms.append(f"{show_rate(1 / regime.shared_seconds_per_byte)} shared by all ranks")
    return ", ".join(terms)


def _describe_residual(residual: Residual) -> str:
    if residual.points == 2:
        return "through 2 points: nothing is left to check it with"
    return f"off by {residual.rms:.1%} (rms), {residual.worst:.1%} at worst, over {residual.points} points"


def _hosts(count: int) -> str:
    return "1 host" if count == 1 else f"{count} hosts"


def show_seconds(seconds: float) -> str:
    """A time as wide as others in its column."""
    return numbers.show_seconds(seconds, keep_zeros=True)


def show_rate(bytes_per_second: float) -> str:
    """A rate with three digits, in powers of 1000."""
    for factor, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "KB/s")):
        if bytes_per_second >= factor:
            return f"{bytes_per_second / factor:#.3g} {unit}".replace(". ", " ")
    return f"{bytes_per_second:.3g} B/s"
