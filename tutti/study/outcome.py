"""The outcome of a point: the content of its run folder, and its speed, shares, metrics, goal and collapse."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tutti import units
from tutti.config.check import is_reached
from tutti.errors import Cause, FolderError
from tutti.runs.metrics import read_all_events
from tutti.runs.record import read_record
from tutti.runs.step_parts import COMPUTE, SHARES, StepPart
from tutti.study.definition import Definition, Goal, Point, PointState, StudyFolder, read_state
from tutti.units import is_lower_better

# The fields of a log event that make up each share; a study of 200 runs has ten thousands of events.
_SHARE_KEYS = {
    share: tuple(f"{part.key}_seconds" for part in (COMPUTE if share is StepPart.COMPUTE else (share,)))
    for share in SHARES
}
_NEEDED = {"step": ("step", "seconds", "loss", "samples_per_second"), "epoch": ("step", "epoch")}


@dataclass(frozen=True)
class Window:
    """A log window after the warm-up."""

    step: int  # the last of the window
    seconds: float
    samples_per_second: float
    shares: Mapping[StepPart, float]  # by SHARES; empty if phases were not recorded


@dataclass(frozen=True)
class Epoch:
    """An epoch with its validation."""

    epoch: int
    step: int
    seconds: float  # of training since the first step, this epoch included
    metrics: Mapping[str, float]  # train_loss, valid_loss, valid_accuracy, ...


@dataclass(frozen=True)
class PointOutcome:
    """The content of one run folder."""

    point: Point
    state: PointState
    folder: str
    conditions: Mapping[str, Any] = field(default_factory=dict)  # the first segment of the record: hosts, device, ...
    plan: Mapping[str, Any] = field(default_factory=dict)  # global_batch, per_rank_batch, peak_lr, parameters, ...
    windows: tuple[Window, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    losses: tuple[tuple[int, float, float], ...] = ()  # step, seconds of training since the first, training loss
    start: Mapping[str, float] = field(default_factory=dict)  # metrics before the first step, as in Epoch
    cause: str | None = None  # of its failure, one of Cause
    num_classes: int | None = None  # of its data, if it has classes

    @property
    def is_finished(self) -> bool:
        return self.state.state == "finished"

    @property
    def has_diverged(self) -> bool:
        return self.state.state == "failed" and self.cause == Cause.DIVERGED


def read_outcomes(folder: StudyFolder, definition: Definition) -> list[PointOutcome]:
    """Reads the outcomes of all points in the order of the definition; points that have not run have no windows."""
    return [_read(folder, definition, point) for point in definition.points]


def shares_of(events: Iterable[Mapping[str, Any]]) -> dict[StepPart, float]:
    """Returns the shares of step parts over several log events; empty if phases were not recorded."""
    known = [event for event in events if "forward_seconds" in event]
    seconds = sum(event.get("seconds") or 0.0 for event in known)
    if not seconds:
        return {}
    return {
        share: sum([event.get(key) or 0.0 for event in known for key in keys]) / seconds
        for share, keys in _SHARE_KEYS.items()
    }


def combined_shares(windows: Iterable[Window]) -> dict[StepPart, float]:
    """Returns the shares of step parts over several windows, weighted by time; empty if phases were not recorded."""
    known = [window for window in windows if window.shares]
    seconds = sum(window.seconds for window in known)
    return {name: sum(w.shares[name] * w.seconds for w in known) / seconds for name in SHARES} if known else {}


def _read(folder: StudyFolder, definition: Definition, point: Point) -> PointOutcome:
    run, state = folder.run(point.id), read_state(folder, point.id)
    record = read_record(run.record) or {}
    path = run.metrics
    events = read_all_events(path)
    windows, epochs, losses, seconds = [], [], [], 0.0
    for event in events:
        _check_event(event, path)
        if event["event"] == "step":
            seconds += event["seconds"]
            losses.append((event["step"], seconds, event["loss"]))
            if event["step"] > max(1, definition.goal.warmup_steps):
                windows.append(_window(event))
        elif event["event"] == "epoch":
            epochs.append(Epoch(event["epoch"], event["step"], seconds, _metrics(event)))
    return PointOutcome(
        point=point,
        state=state,
        folder=str(run.path),
        conditions=(record.get("segments") or [{}])[0],
        plan=record.get("plan") or {},
        windows=tuple(windows),
        epochs=tuple(epochs),
        losses=tuple(losses),
        start=next((_metrics(event) for event in events if event["event"] == "start"), {}),
        cause=record.get("cause"),
        num_classes=_num_classes(record),
    )


def _num_classes(record: Mapping[str, Any]) -> int | None:
    """The number of classes of the data; None for data without, or with an attribute of that name of another kind."""
    found = (record.get("data") or {}).get("num_classes")
    return found if isinstance(found, int) and found > 1 else None


def _check_event(event: Mapping[str, Any], path: Path) -> None:
    """Raises FolderError for an event without the required values."""
    missing = [key for key in _NEEDED.get(event.get("event", ""), ("event",)) if event.get(key) is None]
    if missing:
        raise FolderError(
            f"{path}: an event of step {event.get('step', '?')} has no {', '.join(missing)}: expected a file that "
            "tutti train has written. Restore it, or run the point again."
        )


def _metrics(event: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in event.items() if key.startswith(("train_", "valid_"))}


def _window(event: Mapping[str, Any]) -> Window:
    return Window(event["step"], event["seconds"], event["samples_per_second"], shares_of([event]))


_OUTLIER = 3.5  # scaled median absolute deviations
_NORMAL = 1.4826
_NEAR_CHANCE = 1.5  # a final accuracy whose odds are up to this many times those of chance is no better than chance
NOT_FINITE = "the loss is not finite"
TRAIN_LOSS = "train_loss"  # the metric by which a search compares learning rates


@dataclass(frozen=True)
class Summary:
    """Statistics of several measurements of one quantity."""

    n: int
    mean: float
    median: float
    low: float  # minimum
    high: float  # maximum
    deviation: float  # standard deviation, 0 for one measurement

    def metric(self, name: str) -> str:
        """The mean of a metric with its range and the number of runs: `97.12% (96.80% to 97.40%) in 3 runs`."""
        if self.n == 1:
            return f"{units.metric(name, self.mean)} in 1 run"
        return f"{units.interval(lambda x: units.metric(name, x), self.mean, self.low, self.high)} in {self.n} runs"


@dataclass(frozen=True)
class Reached:
    """When a run reached its goal."""

    epoch: int
    step: int
    seconds: float  # of training
    after_step: int = 0  # of the last validation that did not reach it


@dataclass(frozen=True)
class RunFigures:
    """The numbers of one run; what was not measured is None or empty."""

    outcome: PointOutcome
    speed: Summary | None = None  # samples/s, over windows
    outlier_windows: tuple[int, ...] = ()  # by their last step
    is_outlier: bool = False  # among the repeats of its setting
    shares: Mapping[StepPart, float] = field(default_factory=dict)
    final: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, float] = field(default_factory=dict)
    reached: Reached | None = None
    collapse: str | None = None  # why it counts as collapsed

    @property
    def id(self) -> str:
        return self.outcome.point.id


def summarise(values: Sequence[float]) -> Summary | None:
    """Returns the statistics of values; None if there are none."""
    if not values:
        return None
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return Summary(len(values), float(np.mean(values)), float(np.median(values)), min(values), max(values), deviation)


def find_outliers(values: Sequence[float], least: float = 0.01) -> list[bool]:
    """Returns which of three or more values differ from the median by 3.5 scaled median absolute deviations.

    They must also differ by `least` relative to it, because two of a few values are often close by chance.
    """
    if len(values) < 3:
        return [False] * len(values)
    away = np.abs(np.asarray(values) - np.median(values))
    bound = max(_OUTLIER * _NORMAL * float(np.median(away)), least * abs(float(np.median(values))))
    return (away > bound).tolist()


def read_figures(outcome: PointOutcome, goal: Goal) -> RunFigures:
    """Computes the numbers of a run; speed and goal only for a finished run."""
    if not outcome.is_finished:
        return RunFigures(outcome, collapse=find_collapse(outcome))
    final = dict(outcome.epochs[-1].metrics) if outcome.epochs else {}
    collapse = find_collapse(outcome)
    if goal.kind == "rate":
        final, collapse = _last_loss(outcome), _rate_collapse(outcome)
    speeds = [window.samples_per_second for window in outcome.windows]
    marked = find_outliers(speeds)
    return RunFigures(
        outcome,
        speed=summarise(speeds),
        outlier_windows=tuple(w.step for w, is_marked in zip(outcome.windows, marked, strict=True) if is_marked),
        shares=combined_shares(outcome.windows),
        final=final,
        best=_best(outcome),
        reached=_reached(outcome, goal),
        collapse=collapse,
    )


def _last_loss(outcome: PointOutcome) -> dict[str, float]:
    """Returns the mean training loss over the last tenth of the steps, as far as log windows divide them."""
    ends = [step for step, _, _ in outcome.losses]
    lengths = [end - begin for begin, end in itertools.pairwise([0, *ends])]
    windows = [(steps, end, loss) for steps, (end, _, loss) in zip(lengths, outcome.losses, strict=True)]
    last = [(steps, loss) for steps, end, loss in windows if end > 0.9 * ends[-1]]
    return {TRAIN_LOSS: sum(steps * loss for steps, loss in last) / sum(steps for steps, _ in last)} if last else {}


def _rate_collapse(outcome: PointOutcome) -> str | None:
    """Returns why a short run counts as collapsed: a loss that is not finite, or that ends above its start."""
    losses = [loss for _, _, loss in outcome.losses]
    if not all(map(math.isfinite, losses)):
        return NOT_FINITE
    start = outcome.start.get(TRAIN_LOSS, math.inf)
    final = _last_loss(outcome).get(TRAIN_LOSS, start)
    return f"the training loss ends at {final:.3g}, above its start of {start:.3g}" if final > start else None


def find_collapse(outcome: PointOutcome) -> str | None:
    """Returns why a run counts as collapsed: a loss that is not finite or above its start, or an accuracy near chance.

    Chance is 1 over the number of classes; where that is not known, exp(-loss) before the first step, and at most a
    half, because a run may begin with trained weights. A step of the user's own has no loss before the first step, and
    may have one that is not to fall.
    """
    losses = [loss for _, _, loss in outcome.losses]
    if outcome.has_diverged or not all(map(math.isfinite, losses)):
        return NOT_FINITE
    if not outcome.is_finished or not outcome.epochs:
        return None
    final, start = outcome.epochs[-1].metrics, outcome.start.get(TRAIN_LOSS, math.inf)
    if not all(map(math.isfinite, final.values())):
        return NOT_FINITE
    if final.get(TRAIN_LOSS, 0.0) > start:
        return f"the training loss ends at {final[TRAIN_LOSS]:.3g}, above its start of {start:.3g}"
    accuracy = final.get("valid_accuracy")
    chance = 1 / outcome.num_classes if outcome.num_classes else math.exp(-start)
    chance = min(chance, 0.5)
    if accuracy is not None and accuracy * (1 - chance) <= _NEAR_CHANCE * chance * (1 - accuracy):
        return f"an accuracy of {accuracy:.1%} is near chance, {chance:.1%}"
    return None


def _best(outcome: PointOutcome) -> dict[str, float]:
    names = outcome.epochs[-1].metrics if outcome.epochs else ()
    values = {name: [epoch.metrics[name] for epoch in outcome.epochs if name in epoch.metrics] for name in names}
    return {name: (min if is_lower_better(name) else max)(found) for name, found in values.items()}


def _reached(outcome: PointOutcome, goal: Goal) -> Reached | None:
    """Returns the first epoch at the target, or the last one if the goal is the whole recipe."""
    found = outcome.epochs[-1:]
    if goal.metric is not None and goal.target is not None:
        target = {goal.metric: goal.target}
        found = [epoch for epoch in outcome.epochs if is_reached(target, epoch.metrics)]
    elif goal.kind != "full":
        return None
    if not found:
        return None
    first = found[0]
    before = max((epoch.step for epoch in outcome.epochs if epoch.step < first.step), default=0)
    return Reached(first.epoch, first.step, first.seconds, before)
