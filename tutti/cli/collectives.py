"""`tutti bench collectives`: all-reduce, broadcast and all-gather over sizes of messages and numbers of ranks."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tutti.bench.collectives.results import OPERATIONS, Results, parse_sizes, show_size
from tutti.cli.collective_words import describe, print_points
from tutti.cli.ranks import is_rank, on_ranks, place
from tutti.config.load import resolve
from tutti.errors import ConfigError, LaunchError, nearest
from tutti.ranks.placement import Placement
from tutti.runs.folder import RunFolder
from tutti.runs.output import Tee

if TYPE_CHECKING:
    from tutti.bench.collectives.measure import Request
    from tutti.bench.session import Session

_CLOCK = "{} read on every rank between trials; the time of a call is the slowest rank's"


def bench_collectives(
    overrides: list[str], ranks: int | None, trials: int, seconds: float, sizes: str | None, operations: str | None
) -> None:
    """Measure on ranks that are started here, or as one of those that a launcher has started."""
    asked = {"sizes": parse_sizes(sizes), "operations": _parse_operations(operations)}
    if trials < 2:
        raise ConfigError(f"--trials {trials}: expected 2 or more, so that there is a spread. Try --trials 5.")
    if seconds <= 0:
        raise ConfigError(f"--seconds {seconds:g}: expected a number of seconds above 0. Try --seconds 20.")
    config = resolve("hello", [*overrides, "recipe=collectives"]).config

    def work(placement: Placement, folder: RunFolder | None) -> None:
        from tutti.bench.collectives.measure import Request
        from tutti.bench.session import open_session

        with open_session("bench", config, placement, folder) as session:
            _measure(session, Request(**asked, trials=trials, seconds=seconds))

    on_ranks("bench", config, _count(ranks), ["tutti.bench.collectives.measure", "tutti.report.collectives"], work)


def _parse_operations(text: str | None) -> tuple[str, ...]:
    words = OPERATIONS if text is None else tuple(word.strip() for word in text.split(","))
    for word in words:
        if word not in OPERATIONS:
            raise ConfigError(
                f"--operations: {word!r} is not measured: expected {', '.join(OPERATIONS)}.{nearest(word, OPERATIONS)}"
            )
    return tuple(dict.fromkeys(words))


def _count(ranks: int | None) -> int | None:
    """The ranks to start: two where nobody says; one has nobody to talk to."""
    placement = place(ranks)
    if placement.world_size > 1:
        return ranks
    if ranks == 1 or is_rank(placement) or placement.launcher != "none":
        given = "-n 1" if ranks == 1 else f"{placement.launcher} has started 1 rank"
        raise LaunchError(f"{given}: a collective needs 2 ranks or more. Try -n 2.")
    return ranks or 2


def _measure(session: "Session", request: "Request") -> None:
    from tutti.bench.collectives.measure import measure

    with _progress(session, len(request.sizes)) as tell:
        measured, dropped = measure(session, request, tell)
    if not session.group.is_first:
        return
    from tutti.report.collectives import draw_collectives

    results = Results(_conditions(session, request), measured, dropped)
    results.write(session.folder.path)
    picture = draw_collectives(session.folder.path)
    print_points(results)
    for line in describe(results):
        session.say(line)
    session.say(f"picture: {picture}")
    session.say(f"run folder: {session.folder.path}")


def _conditions(session: "Session", request: "Request") -> dict[str, Any]:
    """Under which circumstances the figures hold."""
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
    """Rank 0 shows how far it is: a bar on a terminal, a line a size elsewhere."""
    stream = sys.stdout
    terminal = stream.screen if isinstance(stream, Tee) else stream
    if not session.group.is_first or terminal is None or not terminal.isatty():

        def tell_line(done: int, total: int, size: int) -> None:
            if done % (total // sizes) == 0:
                session.say(f"measured {show_size(size)} ({done} of {total} points)")

        yield tell_line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # Drawn between points only: a thread that draws would take its time from what is measured.
    with Progress(*columns, console=Console(file=terminal), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("measuring")

        def tell(done: int, total: int, size: int) -> None:
            bar.update(task, completed=done, total=total, description=f"measured {show_size(size)}", refresh=True)

        yield tell
