"""`tutti bench RECIPE`: measure on ranks started here or as one of them, then print a table and the verdict."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from tutti.cli.ranks import on_ranks, place
from tutti.cli.tables import print_table
from tutti.config.recipes import make_importable
from tutti.ranks.placement import Placement
from tutti.runs.folder import RunFolder

if TYPE_CHECKING:
    from tutti.bench.results import Measurement
    from tutti.bench.run import Bench


def bench(
    recipe: str, overrides: list[str], ranks: int | None, trials: int, seconds: float, variants: Path | None
) -> None:
    """Measure a recipe, or variants of it."""
    placement = place(ranks)
    make_importable(recipe)
    from tutti.bench.run import check, read_variants

    chosen = read_variants(variants, recipe, overrides)
    check(chosen, ranks or placement.world_size, trials, seconds)

    def work(placement: Placement, folder: RunFolder | None) -> Any:
        from tutti.bench import run

        with Shown(placement) as tell:
            found = run.bench(chosen, placement, folder, trials, seconds, tell)
        if placement.rank == 0:
            _show(found)
        return found

    on_ranks("bench", chosen[0].config, ranks, ["tutti.bench.run"], work)


def _show(found: "Bench") -> None:
    from tutti.bench.run import PICTURE
    from tutti.report.phases import draw_phases

    if len(found.found) == 1:
        _print_phases(found.found[0])
    else:
        _print_variants(found)
    for measurement, verdict in zip(found.found, found.verdicts, strict=True):
        label = f"{measurement.name}: " if measurement.name else ""
        for note in measurement.notes:
            print(f"note: {label}{note}")
        if not measurement.name:
            print("\n".join(["", *(f"  {line}" for line in verdict.evidence), ""]))
        print(f"{label}{verdict.sentence}")
        for other in verdict.suggestions if not measurement.name else ():
            print(f"  {other.line}")
    picture = draw_phases(found.found, found.folder.path / PICTURE)
    print(f"\npicture:    {picture}\nrun folder: {found.folder.path}", flush=True)


def _print_phases(measurement: "Measurement") -> None:
    """A row for each phase alone, then the whole and what it is made of."""
    from tutti.bench.results import PHASES
    from tutti.bench.shares import find_shares

    shares = find_shares(measurement)
    print(
        f"{measurement.settings['recipe']}: {measurement.ranks} rank(s) on {measurement.device_name}, "
        f"{measurement.threads} thread(s) each; {measurement.per_rank_batch} samples a rank and step; "
        f"{measurement.trials} trials\n"
    )
    rows = []
    for name, figure in [*shares.alone.items(), ("whole", shares.whole)]:
        samples = measurement.per_rank_batch * (2 if name == "double" else 1)
        rate = samples / figure.median if figure.median and name != "exchange" else None
        slowest = max(range(measurement.ranks), key=lambda rank: sum(measurement.seconds[name][rank]))
        rows.append(
            [
                name,
                f"{figure.median * 1e3:,.3f}",
                f"{figure.relative_spread:.0%}",
                f"{rate:,.0f}" if rate else "",
                f"{rate * measurement.ranks:,.0f}" if rate else "",
                f"{slowest}" if measurement.ranks > 1 else "",
                PHASES[name],
            ]
        )
    titles = ["phase", "ms", "spread", "samples/s a rank", "in all", "slowest rank", "what it is"]
    print_table(titles, rows, titles[1:6])
    memory = max(measurement.peak_bytes) / 2**30
    print(f"\n{memory:.2f} GiB of memory at most on a rank")


def _print_variants(found: "Bench") -> None:
    """A row for each variant, in samples a second over all ranks."""
    from tutti.bench.shares import find_shares

    phases = [name for name in ("read", "copy", "compute", "communicate") if name in found.found[0].seconds]
    rows = []
    for measurement, verdict in zip(found.found, found.verdicts, strict=True):
        shares = find_shares(measurement)
        rates = [measurement.global_batch / shares.alone[name].median if name in shares.alone else 0 for name in phases]
        whole = shares.samples_per_second
        cells = [*(f"{rate:,.0f}" for rate in rates), f"{whole.median:,.0f}", f"{whole.relative_spread:.0%}"]
        rows.append([measurement.name, *cells, verdict.bound])
    titles = ["samples/s", *phases, "whole", "spread", "bound by"]
    print_table(titles, rows, titles[1:-1])
    print()


class Shown:
    """What is being measured, on a terminal; drawn when it changes only, so that nothing runs beside a measurement."""

    def __init__(self, placement: Placement) -> None:
        live = placement.rank == 0 and placement.launcher in ("none", "torchrun") and sys.stdout.isatty()
        columns = (TextColumn("{task.description}"), TimeElapsedColumn())
        console = Console(file=sys.stdout)  # the real one: ranks write to their logs later
        self._bar = Progress(*columns, console=console, transient=True, auto_refresh=False) if live else None

    def __enter__(self) -> "Shown":
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task("starting")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, text: str) -> None:
        if self._bar:
            self._bar.update(self._task, description=text, refresh=True)
