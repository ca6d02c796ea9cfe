"""Generated study folders with chosen numbers."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tutti.errors import Cause
from tutti.runs.folder import RunFolder
from tutti.study.definition import Definition, Goal, Mode, Point, PointState, StudyFolder, write_definition, write_state

Speeds = Callable[[int], float]
FINISHED = PointState("finished", attempts=1, launch_line="tutti train -n 1")
GOAL = Goal("steps", steps=50, warmup_steps=10)
SEGMENT = {
    "started": "2226-11-15T10:15:00+00:00",  # after every forecast that a test keeps
    "host": "n1",
    "process": 1,
    "versions": {"python": "3.11.7", "torch": "2.13.0+cpu"},
    "hardware": {"processor": "a <fast> one", "cores": 4, "memory_gib": 16.0, "system": "Linux"},
    "commit": "0123abc",
    "launcher": "torchrun",
    "device": "cpu",
    "threads_per_rank": 1,
}


@dataclass(frozen=True)
class Made:
    """What a run is to look like."""

    speed: float = 1000.0
    communication: float = 0.0  # as a share of a step
    noise: float = 0.0  # of the speed from window to window, as a part of it
    windows: int = 10
    every_steps: int = 5
    per_rank_batch: int = 32
    losses: Callable[[int], float] = lambda step: 0.2 + 2.1 * math.exp(-step / 20)
    epochs: Sequence[Mapping[str, float]] = ()
    state: PointState = FINISHED
    cause: Cause | None = None  # of its failure
    start: Mapping[str, float] = field(default_factory=lambda: {"train_loss": 2.3, "valid_accuracy": 0.1})


def write_run(folder: RunFolder, point: Point, made: Made, warmup_steps: int = 0) -> None:
    """A run folder with a record and metrics; the warm-up is slow."""
    folder.path.mkdir(parents=True)
    folder.config.write_text("recipe: digits\n")
    batch = made.per_rank_batch * point.ranks
    plan = {"global_batch": batch, "per_rank_batch": made.per_rank_batch, "parameters": 1000, "peak_lr": 0.1}
    segment = SEGMENT | {"hosts": ["n1"] * point.ranks, "launch_line": "tutti train points/x", "ranks": point.ranks}
    record = {"recipe": "digits", "ranks": point.ranks, "seed": point.seed, "segments": [segment], "plan": plan}
    if made.cause:
        record |= {"state": "failed", "failure": made.state.reason, "cause": made.cause}
    folder.record.write_text(json.dumps(record))
    folder.metrics.write_text("".join(json.dumps(event) + "\n" for event in _events(point, made, batch, warmup_steps)))


def _events(point: Point, made: Made, batch: int, warmup_steps: int) -> list[dict[str, Any]]:
    generator = np.random.default_rng([point.ranks, point.repeat, point.seed])
    events: list[dict[str, Any]] = [{"event": "start", "step": 0, "epoch": 0, **made.start}]
    last = warmup_steps + made.windows * made.every_steps
    per_epoch = last // max(1, len(made.epochs))
    for step in range(made.every_steps, last + 1, made.every_steps):
        slow = 0.5 if step <= warmup_steps else 1.0
        speed = made.speed * slow * (1 + made.noise * generator.standard_normal())
        events.append(_window(step, made.losses(step), speed, made.every_steps * batch / speed, made.communication))
        if made.epochs and step % per_epoch == 0 and step // per_epoch <= len(made.epochs):
            metrics = made.epochs[step // per_epoch - 1]
            events.append({"event": "epoch", "step": step, "epoch": step // per_epoch, "seconds": 1.0, **metrics})
    return events


def _window(step: int, loss: float, speed: float, seconds: float, communication: float) -> dict[str, Any]:
    rest = 1 - communication
    parts = {"data": 0.05, "forward": 0.3, "backward": 0.5, "update": 0.05, "waiting": 0.04, "rest": 0.06}
    return {
        "event": "step",
        "step": step,
        "epoch": 1,
        "loss": loss,
        "lr": 0.1,
        "samples_per_second": speed,
        "seconds": seconds,
        "communication_seconds": communication * seconds,
    } | {f"{name}_seconds": share * rest * seconds for name, share in parts.items()}


def write_study(path: Path, definition: Definition, made: Callable[[Point], Made | None]) -> StudyFolder:
    """A study; points of which nothing is made wait."""
    folder = StudyFolder(path)
    folder.points.mkdir(parents=True)
    write_definition(folder, definition)
    for point in definition.points:
        run = made(point)
        if run is not None:
            write_run(folder.run(point.id), point, run, definition.goal.warmup_steps)
            write_state(folder, point.id, run.state)
    return folder


def scale_study(
    path: Path,
    made: Callable[[Point], Made | None],
    ranks: Sequence[int] = (1, 2, 4, 8),
    repeats: int = 1,
    mode: Mode = "weak",
    goal: Goal = GOAL,
) -> StudyFolder:
    """A study of ranks."""
    points = tuple(
        Point(f"n{number}-r{repeat}", number, (), {"ranks": number}, repeat, 42)
        for repeat in range(1, repeats + 1)
        for number in ranks
    )
    line = "tutti scale digits --ranks 1,2,4,8"
    return write_study(path, Definition("scale", "digits", (), goal, points, mode, launch_line=line), made)


def spread(folder: StudyFolder, per_node: int, **facts: Any) -> Path:
    """Place the ranks of every run on nodes of so many ranks, and change other facts of the record's segment."""
    for record in folder.points.glob("*/record.json"):
        content = json.loads(record.read_text())
        content["segments"][0] |= {"hosts": [f"n{rank // per_node}" for rank in range(content["ranks"])], **facts}
        record.write_text(json.dumps(content))
    return folder.path


def sweep_study(
    path: Path,
    made: Callable[[Point], Made | None],
    axes: Mapping[str, Sequence[Any]],
    seeds: int = 2,
    goal: Goal = Goal("full"),
) -> StudyFolder:
    """A grid over all values of all keys."""
    grid: list[dict[str, Any]] = [{}]
    for key, values in axes.items():
        grid = [each | {key: value} for each in grid for value in values]
    points = tuple(
        Point(f"p{place}-s{seed}", 2, (), values, seed, 41 + seed)
        for place, values in enumerate(grid, 1)
        for seed in range(1, seeds + 1)
    )
    return write_study(path, Definition("sweep", "mnist", ("batch.base=64",), goal, points), made)
