"""`tutti bench RECIPE`: measure on ranks started here or as one rank, and print a table and the bottleneck."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti import units
from tutti.cli.options import Overrides, Ranks, complete_recipe, examples
from tutti.cli.ranks import StatusLine, on_ranks, place
from tutti.config.recipes import make_importable
from tutti.errors import ConfigError
from tutti.ranks.placement import Placement
from tutti.runs.folder import RunFolder

if TYPE_CHECKING:
    from tutti.bench.measure import Bench
    from tutti.bench.results import Measurement


_COLLECTIVES = "Only for tutti bench collectives"

app = typer.Typer()


@app.command(
    epilog=examples(
        "tutti bench mnist -n 2",
        "tutti bench nbody/bs64_opt data.workers=8 --seconds 60",
        "tutti bench nbody/short --variants benchmarks/nbody_ladder.yaml",
        "tutti bench collectives -n 4",
        "srun -N4 tutti bench collectives --sizes 1KB,1MB,64MB",
    )
)
def bench(
    recipe: Annotated[str, typer.Argument(help="A recipe, or collectives.", autocompletion=complete_recipe)],
    overrides: Overrides = None,
    ranks: Ranks = None,
    trials: Annotated[int, typer.Option(help="How often everything is measured, at most.")] = 5,
    seconds: Annotated[float, typer.Option(help="How long to measure a recipe, or a variant, after the start.")] = 20.0,
    variants: Annotated[
        Path | None, typer.Option(help="A YAML file of names, each with a list of overrides: measured one by one.")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Message sizes, as in 1KB,1MB.", rich_help_panel=_COLLECTIVES)
    ] = None,
    operations: Annotated[
        str | None, typer.Option(help="all_reduce, broadcast, all_gather.", rich_help_panel=_COLLECTIVES)
    ] = None,
) -> None:
    """Measure the time of data loading, compute and communication, and find what limits the throughput of a recipe."""
    if recipe != "collectives":
        if sizes is not None or operations is not None:
            raise ConfigError("--sizes and --operations are for tutti bench collectives: leave them out for a recipe.")
        _bench_recipe(recipe, overrides or [], ranks, trials, seconds, variants)
        return
    from tutti.cli.collectives import bench_collectives

    if variants is not None:
        raise ConfigError("--variants is for a recipe: leave it out of tutti bench collectives.")
    bench_collectives(overrides or [], ranks, trials, seconds, sizes, operations)


def _bench_recipe(
    recipe: str, overrides: list[str], ranks: int | None, trials: int, seconds: float, variants: Path | None
) -> None:
    """Measure a recipe, or variants of it."""
    placement = place(ranks)
    make_importable(recipe)
    from tutti.bench.measure import check, read_variants

    chosen = read_variants(variants, recipe, overrides)
    check(chosen, ranks or placement.world_size, trials, seconds)

    def work(placement: Placement, folder: RunFolder | None) -> Any:
        from tutti.bench import measure

        with StatusLine(placement) as report:
            found = measure.bench(chosen, placement, folder, trials, seconds, report)
        if placement.rank == 0:
            _show(found)
        return found

    on_ranks("bench", chosen[0].config, ranks, ["tutti.bench.measure"], work)


def _show(found: "Bench") -> None:
    from tutti.bench.measure import PICTURE
    from tutti.report.bench import draw_phases

    if len(found.found) == 1:
        _print_phases(found.found[0])
    else:
        _print_variants(found)
    for measurement, verdict in zip(found.found, found.verdicts, strict=True):
        label = f"{measurement.name}: " if measurement.name else ""
        for note in measurement.notes:
            print(f"note: {label}{note}")
        if not measurement.name:
            print("\n".join(["", *(f"  {line}" for line in verdict.measurements), ""]))
        print(f"{label}{verdict.sentence}")
        for other in verdict.suggestions if not measurement.name else ():
            print(f"  {other.line}")
    picture = draw_phases(found.found, found.folder.path / PICTURE)
    print(f"\npicture:    {picture}\nrun folder: {found.folder.path}", flush=True)


def _print_phases(measurement: "Measurement") -> None:
    """Print a row for each phase by itself, then for the whole step."""
    from tutti.bench.results import PHASES
    from tutti.bench.shares import find_shares

    shares = find_shares(measurement)
    print(
        f"{measurement.settings['recipe']}: {units.count(measurement.ranks, 'rank')} on {measurement.device_name}, "
        f"{units.count(measurement.threads, 'thread')} each; {measurement.per_rank_batch} samples a rank and step; "
        f"{measurement.trials} trials\n"
    )
    rows, shares_of_batch = [], measurement.global_batch / measurement.per_rank_batch  # ranks may share samples
    for name, figure in [*shares.alone.items(), ("whole", shares.whole)]:
        samples = measurement.per_rank_batch * (2 if name == "double" else 1)
        rate = samples / figure.median if figure.median and name != "exchange" else None
        slowest = max(range(measurement.ranks), key=lambda rank: sum(measurement.seconds[name][rank]))
        rows.append(
            [
                name,
                f"{figure.median * 1e3:,.3f}",
                units.percent(figure.relative_spread),
                units.number(rate) if rate else "",
                units.number(rate * shares_of_batch) if rate else "",
                f"{slowest}" if measurement.ranks > 1 else "",
                PHASES[name],
            ]
        )
    titles = ["phase", "ms", "spread", "samples/s a rank", "in all", "slowest rank", "what it is"]
    units.print_table(titles, rows, left=(titles[0], titles[-1]))
    print(f"\n{units.size(max(measurement.peak_bytes))} of memory at most on a rank")


def _print_variants(found: "Bench") -> None:
    """Print a row for each variant, in samples per second of all ranks."""
    from tutti.bench.shares import find_shares

    phases = [name for name in ("read", "copy", "compute", "communicate") if name in found.found[0].seconds]
    rows = []
    for measurement, verdict in zip(found.found, found.verdicts, strict=True):
        shares = find_shares(measurement)
        rates = [measurement.global_batch / shares.alone[name].median if name in shares.alone else 0 for name in phases]
        whole = shares.samples_per_second
        cells = [*map(units.number, rates), units.number(whole.median), units.percent(whole.relative_spread)]
        rows.append([measurement.name, *cells, verdict.bound])
    titles = ["samples/s", *phases, "whole", "spread", "bound by"]
    units.print_table(titles, rows, left=(titles[0], titles[-1]))
    print()
