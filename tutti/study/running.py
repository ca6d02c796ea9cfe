"""Runs the points of a study one after another, or several at once; an interrupted study resumes.

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
from tutti.study.executors import Executor, command_line, failure_reason, step_environment
from tutti.study.folder import clear_run

Next = Literal["nothing", "record", "start", "resume"]
LOG = "point.log"  # in the logs of a point: its standard output and error
_SAVING_SECONDS = 60.0  # in which a terminated run writes its checkpoint
_POLL_SECONDS = 0.1
SILENT_SECONDS = 1800.0  # after which a run that writes nothing is ended; while it lives, it sets the time of a file
_LOOK_SECONDS = 60.0


@dataclass(frozen=True)
class PointProgress:
    """The progress of a study when a point starts or ends."""

    number: int  # of the point among those of this call, from 1
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
    """Returns what remains to do for a point: a short run starts again, any other resumes from its checkpoint."""
    if state.state == "finished" or (state.state == "failed" and not retry):
        return "nothing"
    if run_state == "finished":  # the study was killed before it recorded that
        return "record"
    return "resume" if goal.kind in ("target", "full") and has_checkpoint else "start"


def remaining_points(folder: StudyFolder, definition: Definition, retry: bool) -> list[tuple[Point, Next]]:
    """Returns the points that are not done, in their order."""
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
    observer: StudyObserver,
    retry: bool = False,
    at_once: int = 1,
) -> None:
    """Runs the remaining points of a study; a failed point is recorded and the next one runs."""
    left = remaining_points(folder, definition, retry)
    for point in [point for point, following in left if following == "record"]:
        write_state(folder, point.id, replace(read_state(folder, point.id), state="finished", reason=None, ended=now()))
    points = [each for each in left if each[1] != "record"]
    sharing = at_once * max(point.ranks for point in definition.points) if at_once > 1 else 1
    running = _Running(folder, executor, observer, step_environment(os.environ, sharing))
    try:
        stopped = running.run(points, at_once)
    except KeyboardInterrupt:
        raise _interrupted(folder, definition, "by a signal") from None
    finally:
        running.end()
    if stopped is not None:
        raise _interrupted(folder, definition, f"with the run of {stopped.id}")


@dataclass
class _Started:
    """A point that is running."""

    place: PointProgress
    state: PointState
    began: float
    process: LocalProcess
    seen: tuple[float, ...] = ()  # the times of what the run writes, when they last changed
    changed: float = 0.0


class _Running:
    """The running points of a study."""

    def __init__(
        self, folder: StudyFolder, executor: Executor, observer: StudyObserver, env: Mapping[str, str]
    ) -> None:
        self._folder, self._executor, self._observer, self._env = folder, executor, observer, env
        self._now: list[_Started] = []

    def run(self, points: Sequence[tuple[Point, Next]], at_once: int) -> Point | None:
        """Runs points in their order; returns the point whose run was stopped, which stops the study."""
        for number, (point, following) in enumerate(points, start=1):
            if len(self._now) == at_once and (stopped := self._wait()):
                return stopped
            if following == "start":
                clear_run(self._folder, point.id)
            self._start(PointProgress(number, len(points), point))
        while self._now:
            if stopped := self._wait():
                return stopped
        return None

    def end(self) -> None:
        """Ends the running points; they run again when the study resumes."""
        end_processes([each.process for each in self._now], _SAVING_SECONDS)
        for started in self._now:
            write_state(self._folder, started.place.point.id, replace(started.state, state="waiting"))
        self._now = []

    def _start(self, place: PointProgress) -> None:
        point = place.point
        self._observer.begins(place)
        command = self._executor.command(self._folder.run(point.id).path, point.ranks)
        attempts = read_state(self._folder, point.id).attempts + 1
        state = PointState("running", attempts=attempts, started=now(), launch_line=command_line(command))
        write_state(self._folder, point.id, state)
        began = time.monotonic()
        process = LocalProcess(command, self._log(point), self._env)
        self._now.append(_Started(place, state, began, process))

    def _wait(self) -> Point | None:
        """Waits until a point ends and records it; returns the point if it was stopped."""
        hung: _Started | None = None
        while not wait_for_any([each.process for each in self._now], _POLL_SECONDS, _LOOK_SECONDS):
            if hung := next((each for each in self._now if self._is_silent(each)), None):
                end_processes([hung.process])
        ended = next(each for each in self._now if each.process.returncode is not None)
        seconds = time.monotonic() - ended.began
        code, point = ended.process.returncode, ended.place.point
        if code == Interrupted.exit_code:
            return point
        state = replace(ended.state, state="finished", ended=now())
        if code != 0:
            reason = failure_reason(self._folder.run(point.id), state.started or "", code, self._log(point))
            if ended is hung:
                reason = f"ended, since it had written nothing for {SILENT_SECONDS:g} s"
            state = replace(state, state="failed", reason=reason)
        write_state(self._folder, point.id, state)
        self._now.remove(ended)
        self._observer.ended(ended.place, state, seconds)
        return None

    def _is_silent(self, started: _Started) -> bool:
        """Return whether a run writes nothing any more; while it lives, its rank 0 sets the time of owner.json."""
        run = self._folder.run(started.place.point.id)
        seen = tuple(_time_of(path) for path in (run.path / "owner.json", run.metrics, self._log(started.place.point)))
        if seen != started.seen:
            started.seen, started.changed = seen, time.monotonic()
        return time.monotonic() - started.changed > SILENT_SECONDS

    def _log(self, point: Point) -> Path:
        return self._folder.run(point.id).logs / LOG


def _time_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _interrupted(folder: StudyFolder, definition: Definition, how: str) -> Interrupted:
    left = len(remaining_points(folder, definition, retry=False))
    return Interrupted(
        f"stopped {how}, with {left} of {len(definition.points)} points left. "
        f"Resume with: tutti {definition.kind} --resume {folder.path}"
    )
