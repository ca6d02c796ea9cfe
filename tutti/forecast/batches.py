"""Global batches and their learning rates: what a sweep has measured, and the rules for what it has not."""

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tutti import units
from tutti.config.load import resolve
from tutti.config.recipes import parse_yaml, read_yaml
from tutti.errors import ConfigError, DataError, nearest
from tutti.forecast.curve import ScalingCurve
from tutti.forecast.epochs import EpochsPoint
from tutti.runs.folder import RunFolder
from tutti.runs.record import read_record
from tutti.study.checking import read_target
from tutti.study.definition import Definition, Goal, StudyFolder, read_definition
from tutti.study.outcome import PointOutcome, RunFigures, read_figures, read_outcomes

_BATCH_KEYS = ("batch.global", "batch.per_rank", "ranks")
_MOST = 0.5  # of the runs of a setting have to reach the target
_SAME = 0.02  # relative difference of batches that count as one
BAND = 2.0  # the factor by which a rate may be off
_WARM_FROM = 4.0  # times the rate of the recipe
_WARM_SHARE = 0.05  # of the epochs
_LARGE_RESNET = 8192  # batch from which residual networks need LARS or LAMB
_TIMED = ("framework", "backend", "data", "model", "precision", "speed", "ddp", "runtime")  # what a step takes
_LINEAR = ("sgd", "lars")


@dataclass(frozen=True)
class SweptBatch:
    """The best setting that a sweep has at one global batch."""

    global_batch: int
    epochs: tuple[float, ...]  # passes over the data to the target, in each run that reached it, if most do
    tried_epochs: float  # the most that any run was trained for
    runs: int  # of all settings
    collapsed: int
    peak_lr: float | None = None
    warmup_epochs: float | None = None
    optimizer: str | None = None
    ranks: int | None = None
    samples_per_second: float | None = None

    @property
    def is_reached(self) -> bool:
        return bool(self.epochs)

    @property
    def is_collapsed(self) -> bool:
        return self.collapsed == self.runs

    @property
    def median_epochs(self) -> float:
        return statistics.median(self.epochs)


@dataclass(frozen=True)
class MeasuredSweep:
    """The batches of a sweep with a target, in rising order."""

    path: Path
    recipe: str
    metric: str
    target: float
    batches: tuple[SweptBatch, ...]
    overrides: tuple[str, ...] = ()
    at_once: int = 1  # runs at the same time, which were slower than alone

    @property
    def reached(self) -> tuple[SweptBatch, ...]:
        return tuple(each for each in self.batches if each.is_reached)

    @property
    def largest_reached(self) -> SweptBatch:
        return self.reached[-1]

    @property
    def first_collapsed(self) -> int | None:
        """The smallest batch at which every run collapsed, above all that reached the target."""
        above = [each for each in self.batches if each.global_batch > self.largest_reached.global_batch]
        return next((each.global_batch for each in above if each.is_collapsed), None)

    def has_speed_of(self, recipe: "StudiedRecipe") -> bool:
        """Whether its runs are as fast as those of a study: of the same model and data, and alone on the machine."""
        mine, theirs = (_that_matter(overrides) for overrides in (self.overrides, recipe.overrides))
        return self.at_once == 1 and self.recipe == recipe.name and mine == theirs

    def points(self) -> list[EpochsPoint]:
        """Every run that reached the target, and the batches at which none did."""
        found = [EpochsPoint(each.global_batch, epochs) for each in self.reached for epochs in each.epochs]
        missed = [each for each in self.batches if not each.is_reached and not each.is_collapsed]
        return found + [EpochsPoint(each.global_batch, each.tried_epochs, is_reached=False) for each in missed]


def read_sweep(path: Path, target: str | None = None) -> MeasuredSweep:
    """The batches of the study in a folder, by its own target or by METRIC=VALUE."""
    folder = StudyFolder(path)
    definition = read_definition(folder)
    if definition.goal.kind == "rate":
        raise DataError(
            f"--sweep {path} searched for a learning rate, in {definition.goal.steps} steps each: expected whole runs. "
            f"Start some with tutti sweep {definition.recipe} --set batch.global=..."
        )
    outcomes = [each for each in read_outcomes(folder, definition) if each.plan.get("global_batch")]
    ended = [each for each in outcomes if each.is_finished or each.has_diverged]
    if not ended:
        raise DataError(
            f"--sweep {path} has no finished run: expected some. Resume it with tutti sweep --resume {path}."
        )
    batches = sorted({int(each.plan["global_batch"]) for each in ended})
    if len(batches) < 2:
        raise DataError(
            f"--sweep {path}: every run has a global batch of {batches[0]}: expected several batches. "
            f"Start one with tutti sweep {definition.recipe} --set batch.global={batches[0]},{4 * batches[0]}."
        )
    goal = _goal(definition, ended, target, path)
    found = [_swept(batch, [each for each in ended if each.plan["global_batch"] == batch], goal) for batch in batches]
    assert goal.metric is not None and goal.target is not None
    sweep = MeasuredSweep(
        path, definition.recipe, goal.metric, goal.target, tuple(found), definition.overrides, definition.at_once
    )
    if not sweep.reached:
        raise DataError(
            f"--sweep {path}: no run reaches {goal.metric}={goal.target:g}: expected a target that some reach."
            f"{_reachable(ended, goal.metric)}"
        )
    return sweep


def _that_matter(overrides: Sequence[str]) -> set[str]:
    """The overrides that change how long a sample takes."""
    return {each for each in overrides if each.partition("=")[0].partition(".")[0] in _TIMED}


def _goal(definition: Definition, outcomes: Sequence[PointOutcome], target: str | None, path: Path) -> Goal:
    """The target of the sweep, or the one that is given, which the runs must have measured."""
    known = sorted({name for each in outcomes for epoch in each.epochs for name in epoch.metrics})
    if target is not None:
        metric, value = read_target(target)
        if metric not in known:
            raise ConfigError(
                f"--target {target}: the runs of {path} measure {', '.join(known) or 'nothing'}, and no {metric!r}."
                f"{nearest(metric, known)}"
            )
        return Goal("full", metric=metric, target=value)
    if definition.goal.metric is None or definition.goal.target is None:
        best = [name for name in known if name.startswith("valid_")]
        hint = _reachable(outcomes, best[0]) if best else ""
        raise ConfigError(f"--sweep {path} has no target: expected --target METRIC=VALUE.{hint}")
    return definition.goal


def _reachable(outcomes: Sequence[PointOutcome], metric: str) -> str:
    """A target that every run which did not collapse has reached."""
    figures = [read_figures(each, Goal("full")) for each in outcomes]
    best = [each.best[metric] for each in figures if metric in each.best and not each.collapse]
    if not best:
        return ""
    worst = max(best) if units.is_lower_better(metric) else min(best)
    return f" All runs that train reach --target {metric}={worst:.4g}."


def _swept(batch: int, outcomes: Sequence[PointOutcome], goal: Goal) -> SweptBatch:
    """The setting at a batch whose runs reach the target in the fewest epochs."""
    settings: dict[str, list[RunFigures]] = {}
    for each in outcomes:
        others = {key: value for key, value in each.point.values.items() if key not in _BATCH_KEYS}
        settings.setdefault(json.dumps(others, sort_keys=True, default=str), []).append(read_figures(each, goal))
    every = [run for runs in settings.values() for run in runs]
    last = [(run.outcome, run.outcome.epochs[-1]) for run in every if run.outcome.epochs]
    tried = max((_passes(outcome, epoch.step, epoch.epoch) for outcome, epoch in last), default=0.0)
    found = SweptBatch(batch, (), max(tried, 1.0), len(every), sum(run.collapse is not None for run in every))
    best = math.inf
    for runs in settings.values():
        epochs = [_passes(run.outcome, run.reached.step, run.reached.epoch) for run in runs if run.reached]
        if len(epochs) > _MOST * len(runs) and statistics.median(epochs) < best:
            best = statistics.median(epochs)
            speeds = [run.speed.median for run in runs if run.speed]
            speed = statistics.median(speeds) if speeds else None
            ranks = runs[0].outcome.point.ranks
            measured = {"ranks": ranks, "samples_per_second": speed, **_rate(runs[0].outcome)}
            found = replace(found, epochs=tuple(epochs), **measured)
    return found


def _passes(outcome: PointOutcome, step: int, epoch: int) -> float:
    """Passes over the data until a step: epochs leave out the samples that fill no batch."""
    samples = outcome.plan.get("train_samples")
    return step * outcome.plan["global_batch"] / samples if samples else float(epoch)


def _rate(outcome: PointOutcome) -> dict[str, Any]:
    """The learning rate, the warm-up and the optimizer of a run."""
    path = RunFolder(Path(outcome.folder)).config
    config = read_yaml(path) if path.is_file() else {}
    schedule, optim = _group(config, "schedule"), _group(config, "optim")
    warmup, steps = schedule.get("warmup_epochs"), outcome.plan.get("steps_per_epoch")
    if warmup is None and schedule.get("warmup_steps") is not None and steps:
        warmup = schedule["warmup_steps"] / steps
    return {"peak_lr": outcome.plan.get("peak_lr"), "warmup_epochs": warmup, "optimizer": optim.get("name")}


def _group(config: Any, name: str) -> Mapping[str, Any]:
    found = config.get(name) if isinstance(config, Mapping) else None
    return found if isinstance(found, Mapping) else {}


@dataclass(frozen=True)
class BaseRate:
    """The learning rate of a recipe, and the global batch that it was chosen for."""

    global_batch: float
    lr: float
    optimizer: str
    warmup_epochs: float = 0.0
    model: str = ""


@dataclass(frozen=True)
class StudiedRecipe:
    """What is trained: the recipe of a study, and the batch that its runs had."""

    name: str  # as it was given
    overrides: tuple[str, ...]
    rate: BaseRate
    global_batch: float  # of the recipe, as it is written
    epochs: int
    train_samples: int
    fixed_batch: int  # of a rank (weak) or of all ranks (strong)
    micro_batch: int | None = None  # samples of one forward pass
    device: str = "cpu"
    on: str | None = None  # the scheduler or site of the study

    def epoch_share(self, global_batch: float) -> float:
        """The share of the training samples that the whole batches of an epoch hold."""
        return max(self.train_samples // global_batch, 1) * global_batch / self.train_samples


def read_recipe(path: Path, curve: ScalingCurve) -> StudiedRecipe:
    """The recipe of a study of ranks; the batch, the samples and the device are those of its records."""
    folder = StudyFolder(path)
    definition = read_definition(folder)
    config = resolve(definition.recipe, definition.overrides).config
    records = (read_record(folder.run(point.id).record) or {} for point in definition.points)
    record = next(each for each in records if each.get("plan"))
    plan, fixed = record["plan"], "per_rank_batch" if curve.mode == "weak" else "global_batch"
    samples = plan.get("train_samples") or config.data.train_samples()
    if not plan.get(fixed) or not samples:
        missing = fixed if not plan.get(fixed) else "train_samples"
        raise DataError(
            f"{path}: the records of its runs have no {missing}: expected runs of this version. Repeat one."
        )
    batch, schedule = config.batch, config.schedule
    whole = batch.global_batch or (batch.per_rank or 0) * curve.first.ranks
    warmup = schedule.warmup_epochs or (schedule.warmup_steps or 0) * whole / samples
    rate_batch = whole if schedule.scaling == "none" or batch.base is None else batch.base
    rate = BaseRate(rate_batch, config.optim.lr, config.optim.name, warmup, config.model.name)
    segments = record.get("segments") or [{}]
    # The batch is chosen anew; the rest holds for what is advised too.
    overrides = tuple(each for each in definition.overrides if each.partition("=")[0] not in _BATCH_KEYS)
    return StudiedRecipe(
        name=definition.recipe,
        overrides=overrides,
        rate=rate,
        global_batch=whole,
        epochs=config.epochs,
        train_samples=samples,
        fixed_batch=plan[fixed],
        micro_batch=batch.micro,
        device=str(segments[0].get("device", "cpu")),
        on=definition.on,
    )


def recipe_values(
    recipe: StudiedRecipe, global_batch: int, rate: "ChosenRate", epochs: int, sweep: MeasuredSweep | None, folder: Path
) -> dict[str, Any]:
    """The keys of a recipe, in a file of a folder, that extends that of the study by what was chosen."""
    name = os.path.relpath(recipe.name, folder) if ".y" in recipe.name else recipe.name
    values: dict[str, Any] = {"extends": name}
    chosen = [
        f"batch.global={global_batch}",
        f"optim.lr={rate.lr:.3g}",
        "schedule.scaling=none",
        f"schedule.warmup_epochs={min(rate.warmup_epochs, epochs):g}",
        f"epochs={epochs}",
        *([f"stop_at={{{sweep.metric}: {sweep.target:g}}}"] if sweep else []),
    ]
    for text in (*recipe.overrides, *chosen):
        key, _, value = text.partition("=")
        *groups, last = key.split(".")
        place = values
        for word in groups:
            place = place.setdefault(word, {})
        place[last] = parse_yaml(value, text)
    return values


@dataclass(frozen=True)
class ChosenRate:
    """A learning rate with its warm-up, and where both are from."""

    lr: float
    warmup_epochs: float
    is_measured: bool
    reason: str
    notes: tuple[str, ...] = ()

    @property
    def band(self) -> tuple[float, float]:
        """The rates between which the best one is expected."""
        return self.lr / BAND, self.lr * BAND


def choose_rate(
    global_batch: float, epochs: float, base: BaseRate, noise: float | None, sweep: MeasuredSweep | None
) -> ChosenRate:
    """The rate for a batch: as the sweep measured it, else by a rule from the nearest batch with a known rate."""
    known = [(each, each.peak_lr) for each in sweep.reached if each.peak_lr] if sweep else []
    if not known:
        lr = base.lr * rate_factor(global_batch, base.global_batch, base.optimizer, noise)
        reason = f"{_rule(base.optimizer, noise)} from {base.lr:.3g} at {units.count(base.global_batch)}"
        warmup = _warmup(lr, epochs, base)
        return ChosenRate(lr, warmup, False, reason, _notes(global_batch, base, noise, sweep))
    near, lr = min(known, key=lambda each: abs(math.log(each[0].global_batch / global_batch)))
    optimizer = near.optimizer or base.optimizer
    base = replace(base, optimizer=optimizer)
    is_same = abs(near.global_batch / global_batch - 1) <= _SAME
    inside = known[0][0].global_batch < global_batch < known[-1][0].global_batch
    if is_same:
        reason = "measured by the sweep at this batch"
    elif inside:
        batches = [math.log(each.global_batch) for each, _ in known]
        lr = math.exp(float(np.interp(math.log(global_batch), batches, [math.log(found) for _, found in known])))
        reason = "between the rates of the sweep"
    else:
        reason = (
            f"{_rule(optimizer, noise)} from {lr:.3g} at {units.count(near.global_batch)}, the nearest of the sweep"
        )
        lr *= rate_factor(global_batch, near.global_batch, optimizer, noise)
    warmup = near.warmup_epochs if near.warmup_epochs is not None else _warmup(lr, epochs, base)
    return ChosenRate(lr, warmup, is_same or inside, reason, _notes(global_batch, base, noise, sweep))


def rate_factor(global_batch: float, base_batch: float, optimizer: str, noise: float | None) -> float:
    """The factor of the rate from one batch to another: linear and saturating at the critical batch, or its root."""
    ratio = global_batch / base_batch
    if noise is not None:
        ratio = (1 + noise / base_batch) / (1 + noise / global_batch)
    return ratio if optimizer in _LINEAR else math.sqrt(ratio)


def _rule(optimizer: str, noise: float | None) -> str:
    name = "linear rule" if optimizer in _LINEAR else "square-root rule"
    return f"{name}{', saturating at the critical batch,' if noise is not None else ''}"


def _warmup(lr: float, epochs: float, base: BaseRate) -> float:
    """The warm-up of the recipe, and longer where the rate is multiplied by more than about 4."""
    if lr <= _WARM_FROM * base.lr:
        return base.warmup_epochs
    return max(base.warmup_epochs, float(max(1, round(_WARM_SHARE * epochs))))


def _notes(global_batch: float, base: BaseRate, noise: float | None, sweep: MeasuredSweep | None) -> tuple[str, ...]:
    if base.optimizer not in ("sgd", "adam", "adamw"):
        return ()
    layered = "LARS" if base.optimizer == "sgd" else "LAMB"
    collapsed = sweep.first_collapsed if sweep else None
    if collapsed is not None and noise is not None and collapsed < noise:
        return (f"runs of the sweep collapse at {units.count(collapsed)}, below the critical batch: try {layered}",)
    if "resnet" in base.model and global_batch > _LARGE_RESNET:
        return (f"above a batch of about 8,000 residual networks need {layered}",)
    return ()
