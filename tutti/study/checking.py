"""Goals of a study, and the check of every point before the first one starts; all errors form one message."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tutti.config.check import check_best, check_measured, check_noise_scale, check_stop
from tutti.config.load import resolve
from tutti.config.parts import UserPartOptions
from tutti.config.plan import Plan, make_plan
from tutti.config.run import RunConfig
from tutti.config.schedule import make_schedule
from tutti.errors import ConfigError
from tutti.study.definition import Goal, Point

STEPS, WARMUP_STEPS = 100, 20
_WINDOWS = 10  # log windows of a timed run, so that its speed has a spread


def read_goal(steps: int | None, warmup: int | None, target: str | None, full: bool, timed: bool) -> Goal:
    """Returns the requested goal; without a request, a timed study measures speed and any other runs the whole recipe.

    In a timed study a target ends the runs; in other studies they continue to the end of the recipe.
    """
    options = {"--steps": steps is not None, "--target": target is not None, "--full": full}
    named = [option for option, given in options.items() if given]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)}: expected one goal at most. Leave out all but one of them.")
    if warmup is not None and (target is not None or full):
        raise ConfigError(f"--warmup {warmup} with {named[0]}: expected --steps, or no goal. Leave out --warmup.")
    if target is not None:
        metric, value = read_target(target)
        return Goal("target" if timed else "full", metric=metric, target=value)
    if full or (steps is None and not timed):
        return Goal("full")
    return _timed(STEPS if steps is None else steps, WARMUP_STEPS if warmup is None else warmup)


def check_metric(goal: Goal, config: RunConfig) -> None:
    """Raises ConfigError for a target, of the study or the recipe, whose metric the recipe does not measure."""
    check_stop(config, config.metrics)
    if goal.metric is not None:
        check_measured(f"--target {goal.metric}={goal.target:g}", goal.metric, config, config.metrics)


def goal_overrides(goal: Goal, config: RunConfig, ranks: int) -> Iterable[str]:
    """Yields the overrides of a goal: a run to a target stops there; a short run writes no checkpoints."""
    if goal.kind == "target":
        yield f"stop_at={{{goal.metric}: {goal.target!r}}}"
    if goal.kind not in ("steps", "rate"):
        return
    total = goal.warmup_steps + (goal.steps or 0)
    if goal.kind == "rate":
        yield from ("schedule.warmup_steps=0", "schedule.decay=constant", "schedule.milestones=[]")
    yield from (f"max_steps={total}", "stop_at=null", "stop_early=null")
    samples = config.data.train_samples()
    if samples is None:
        epochs = total  # an epoch has at least one step
    else:
        plan = make_plan(config, ranks, samples)
        epochs = math.ceil(total / plan.steps_per_epoch)
        if goal.kind == "steps" and _learning_warmup(config, plan) > total:
            yield f"schedule.warmup_steps={total}"
    if epochs > config.epochs:
        yield f"epochs={epochs}"
    yield f"log.every_steps={window_of(goal)}"
    yield from ("log.tensorboard=false", "log.phases=true")
    yield from ("checkpoint.every_steps=null", "checkpoint.every_epochs=null", "checkpoint.best=null")


def window_of(goal: Goal) -> int:
    """The number of steps in a log window of a timed run."""
    return max(1, (goal.steps or 0) // _WINDOWS)


def describe_goal(goal: Goal) -> str:
    """Describes in words how long a point runs."""
    if goal.kind == "steps":
        return f"{goal.steps} steps after {goal.warmup_steps} of warm-up"
    if goal.kind == "rate":
        return f"{goal.steps} steps at a constant rate"
    if goal.kind == "target":
        return f"to {goal.metric}={goal.target:g}, or the whole recipe"
    return "the whole recipe" + ("" if goal.metric is None else f", and when it reaches {goal.metric}={goal.target:g}")


def _learning_warmup(config: RunConfig, plan: Plan) -> int:
    """The number of steps of learning-rate warm-up."""
    schedule = config.schedule
    return schedule.warmup_steps or round((schedule.warmup_epochs or 0) * plan.steps_per_epoch)


def _timed(steps: int, warmup: int) -> Goal:
    if steps < 1:
        raise ConfigError(f"--steps {steps}: expected 1 or more. Try --steps {STEPS}.")
    if warmup < 0:
        raise ConfigError(f"--warmup {warmup}: expected 0 or more. Try --warmup {WARMUP_STEPS}.")
    window = window_of(Goal("steps", steps))
    return Goal("steps", steps, math.ceil(warmup / window) * window)  # whole windows


def read_target(text: str) -> tuple[str, float]:
    """Parses METRIC=NUMBER of --target."""
    metric, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not metric or not math.isfinite(number):
        raise ConfigError(f"--target {text!r}: expected METRIC=NUMBER, for example valid_accuracy=0.95.")
    return metric, number


_SHOWN = 12  # errors in a message


@dataclass(frozen=True)
class Fault:
    """Why a point cannot run."""

    what: str  # the point, as on the command line
    text: str


@dataclass(frozen=True)
class Checked:
    """A point that can run, with its complete configuration."""

    point: Point
    config: RunConfig


def complete(recipe: str, overrides: Sequence[str], goal: Goal, point: Point) -> Checked:
    """Adds the overrides of the goal to a point and resolves its configuration; raises ConfigError if it cannot run."""
    config = resolve(recipe, [*overrides, *point.overrides]).config
    check_metric(goal, config)
    given = (*point.overrides, *goal_overrides(goal, config, point.ranks))
    config = resolve(recipe, [*overrides, *given]).config
    check_config(config, point.ranks)
    return Checked(replace(point, overrides=given, seed=config.seed), config)


def check_config(config: RunConfig, ranks: int) -> None:
    """Raises ConfigError if a part cannot be imported, the batch does not split, or warm-up exceeds the run."""
    for part in (config.data, config.model, config.loss, config.optim, config.step):
        if isinstance(part, UserPartOptions):
            part.locate()
    check_best(config, [name.rpartition(":")[2] for name in config.metrics])
    check_noise_scale(config, ranks)
    samples = config.data.train_samples()
    if samples is not None:
        make_schedule(config, make_plan(config, ranks, samples))


def complete_all(
    recipe: str, overrides: Sequence[str], goal: Goal, points: Iterable[Point]
) -> tuple[list[Checked], list[Fault]]:
    """Returns the points that can run and the faults of the others; an invalid recipe raises ConfigError."""
    resolve(recipe, overrides)
    found, faults = [], []
    for point in points:
        try:
            found.append(complete(recipe, overrides, goal, point))
        except ConfigError as error:
            faults.append(Fault(describe_values(point.values), str(error)))
    return found, faults


def describe_values(values: Mapping[str, object]) -> str:
    """The varied values as on the command line."""
    return " ".join(f"{key}={show(value)}" for key, value in values.items())


def show(value: object) -> str:
    """A YAML value as short text."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {show(each)}' for key, each in value.items())}}}"
    return f"[{','.join(map(show, value))}]" if isinstance(value, list | tuple) else str(value)


def format_faults(faults: Sequence[Fault], of: int) -> str:
    """Joins all faults in one message, each text once."""
    points: dict[str, dict[str, None]] = {}
    for fault in faults:
        points.setdefault(fault.text, {})[fault.what] = None
    if len(points) == 1 and len(faults) == of:  # the recipe is at fault, not a point
        return faults[0].text
    lines = [f"{', '.join(list(names)[:_SHOWN])}{_more(len(names))}: {text}" for text, names in points.items()]
    return "\n  ".join([f"{len(faults)} of {of} points cannot run:", *lines[:_SHOWN]]) + _more(len(lines))


def _more(number: int) -> str:
    return f" and {number - _SHOWN} more" if number > _SHOWN else ""
