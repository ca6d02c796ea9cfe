"""Every point of a study looked at before the first one starts: what cannot be is told in one message.

Light: imports no torch, unless a recipe names a part of the user's own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tutti.config.check import check_best
from tutti.config.load import resolve
from tutti.config.parts import UserPartOptions
from tutti.config.plan import make_plan
from tutti.config.run import RunConfig
from tutti.config.schedule import make_schedule
from tutti.errors import ConfigError
from tutti.study.definition import Goal, Point
from tutti.study.goals import check_metric, goal_overrides

_SHOWN = 12  # faults in a message


@dataclass(frozen=True)
class Fault:
    """Why a point cannot run."""

    what: str  # the point, in the words of the command line
    text: str


@dataclass(frozen=True)
class Checked:
    """A point that can run, with its whole configuration."""

    point: Point
    config: RunConfig


def complete(recipe: str, overrides: Sequence[str], goal: Goal, point: Point) -> Checked:
    """A point with what its goal adds to its overrides, and its configuration; an error where it cannot run."""
    config = resolve(recipe, [*overrides, *point.overrides]).config
    check_metric(goal, config)
    given = (*point.overrides, *goal_overrides(goal, config, point.ranks))
    config = resolve(recipe, [*overrides, *given]).config
    check_config(config, point.ranks)
    return Checked(replace(point, overrides=given, seed=config.seed), config)


def check_config(config: RunConfig, ranks: int) -> None:
    """Refuse a user's part that does not import, a batch that does not split, a warm-up longer than the run."""
    for part in (config.data, config.model, config.loss, config.optim):
        if isinstance(part, UserPartOptions):
            part.locate()
    check_best(config, [name.rpartition(":")[2] for name in config.metrics])
    samples = config.data.train_samples()
    if samples is not None:
        make_schedule(config, make_plan(config, ranks, samples))


def complete_all(
    recipe: str, overrides: Sequence[str], goal: Goal, points: Iterable[Point]
) -> tuple[list[Checked], list[Fault]]:
    """The points that can run, and the faults of the others; a recipe that is wrong by itself is an error."""
    resolve(recipe, overrides)
    found, faults = [], []
    for point in points:
        try:
            found.append(complete(recipe, overrides, goal, point))
        except ConfigError as error:
            faults.append(Fault(describe(point.values), str(error)))
    return found, faults


def describe(values: Mapping[str, object]) -> str:
    """What is varied, in the words of a command line."""
    return " ".join(f"{key}={show(value)}" for key, value in values.items())


def show(value: object) -> str:
    """A value of YAML in a few letters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {show(each)}' for key, each in value.items())}}}"
    return f"[{','.join(map(show, value))}]" if isinstance(value, list | tuple) else str(value)


def tell_faults(faults: Sequence[Fault], of: int) -> str:
    """All faults in one message, each text once."""
    points: dict[str, dict[str, None]] = {}
    for fault in faults:
        points.setdefault(fault.text, {})[fault.what] = None
    if len(points) == 1 and len(faults) == of:  # the same for all: it is not the point's
        return faults[0].text
    lines = [f"{', '.join(list(names)[:_SHOWN])}{_more(len(names))}: {text}" for text, names in points.items()]
    return "\n  ".join([f"{len(faults)} of {of} points cannot run:", *lines[:_SHOWN]]) + _more(len(lines))


def _more(number: int) -> str:
    return f" and {number - _SHOWN} more" if number > _SHOWN else ""
