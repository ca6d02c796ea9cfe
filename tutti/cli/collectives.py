"""`tutti bench collectives`: all-reduce, broadcast and all-gather over sizes of messages and numbers of ranks."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tutti import units
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
from tutti.bench.collectives.results import OPERATIONS, Measured, Results, parse_sizes
from tutti.cli.ranks import is_rank, on_ranks, place
from tutti.config.load import resolve
from tutti.errors import ConfigError, LaunchError, nearest
from tutti.ranks.placement import Placement
from tutti.runs.folder import RunFolder
from tutti.runs.output import Tee

if TYPE_CHECKING:
    from tutti.bench.collectives.measure import CollectivesRequest
    from tutti.bench.session import Session

_TITLES = ("operation", "ranks", "hosts", "size", "time", "lowest", "highest", "bandwidth", "bus")
_CLOCK = "{} read on every rank between trials; the time of a call is the slowest rank's"


def bench_collectives(
    overrides: list[str], ranks: int | None, trials: int, seconds: float, sizes: str | None, operations: str | None
) -> None:
    """Measure on ranks that are started here, or as one rank."""
    asked = {"sizes": parse_sizes(sizes), "operations": _parse_operations(operations)}
    if trials < 2:
        raise ConfigError(f"--trials {trials}: expected 2 or more, so that there is a spread. Try --trials 5.")
    if seconds <= 0:
        raise ConfigError(f"--seconds {seconds:g}: expected a number of seconds above 0. Try --seconds 20.")
    config = resolve("hello", [*overrides, "recipe=collectives"]).config

    def work(placement: Placement, folder: RunFolder | None) -> None:
        from tutti.bench.collectives.measure import CollectivesRequest
        from tutti.bench.session import open_session

        with open_session("bench", config, placement, folder) as session:
            _measure(session, CollectivesRequest(**asked, trials=trials, seconds=seconds))

    on_ranks("bench", config, _count(ranks), ["tutti.bench.collectives.measure", "tutti.report.bench"], work)


def _parse_operations(text: str | None) -> tuple[str, ...]:
    words = OPERATIONS if text is None else tuple(word.strip() for word in text.split(","))
    for word in words:
        if word not in OPERATIONS:
            raise ConfigError(
                f"--operations: {word!r} is not measured: expected {', '.join(OPERATIONS)}.{nearest(word, OPERATIONS)}"
            )
    return tuple(dict.fromkeys(words))


def _count(ranks: int | None) -> int | None:
    """The number of ranks to start, two by default; one rank cannot communicate."""
    placement = place(ranks)
    if placement.world_size > 1:
        return ranks
    if ranks == 1 or is_rank(placement) or placement.launcher != "none":
        given = "-n 1" if ranks == 1 else f"{placement.launcher} has started 1 rank"
        raise LaunchError(f"{given}: a collective needs 2 ranks or more. Try -n 2.")
    return ranks or 2


def _measure(session: "Session", request: "CollectivesRequest") -> None:
    from tutti.bench.collectives.measure import measure

    with _progress(session, len(request.sizes)) as report:
        measured, dropped = measure(session, request, report)
    if not session.group.is_first:
        return
    from tutti.report.bench import draw_collectives

    results = Results(_conditions(session, request), measured, dropped)
    results.write(session.folder.path)
    picture = draw_collectives(session.folder.path)
    print_points(results)
    for line in describe(results):
        session.say(line)
    session.say(f"picture: {picture}")
    session.say(f"run folder: {session.folder.path}")


def _conditions(session: "Session", request: "CollectivesRequest") -> dict[str, Any]:
    """The conditions of the measurements."""
    segment = session.record.content["segments"][-1]
    on_gpu = session.device.type == "cuda"
    return {
        **{key: segment[key] for key in ("started", "launch_line", "launcher", "versions", "hardware")},
        "ranks": session.group.world_size,
        "hosts": session.group.hosts,  # of all ranks, in their order
        "backend": "nccl" if on_gpu else "gloo",
        "device": session.device_name,
        "threads_per_rank": session.threads,
        "numbers": "float32",
        "clock": _CLOCK.format("events of the GPU" if on_gpu else "time.perf_counter"),
        "trials": request.trials,
        "seconds": request.seconds,
        "sizes": request.sizes,
        "operations": request.operations,
    }


@contextmanager
def _progress(session: "Session", sizes: int) -> Iterator[Callable[[int, int, int], None]]:
    """Show the progress on rank 0: a bar on a terminal, otherwise a line for each size."""
    stream = sys.stdout
    terminal = stream.screen if isinstance(stream, Tee) else stream
    if not session.group.is_first or terminal is None or not terminal.isatty():

        def report_line(done: int, total: int, size: int) -> None:
            if done % (total // sizes) == 0:
                session.say(f"measured {units.size(size)} ({done} of {total} points)")

        yield report_line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # Drawn between points only: a thread that draws would disturb the measurement.
    with Progress(*columns, console=Console(file=terminal), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("measuring")

        def report(done: int, total: int, size: int) -> None:
            bar.update(task, completed=done, total=total, description=f"measured {units.size(size)}", refresh=True)

        yield report


def print_points(results: Results) -> None:
    """Print a row for every message: the median time of a call, its spread over trials, and bandwidths."""
    order = {operation: place for place, operation in enumerate(BUS_FACTORS)}
    points = sorted(results.points, key=lambda point: (order[point.operation], point.ranks, point.bytes))
    units.print_table(_TITLES, [_row(point) for point in points])
    print("sizes in powers of 1024, rates in powers of 1000; time: median of trials, of the slowest rank")


def _row(point: Measured) -> list[str]:
    times = (point.seconds, min(point.trials_seconds), max(point.trials_seconds))
    rates = (point.bytes_per_second, point.bus_bytes_per_second)
    numbers = [point.operation, str(point.ranks), str(point.hosts), units.size(point.bytes)]
    return [*numbers, *map(_time, times), *map(units.bandwidth, rates)]


def describe(results: Results) -> Iterator[str]:
    """Describe the sizes that were dropped, the fits, and the bandwidth between hosts."""
    for operation, ranks in dict.fromkeys((each.operation, each.ranks) for each in results.dropped):
        sizes = [each for each in results.dropped if (each.operation, each.ranks) == (operation, ranks)]
        yield (
            f"dropped: {operation} on {ranks} ranks of {', '.join(units.size(each.bytes) for each in sizes)}: "
            f"a call may take {_time(sizes[0].expected_seconds)} or more. Give more time with --seconds."
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
            f"links between hosts carry {units.bandwidth(payload)} of payload ({link.operation} of "
            f"{units.size(link.bytes)}, {link.ranks} ranks): {wire_bits_per_second(payload) / 1e9:.3f} Gbit/s with "
            "headers, if it is TCP over Ethernet at MTU 1500 "
            f"({FRAME_BYTES} bytes for {FRAME_PAYLOAD_BYTES})"
        )


def _describe_line(point: Measured, line: Line) -> str:
    hosts = units.count(point.hosts, "host")
    bus = units.bandwidth(BUS_FACTORS[point.operation](point.ranks) * line.bytes_per_second)
    text = (
        f"{point.operation} on {point.ranks} ranks, {hosts}: {_time(line.latency_seconds)} + bytes / "
        f"{units.bandwidth(line.bytes_per_second)} (bus {bus}), {_describe_residual(line.sum_residual)}"
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
    """The parameters of a model; a rate counts the bytes that a link carries in this form."""
    terms = [f"{_time(regime.base_seconds)} + {_time(regime.step_seconds)} a step"]
    if regime.own_seconds_per_byte:
        terms.append(f"{units.bandwidth(1 / regime.own_seconds_per_byte)} a link")
    if regime.shared_seconds_per_byte:
        terms.append(f"{units.bandwidth(1 / regime.shared_seconds_per_byte)} shared by all ranks")
    return ", ".join(terms)


def _describe_residual(residual: Residual) -> str:
    if residual.points == 2:
        return "through 2 points: nothing is left to check it with"
    rms, worst = units.percent(residual.rms, 1), units.percent(residual.worst, 1)
    return f"off by {rms} (rms), {worst} at worst, over {residual.points} points"


def _time(seconds: float) -> str:
    return units.duration(seconds, keep_zeros=True)
