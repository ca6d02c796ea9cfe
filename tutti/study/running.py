"""The points of a study run one after another, or some at once; an interrupted study goes on with what is missing.

Light: imports no torch.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from tutti.errors import Interrupted
from tutti.launch.supervisor import LocalProcess, end_processes, wait_for_any
from tutti.runs.listing import read_state as read_run_state
from tutti.runs.record import now
from tutti.study.definition import Definition, Goal, Point, PointState, StudyFolder, read_state, write_state
from tutti.study.executors import Executor, as_typed, reason_of, step_environment
from tutti.study.folder import clear_run

Next = Literal["nothing", "note", "begin", "go on"]
LOG = "point.log"  # in the logs of a point: all that it has printed
_SAVING_SECONDS = 60.0  # in which a run that is terminated writes its checkpoint
_POLL_SECONDS = 0.1  # of several runs


@dataclass(frozen=True)
class PointProgress:
    """Where a study stands when a point begins or has ended."""

    number: int  # of the point among those that are run now, from 1
    of: int
    point: Point


class StudyObserver(Protocol):
    """Shows the progress of a study."""

    def begins(self, place: PointProgress) -> None:
        """A point begins."""
        ...

    def ended(self, place: PointProgress, state: PointState, seconds: float) -> None:
        """A point has ended."""
        ...


def decide(state: PointState, goal: Goal, run_state: str | None, has_checkpoint: bool, retry: bool) -> Next:
    """What is left to do for a point: a timed run starts again from the beginning, any other run resumes if it can."""
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
    folder: StudyFolder,
    definition: Definition,
    executor: Executor,
    teller: StudyObserver,
    retry: bool = False,
    at_once: int = 1,
) -> None:
    """Run what is left of a study, some points at once. A point that fails is noted, and the next one runs."""
    left = what_is_left(folder, definition, retry)
    for point in [point for point, following in left if following == "note"]:
        write_state(folder, point.id, replace(read_state(folder, point.id), state="finished", reason=None, ended=now()))
    points = [each for each in left if each[1] != "note"]
    sharing = at_once * max(point.ranks for point in definition.points) if at_once > 1 else 1
    running = _Running(folder, executor, teller, step_environment(os.environ, sharing))
    try:
        stopped = running.run(points, at_once)
    except KeyboardInterrupt:
        raise _interrupted(folder, definition, "from outside") from None
    finally:
        running.end()
    if stopped is not None:
        raise _interrupted(folder, definition, f"with the run of {stopped.id}")


@dataclass
class _Started:
    """A point that runs now, noted as such."""

    place: PointProgress
    state: PointState
    began: float
    process: LocalProcess


class _Running:
    """The points of a study that run now."""

    def __init__(self, folder: StudyFolder, executor: Executor, teller: StudyObserver, env: Mapping[str, str]) -> None:
        self._folder, self._executor, self._teller, self._env = folder, executor, teller, env
        self._now: list[_Started] = []

    def run(self, points: Sequence[tuple[Point, Next]], at_once: int) -> Point | None:
        """Run points in their order; the one that was stopped, with which the study stops."""
        for number, (point, following) in enumerate(points, start=1):
            if len(self._now) == at_once and (stopped := self._wait()):
                return stopped
            if following == "begin":
                clear_run(self._folder, point.id)
            self._start(PointProgress(number, len(points), point))
        while self._now:
            if stopped := self._wait():
                return stopped
        return None

    def end(self) -> None:
        """End the points that still run; they run again when the study resumes."""
        end_processes([each.process for each in self._now], _SAVING_SECONDS)
        for started in self._now:
            write_state(self._folder, started.place.point.id, replace(started.state, state="waiting"))
        self._now = []

    def _start(self, place: PointProgress) -> None:
        point = place.point
        self._teller.begins(place)
        command = self._executor.command(self._folder.run(point.id).path, point.ranks)
        attempts = read_state(self._folder, point.id).attempts + 1
        state = PointState("running", attempts=attempts, started=now(), launch_line=as_typed(command))
        write_state(self._folder, point.id, state)
        began = time.monotonic()
        process = LocalProcess(command, self._log(point), self._env)
        self._now.append(_Started(place, state, began, process))

    def _wait(self) -> Point | None:
        """Wait until a point has ended, and note it; the point, if it was stopped."""
        wait_for_any([each.process for each in self._now], _POLL_SECONDS)
        ended = next(each for each in self._now if each.process.returncode is not None)
        seconds = time.monotonic() - ended.began
        code, point = ended.process.returncode, ended.place.point
        if code == Interrupted.exit_code:
            return point
        state = replace(ended.state, state="finished", ended=now())
        if code != 0:
            reason = reason_of(self._folder.run(point.id), state.started or "", code, self._log(point))
            state = replace(state, state="failed", reason=reason)
        write_state(self._folder, point.id, state)
        self._now.remove(ended)
        self._teller.ended(ended.place, state, seconds)
        return None

    def _log(self, point: Point) -> Path:
        return self._folder.run(point.id).logs / LOG


def _interrupted(folder: StudyFolder, definition: Definition, how: str) -> Interrupted:
    left = len(what_is_left(folder, definition, retry=False))
    return Interrupted(
        f"stopped {how}, with {left} of {len(definition.points)} points left. "
        f"Go on with: tutti {definition.kind} --resume {folder.path}"
    )
