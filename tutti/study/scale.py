"""Scaling studies: a recipe on several numbers of ranks, with a fixed per-rank batch (weak) or global batch (strong).

Light: imports no torch.
"""

import random
from collections.abc import Sequence
from typing import get_args

from tutti.config.load import resolve
from tutti.config.run import RunConfig
from tutti.errors import ConfigError, nearest
from tutti.study.checking import Checked, complete_all, format_faults
from tutti.study.definition import Goal, Mode, Point


def read_ranks(text: str) -> list[int]:
    """Parses `1,2,4` into sorted numbers."""
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
    """Parses `weak` or `strong`."""
    for mode in get_args(Mode):
        if text == mode:
            return mode
    raise ConfigError(
        f"--mode {text!r}: expected weak, which fixes the batch of a rank, or strong, which fixes the global "
        f"batch.{nearest(text, get_args(Mode))}"
    )


def scale_points(
    recipe: str, overrides: Sequence[str], ranks: Sequence[int], mode: Mode, goal: Goal, repeats: int
) -> list[Checked]:
    """Returns the checked points of a scaling study in the order in which they run."""
    if repeats < 1:
        raise ConfigError(f"--repeat {repeats}: expected 1 or more. Try --repeat 3.")
    config = resolve(recipe, overrides).config
    batch = fixed_batch(config, mode, min(ranks))
    points = [_point(number, repeat, batch, goal, config.seed) for repeat in range(1, repeats + 1) for number in ranks]
    if repeats > 1:  # so that a drift of the machine favours no number of ranks
        random.Random(config.seed).shuffle(points)
    found, faults = complete_all(recipe, overrides, goal, points)
    if faults:
        raise ConfigError(format_faults(faults, len(points)))
    return found


def fixed_batch(config: RunConfig, mode: Mode, fewest: int) -> str:
    """Returns the batch override of all points; the recipe's batch applies to the fewest ranks."""
    batch = config.batch
    if mode == "strong":
        return f"batch.global={batch.global_batch or (batch.per_rank or 0) * fewest}"
    if batch.per_rank is not None:
        return f"batch.per_rank={batch.per_rank}"
    whole = batch.global_batch or 0
    if whole % fewest:
        raise ConfigError(
            f"batch.global={whole} does not split over {fewest} ranks, the fewest of this study: expected a multiple "
            f"of {fewest}. "
            f"Set batch.per_rank={max(1, whole // fewest)}."
        )
    return f"batch.per_rank={whole // fewest}"


def _point(ranks: int, repeat: int, batch: str, goal: Goal, seed: int) -> Point:
    """Returns a point; repeats of training runs have different seeds, repeats of timed runs the same."""
    own = seed if goal.kind == "steps" else seed + repeat - 1
    overrides = (batch,) if own == seed else (batch, f"seed={own}")
    return Point(f"n{ranks}-r{repeat}", ranks, overrides, {"ranks": ranks}, repeat, own)
