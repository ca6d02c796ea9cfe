"""`tutti sweep`: one recipe with every combination of some of its values."""

from dataclasses import dataclass

from tutti.cli.studies import Planned, Where, recipe_of, refuse_with_resume, resume, start
from tutti.study.goals import read_goal
from tutti.study.sweep import Grid, read_axes, sweep_points


@dataclass(frozen=True)
class Asked:
    """A sweep as it was typed."""

    recipe: str | None
    overrides: tuple[str, ...]
    axes: tuple[str, ...]
    seeds: int | None
    ranks: int | None
    micro: int | None
    target: str | None
    skip_impossible: bool


def sweep(asked: Asked, where: Where, resumed: str | None, retry: bool) -> None:
    """Start a sweep, or go on with one."""
    if resumed is not None:
        options = {"--set": asked.axes, "--seeds": asked.seeds, "-n": asked.ranks, "--micro": asked.micro}
        options |= {"--target": asked.target, "--skip-impossible": asked.skip_impossible, "--on": where.on}
        refuse_with_resume({"RECIPE": asked.recipe, "overrides": asked.overrides} | options)
        resume(resumed, "sweep", where, retry)
        return
    recipe = recipe_of(asked.recipe, retry, "tutti sweep RECIPE --set batch.global=64,256")
    grid = Grid(read_axes(asked.axes), _or_one(asked.seeds), _or_one(asked.ranks), asked.micro)
    goal = read_goal(None, None, asked.target, False, timed=False)
    checked, left_out = sweep_points(recipe, asked.overrides, grid, goal, asked.skip_impossible)
    for fault in left_out:
        print(f"left out: {fault.what}: {fault.text}")
    start(Planned("sweep", recipe, asked.overrides, goal, checked), where)


def _or_one(number: int | None) -> int:
    return 1 if number is None else number
