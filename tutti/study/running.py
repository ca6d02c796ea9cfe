"""The points of a study run one after another; a study that was interrupted goes on with what is missing.

Light: imports no torch.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from tutti.errors import Interrupted
from tutti.records.record import now
from tutti.records.runs import read_state as read_run_state
from tutti.study.definition import Definition, Goal, Point, State, StudyFolder, read_state, write_state
from tutti.study.executors import Executor, as_typed, step_environment
from tutti.study.folders import clear_run
from tutti.study.processes import reason_of, run_process

Next = Literal["nothing", "note", "begin", "go on"]
LOG = "point.log"  # in the logs of a point: all that it has printed


@dataclass(frozen=True)
class Place:
    """Where a study stands when a point begins or has ended."""

    number: int  # of the point among those that are run now, from 1
    of: int
    point: Point


class Teller(Protocol):
    """Who shows how a study goes on."""

    def begins(self, place: Place) -> None:
        """A point begins."""
        ...

    def ended(self, place: Place, state: State, seconds: float) -> None:
        """A point has ended."""
        ...


def decide(state: State, goal: Goal, run_state: str | None, has_checkpoint: bool, retry: bool) -> Next:
    """What is left to do for a point: a run that was only timed begins anew, another one goes on where it can."""
    if state.state == "finished" or (state.state == "failed" and not retry):
        return "nothing"
    if run_state == "finished":  # this process was killed before it could note it
        return "note"
    return "go on" if goal.kind != "steps" and has_checkpoint else "begin"


def what_is_left(folder: StudyFolder, definition: Definition, retry: bool) -> list[tuple[Point, Next]]:
    """The points that are not done yet, in their order."""
    found = []
    for point in definition.points:
        run = folder.run(point.id)
        has_checkpoint = (run.checkpoints / "latest").is_file()
        following = decide(read_state(folder, point.id), definition.goal, read_run_state(run), has_checkpoint, retry)
        if following != "nothing":
            found.append((point, following))
    return found


def run_study(
    folder: StudyFolder, definition: Definition, executor: Executor, teller: Teller, retry: bool = False
) -> None:
    """Run what is left of a study. A point that fails is noted, and the next one runs."""
    left = what_is_left(folder, definition, retry)
    for point in [point for point, following in left if following == "note"]:
        write_state(folder, point.id, replace(read_state(folder, point.id), state="finished", reason=None, ended=now()))
    try:
        stopped = _run(folder, [each for each in left if each[1] != "note"], executor, teller)
    except KeyboardInterrupt:
        raise _interrupted(folder, definition, "from outside") from None
    if stopped is not None:
        raise _interrupted(folder, definition, f"with the run of {stopped.id}")


def _run(folder: StudyFolder, points: Sequence[tuple[Point, Next]], executor: Executor, teller: Teller) -> Point | None:
    """Run points one after another; the one that was stopped, with which the study stops."""
    for number, (point, following) in enumerate(points, start=1):
        place = Place(number, len(points), point)
        if following == "begin":
            clear_run(folder, point.id)
        teller.begins(place)
        began = time.monotonic()
        state = run_point(folder, point, executor)
        if state.state == "waiting":
            return point
        teller.ended(place, state, time.monotonic() - began)
    return None


def run_point(folder: StudyFolder, point: Point, executor: Executor) -> State:
    """One point from its beginning to its end, noted before and after; it waits again where it was stopped."""
    run = folder.run(point.id)
    command = executor.command(run.path, point.ranks)
    state = State(
        "running",
        attempts=read_state(folder, point.id).attempts + 1,
        started=now(),
        launch_line=as_typed(command),
    )
    write_state(folder, point.id, state)
    log = run.logs / LOG
    try:
        code = run_process(command, log, step_environment(os.environ))
    except KeyboardInterrupt:
        write_state(folder, point.id, replace(state, state="waiting"))
        raise
    if code == 0:
        state = replace(state, state="finished", ended=now())
    elif code == Interrupted.exit_code:
        state = replace(state, state="waiting")
    else:
        state = replace(state, state="failed", reason=reason_of(code, log), ended=now())
    write_state(folder, point.id, state)
    return state


def _interrupted(folder: StudyFolder, definition: Definition, how: str) -> Interrupted:
    left = len(what_is_left(folder, definition, retry=False))
    return Interrupted(
        f"stopped {how}, with {left} of {len(definition.points)} points left. "
        f"Go on with: tutti {definition.kind} --resume {folder.path}"
    )
