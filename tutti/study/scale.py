"""Studies of ranks: the same recipe on several numbers of them, with the batch of a rank fixed, or that of all.

Light: imports no torch.
"""

import random
from collections.abc import Sequence
from typing import get_args

from tutti.config.load import resolve
from tutti.config.run import RunConfig
from tutti.errors import ConfigError, nearest
from tutti.study.checking import Checked, complete_all, tell_faults
from tutti.study.definition import Goal, Mode, Point


def read_ranks(text: str) -> list[int]:
    """`1,2,4` as numbers in rising order."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"--ranks {text!r}: expected numbers of ranks, each 1 or more, for example --ranks 1,2,4.")
    numbers = [int(word) for word in words]
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    if twice:
        raise ConfigError(
            f"--ranks {text!r} names {', '.join(map(str, twice))} twice: expected each number once. "
            "Measure it several times with --repeat."
        )
    return sorted(numbers)


def read_mode(text: str) -> Mode:
    """weak or strong."""
    for mode in get_args(Mode):
        if text == mode:
            return mode
    raise ConfigError(
        f"--mode {text!r}: expected weak, where the batch of a rank stays the same, or strong, where that of all "
        f"ranks together does.{nearest(text, get_args(Mode))}"
    )


def scale_points(
    recipe: str, overrides: Sequence[str], ranks: Sequence[int], mode: Mode, goal: Goal, repeats: int
) -> list[Checked]:
    """The points of a study of ranks in the order in which they run, all of them checked."""
    if repeats < 1:
        raise ConfigError(f"--repeat {repeats}: expected 1 or more. Try --repeat 3.")
    config = resolve(recipe, overrides).config
    batch = fixed_batch(config, mode, min(ranks))
    points = [_point(number, repeat, batch, goal, config.seed) for repeat in range(1, repeats + 1) for number in ranks]
    if repeats > 1:  # a machine that drifts favours no size
        random.Random(config.seed).shuffle(points)
    found, faults = complete_all(recipe, overrides, goal, points)
    if faults:
        raise ConfigError(tell_faults(faults, len(points)))
    return found


def fixed_batch(config: RunConfig, mode: Mode, fewest: int) -> str:
    """The override that all points share; the recipe's batch is that of the fewest ranks."""
    batch = config.batch
    if mode == "strong":
        return f"batch.global={batch.global_batch or (batch.per_rank or 0) * fewest}"
    if batch.per_rank is not None:
        return f"batch.per_rank={batch.per_rank}"
    whole = batch.global_batch or 0
    if whole % fewest:
        raise ConfigError(
            f"batch.global={whole} does not split over {fewest} ranks, the fewest of this study, so that there is no "
            f"batch of a rank to hold fixed: expected a multiple of {fewest}. "
            f"Set batch.per_rank={max(1, whole // fewest)}."
        )
    return f"batch.per_rank={whole // fewest}"


def _point(ranks: int, repeat: int, batch: str, goal: Goal, seed: int) -> Point:
    """Runs that learn have seeds of their own; those that are only timed do the same work each time."""
    own = seed if goal.kind == "steps" else seed + repeat - 1
    overrides = (batch,) if own == seed else (batch, f"seed={own}")
    return Point(f"n{ranks}-r{repeat}", ranks, overrides, {"ranks": ranks}, repeat, own)
