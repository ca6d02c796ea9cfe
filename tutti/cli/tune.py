"""`tutti tune RECIPE`: try the changes that a benchmark suggests, on ranks started here or as one rank."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti import units
from tutti.bench.greedy_search import ALLOWED, TriedChange
from tutti.cli.options import Overrides, Ranks, Recipe, examples
from tutti.cli.ranks import StatusLine, is_rank, on_ranks, place
from tutti.config.load import resolve
from tutti.config.recipes import make_importable
from tutti.config.run import RunConfig
from tutti.errors import ConfigError, nearest
from tutti.ranks.placement import Placement
from tutti.runs.folder import RunFolder

if TYPE_CHECKING:
    from tutti.bench.tune import Tuned


app = typer.Typer()


@app.command(
    epilog=examples(
        "tutti tune mnist -n 2",
        "tutti tune nbody/short --minutes 5 --allow precision",
        "tutti tune digits -n 2 --write tuned.yaml",
    )
)
def tune(
    recipe: Recipe,
    overrides: Overrides = None,
    ranks: Ranks = None,
    minutes: Annotated[float, typer.Option(help="The time limit for trying changes.")] = 5.0,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="A change of the results that is allowed: precision, batch; may be repeated."),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write the tuned recipe here, as well as in the run folder.")
    ] = None,
) -> None:
    """Try the changes that a benchmark suggests, keep what helps, and write a recipe that extends the original."""
    _tune(recipe, overrides or [], ranks, minutes, allow or [], write)


def _tune(
    recipe: str, overrides: list[str], ranks: int | None, minutes: float, allow: list[str], write: Path | None
) -> None:
    """Tune on ranks that are started here, or as one rank."""
    placement = place(ranks)
    make_importable(recipe)
    config = resolve(recipe, overrides).config
    _check(config, minutes, allow)
    if not is_rank(placement):
        from tutti.bench.tune import check_target
        from tutti.config.check import check_parts

        if write is not None:
            check_target(write, recipe)
        check_parts(config, ranks or 1)

    def work(placement: Placement, folder: RunFolder | None) -> Any:
        from tutti.bench.tune import TuneRequest
        from tutti.bench.tune import tune as tune_recipe

        asked = TuneRequest(recipe, tuple(overrides), minutes, tuple(allow), write)
        if placement.rank == 0:
            changes = (
                f"allowed to change: {', '.join(allow)}" if allow else "changes that affect the results are not tried"
            )
            print(f"tuning {config.recipe} for at most {units.count(minutes, 'minute')}; {changes}\n", flush=True)
        with StatusLine(placement) as report:
            tuned = tune_recipe(asked, placement, folder, report, _show_change)
        if placement.rank == 0:
            _show(tuned, asked.recipe)
        return tuned

    on_ranks("tune", config, ranks, ["tutti.bench.tune"], work)


def _check(config: RunConfig, minutes: float, allow: list[str]) -> None:
    if not (minutes > 0 and math.isfinite(minutes)):
        raise ConfigError(f"--minutes {minutes:g}: expected a number above 0. Try 5.")
    for word in allow:
        if word not in ALLOWED:
            raise ConfigError(f"--allow {word}: expected one of {', '.join(ALLOWED)}.{nearest(word, ALLOWED)}")
    if config.framework != "torch":
        raise ConfigError(f"framework={config.framework} cannot be tuned: expected torch. Set framework=torch.")
    if config.step is not None:
        raise ConfigError(
            f"step={config.step.name} cannot be tuned: expected a recipe without step, whose settings tutti can try. "
            "Trace the step with tutti profile."
        )


def _show_change(change: TriedChange) -> None:
    """Print a line for a change that was tried, and the new verdict if it was kept."""
    print(_line(change), flush=True)
    if change.kept:
        print(f"    {change.verdict}", flush=True)


def _line(change: TriedChange) -> str:
    if change.before is None and change.after is not None:
        spread = f"spread {units.percent(change.after.relative_spread)}"
        return f"{change.name}: {units.number(change.after.median)} samples/s ({spread})"
    if change.before is None or change.after is None:
        return f"{change.name}: {change.outcome}"
    speeds = f"{units.number(change.before.median)} -> {units.number(change.after.median)} samples/s"
    return f"{change.name}: {speeds}, {change.gain or 1:.2f} times: {change.outcome}"


def _show(tuned: "Tuned", recipe: str) -> None:
    """Print all changes, what is left to try, and the path of the tuned recipe."""
    from tutti.bench.tune import PICTURE
    from tutti.report.bench import draw_tuning

    search = tuned.search
    titles = ["change", "overrides", "before", "after", "gain", "outcome"]
    print()
    rows = [_row(number, change) for number, change in enumerate(search.tried)]
    units.print_table(titles, rows, left=("overrides", "outcome"))
    if tuned.spent:
        print("\nthe time was over before all changes were tried: set a longer one with --minutes")
    left = search.left()
    print("\n".join(["", "not tried here:", *(f"  {line}" for line in left)]) if left else "", flush=True)
    picture = draw_tuning(search.tried, recipe, tuned.folder.path / PICTURE)
    print(f"{search.gain:.2f} times as fast as {recipe}: {' '.join(_kept(tuned)) or 'nothing helped'}")
    print(f"tuned recipe: {tuned.recipe}\npicture:      {picture}\nrun folder:   {tuned.folder.path}", flush=True)


def _kept(tuned: "Tuned") -> list[str]:
    return [f"{key}={value}" for key, value in tuned.search.kept.items()]


def _row(number: int, change: TriedChange) -> list[str]:
    before, after = (units.number(figure.median) if figure else "" for figure in (change.before, change.after))
    return [str(number), change.name, before, after, f"{change.gain:.2f}" if change.gain else "", change.outcome]
