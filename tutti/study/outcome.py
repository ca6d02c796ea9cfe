"""What a point of a study came to, read from its run folder alone.

Light: imports no torch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti.errors import Cause, FolderError
from tutti.runs.metrics import read_all_events
from tutti.runs.record import read_record
from tutti.runs.step_parts import COMPUTE, SHARES, StepPart
from tutti.study.definition import Definition, Point, State, StudyFolder, read_state

_NEEDED = {"step": ("step", "seconds", "loss", "samples_per_second"), "epoch": ("step", "epoch")}


@dataclass(frozen=True)
class Window:
    """A log window after the warm-up."""

    step: int  # the last one
    seconds: float
    samples_per_second: float
    shares: Mapping[StepPart, float]  # by SHARES; empty where phases were not kept


@dataclass(frozen=True)
class Epoch:
    """An epoch with its validation."""

    epoch: int
    step: int
    seconds: float  # of training since the first step, this epoch included
    metrics: Mapping[str, float]  # train_loss, valid_loss, valid_accuracy, ...


@dataclass(frozen=True)
class Outcome:
    """One run, ready to be compared with others."""

    point: Point
    state: State
    folder: str
    conditions: Mapping[str, Any] = field(default_factory=dict)  # the first segment of the record: hosts, device, ...
    plan: Mapping[str, Any] = field(default_factory=dict)  # global_batch, per_rank_batch, peak_lr, parameters, ...
    windows: tuple[Window, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    losses: tuple[tuple[int, float, float], ...] = ()  # step, seconds of training since the first, training loss
    start: Mapping[str, float] = field(default_factory=dict)  # metrics before the first step, as in Epoch
    cause: str | None = None  # of its failure, one of Cause

    @property
    def is_finished(self) -> bool:
        return self.state.state == "finished"

    @property
    def has_diverged(self) -> bool:
        return self.state.state == "failed" and self.cause == Cause.DIVERGED


def read_outcomes(folder: StudyFolder, definition: Definition) -> list[Outcome]:
    """The outcomes of all points, in the order of the definition; those that have not run have no windows."""
    return [_read(folder, definition, point) for point in definition.points]


def shares_of(events: Iterable[Mapping[str, Any]]) -> dict[StepPart, float]:
    """The shares of log windows together; none where phases were not kept."""
    known = [event for event in events if "forward_seconds" in event]
    seconds = sum(event.get("seconds") or 0.0 for event in known)
    if not seconds:
        return {}
    return {
        share: sum(event.get(f"{part.key}_seconds") or 0.0 for event in known for part in _parts(share)) / seconds
        for share in SHARES
    }


def _parts(share: StepPart) -> tuple[StepPart, ...]:
    return COMPUTE if share is StepPart.COMPUTE else (share,)


def shares_together(windows: Iterable[Window]) -> dict[StepPart, float]:
    """The shares of windows together, each by its time; none where phases were not kept."""
    known = [window for window in windows if window.shares]
    seconds = sum(window.seconds for window in known)
    return {name: sum(w.shares[name] * w.seconds for w in known) / seconds for name in SHARES} if known else {}


def _read(folder: StudyFolder, definition: Definition, point: Point) -> Outcome:
    run, state = folder.run(point.id), read_state(folder, point.id)
    record = read_record(run.record) or {}
    events = read_all_events(run.metrics)
    windows, epochs, losses, seconds = [], [], [], 0.0
    for event in events:
        _check_event(event, run.metrics)
        if event["event"] == "step":
            seconds += event["seconds"]
            losses.append((event["step"], seconds, event["loss"]))
            if event["step"] > max(1, definition.goal.warmup_steps):
                windows.append(_window(event))
        elif event["event"] == "epoch":
            epochs.append(Epoch(event["epoch"], event["step"], seconds, _metrics(event)))
    return Outcome(
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
    )


def _check_event(event: Mapping[str, Any], path: Path) -> None:
    """Refuse an event without the values that figures are made of."""
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
