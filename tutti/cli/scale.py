"""`tutti scale`: one recipe on several numbers of ranks."""

from dataclasses import dataclass

from tutti.cli.studies import Planned, Where, recipe_of, refuse_with_resume, resume, start
from tutti.errors import ConfigError
from tutti.study.goals import read_goal
from tutti.study.scale import read_mode, read_ranks, scale_points


@dataclass(frozen=True)
class Asked:
    """A study of ranks as it was typed."""

    recipe: str | None
    overrides: tuple[str, ...]
    ranks: str | None
    mode: str | None
    repeat: int | None
    steps: int | None
    warmup: int | None
    target: str | None
    full: bool


def scale(asked: Asked, where: Where, resumed: str | None, retry: bool) -> None:
    """Start a study of ranks, or go on with one."""
    if resumed is not None:
        given = {f"--{name}": value for name, value in vars(asked).items() if name not in ("recipe", "overrides")}
        refuse_with_resume({"RECIPE": asked.recipe, "overrides": asked.overrides, "--on": where.on} | given)
        resume(resumed, "scale", where, retry)
        return
    recipe = recipe_of(asked.recipe, retry, "tutti scale RECIPE --ranks 1,2,4 --mode weak")
    for option, value, example in (("--ranks", asked.ranks, "1,2,4"), ("--mode", asked.mode, "weak")):
        if value is None:
            raise ConfigError(f"{option} is missing. Say {option} {example}, for example.")
    ranks, mode = read_ranks(asked.ranks or ""), read_mode(asked.mode or "")
    goal = read_goal(asked.steps, asked.warmup, asked.target, asked.full, timed=True)
    repeats = 1 if asked.repeat is None else asked.repeat
    checked = scale_points(recipe, asked.overrides, ranks, mode, goal, repeats)
    start(Planned("scale", recipe, asked.overrides, goal, checked, mode), where)
