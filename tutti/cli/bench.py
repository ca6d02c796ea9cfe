"""`tutti bench RECIPE`: measure on ranks started here or as one of them, then print a table and the verdict."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.status import Status

from tutti.cli.ranks import on_ranks, place
from tutti.launch import local
from tutti.records.folder import RunFolder
from tutti.runtime.placement import Placement

if TYPE_CHECKING:
    from tutti.bench.run import Bench


def bench(
    recipe: str, overrides: list[str], ranks: int | None, trials: int, seconds: float, variants: Path | None
) -> None:
    """Measure a recipe, or variants of it."""
    placement = place(ranks)
    local.make_importable(recipe)
    from tutti.bench.run import check, read_variants

    chosen = read_variants(variants, recipe, overrides)
    check(chosen, ranks or placement.world_size, trials, seconds)

    def work(placement: Placement, folder: RunFolder | None) -> Any:
        from tutti.bench import run

        with Progress(placement.rank == 0) as tell:
            found = run.bench(chosen, placement, folder, trials, seconds, tell)
        if placement.rank == 0:
            _show(found)
        return found

    on_ranks("bench", chosen[0].config, ranks, ["tutti.bench.run"], work)


def _show(found: "Bench") -> None:
    from tutti.report.phases import PICTURE, draw_phases, print_bench

    print_bench(found.found, found.verdicts)
    print(f"picture:    {draw_phases(found.found, found.folder.path / PICTURE)}\nrun folder: {found.folder.path}")


class Progress:
    """What is being measured: a line that changes on a terminal, nothing elsewhere."""

    def __init__(self, wanted: bool) -> None:
        live = wanted and sys.stdout.isatty()
        self._status = Status("starting", console=Console(stderr=False)) if live else None

    def __enter__(self) -> "Progress":
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()

    def __call__(self, text: str) -> None:
        if self._status:
            self._status.update(text)
