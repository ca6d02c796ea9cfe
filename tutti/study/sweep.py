"""Sweeps: every combination of the given values of a recipe, with several seeds.

Light: imports no torch.
"""

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from tutti.config.load import resolve
from tutti.config.recipes import parse_yaml
from tutti.config.run import RunConfig
from tutti.errors import ConfigError
from tutti.study.checking import Checked, Fault, complete_all, format_faults, show
from tutti.study.definition import Goal, Point

_LONGEST_NAME = 80


@dataclass(frozen=True)
class SweepAxis:
    """A key of the recipe and its values as they were typed."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class SweepGrid:
    """The axes of a sweep, and its numbers of seeds, ranks and samples per micro-batch."""

    axes: tuple[SweepAxis, ...]
    seeds: int = 1
    ranks: int = 1
    micro: int | None = None


def read_axes(given: Sequence[str]) -> tuple[SweepAxis, ...]:
    """Parses `batch.global=64,256` and similar; raises ConfigError for a repeated key."""
    axes = tuple(map(_read_axis, given))
    if not axes:
        raise ConfigError(
            "a sweep without --set has one point: expected what to vary, as in --set batch.global=64,256."
        )
    for key, times in Counter(axis.key for axis in axes).items():
        if times > 1:
            raise ConfigError(
                f"--set {key}=... is given {times} times: expected each key once, with all of its values."
            )
    return axes


def split_values(text: str) -> list[str]:
    """Returns the items of a YAML flow sequence without brackets, as typed; empty if it is not one."""
    # The braces of a variable, ${NAME}, are not YAML: it is replaced by text of the same length.
    plain = re.sub(r"\$\{[^}]*\}", lambda variable: "_" * len(variable[0]), text)
    try:
        node = yaml.compose(f"[{plain}\n]", Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return []
    if not isinstance(node, yaml.SequenceNode) or plain.rstrip().endswith(","):
        return []
    return [text[item.start_mark.index - 1 : item.end_mark.index - 1].strip() for item in node.value]


def sweep_points(
    recipe: str, overrides: Sequence[str], grid: SweepGrid, goal: Goal, skip_impossible: bool
) -> tuple[list[Checked], list[Fault]]:
    """Returns the points of a sweep, all combinations of one seed before the next seed, and those left out."""
    for option, number in (("--seeds", grid.seeds), ("-n", grid.ranks), ("--micro", grid.micro)):
        if number is not None and number < 1:
            raise ConfigError(f"{option} {number}: expected 1 or more.")
    if grid.seeds > 1 and any(axis.key == "seed" for axis in grid.axes):
        raise ConfigError(f"--seeds {grid.seeds} with --set seed=...: expected one of them. Leave out --seeds.")
    points = _points(recipe, overrides, grid)
    found, faults = complete_all(recipe, overrides, goal, points)
    if faults and not (found and skip_impossible):
        hint = "\nLeave out the points that cannot run with --skip-impossible." if found else ""
        raise ConfigError(format_faults(faults, len(points)) + hint)
    return found, faults


def _points(recipe: str, overrides: Sequence[str], grid: SweepGrid) -> list[Point]:
    """Returns all points; a key or value that the recipe does not accept raises ConfigError."""
    combinations = list(itertools.product(*(axis.values for axis in grid.axes)))
    points: list[list[Point]] = []
    faults = []
    resolve(recipe, overrides)
    for name, values in zip(_names(combinations), combinations, strict=True):
        chosen = {axis.key: value for axis, value in zip(grid.axes, values, strict=True)}
        try:
            points.append(_seeded(recipe, overrides, grid, name, chosen))
        except ConfigError as error:
            faults.append(Fault(" ".join(_overrides(chosen)), str(error)))
    if faults:
        raise ConfigError(format_faults(faults, len(combinations)))
    return [each for repeat in range(grid.seeds) for each in (of_seeds[repeat] for of_seeds in points)]


def _seeded(
    recipe: str, overrides: Sequence[str], grid: SweepGrid, name: str, chosen: Mapping[str, str]
) -> list[Point]:
    """Returns a combination with each of its seeds."""
    config = resolve(recipe, [*overrides, *_overrides(chosen)]).config
    given = (*_overrides(chosen), *_micro_batch(config, grid))
    values = {key: parse_yaml(value, key) for key, value in chosen.items()}
    points = []
    for repeat in range(1, grid.seeds + 1):
        seed = config.seed + repeat - 1
        own = given if repeat == 1 else (*given, f"seed={seed}")
        points.append(Point(f"{name}-r{repeat}", grid.ranks, own, values, repeat, seed))
    return points


def _overrides(chosen: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in chosen.items()]


def _micro_batch(config: RunConfig, grid: SweepGrid) -> list[str]:
    """Returns the override of batch.micro: --micro if the per-rank batch is larger, else one pass."""
    if grid.micro is None:
        return []
    share = config.batch.per_rank or (config.batch.global_batch or 0) // grid.ranks
    return [f"batch.micro={grid.micro if share > grid.micro else 'null'}"]


def _names(combinations: Sequence[Sequence[str]]) -> list[str]:
    """Returns a folder name for each combination: its values, or its number if they are too long or not unique."""
    names = ["_".join(re.sub(r"[^\w.]+", "-", value).strip("-") or "-" for value in values) for values in combinations]
    if len({name.lower() for name in names}) < len(names) or max(map(len, names)) > _LONGEST_NAME:
        return [f"{number:03d}" for number in range(1, len(combinations) + 1)]
    return names


def _read_axis(text: str) -> SweepAxis:
    key, equals, values = text.partition("=")
    split = split_values(values)
    if not equals or not all(word.isidentifier() for word in key.split(".")) or not split:
        raise ConfigError(
            f"--set {text!r}: expected KEY=VALUE,VALUE,..., for example batch.global=64,256 or "
            "model.hidden=[64],[128,64]. Quote a text that contains a comma, bracket or brace."
        )
    parsed = [show(parse_yaml(value, f"--set {text!r}")) for value in split]
    if twice := [value for value, times in Counter(parsed).items() if times > 1]:
        raise ConfigError(f"--set {text!r} names {', '.join(twice)} twice: expected each value once.")
    return SweepAxis(key, tuple(split))
