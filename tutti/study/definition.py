"""The definition of a study: its points, their goal, and the paths of its folder."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tutti.errors import FolderError
from tutti.runs.files import read_dataclass, write_dataclass
from tutti.runs.folder import RunFolder

Kind = Literal["scale", "sweep"]
Mode = Literal["weak", "strong"]
_ID = re.compile(r"[\w.,+=-]*\w[\w.,+=-]*")


@dataclass(frozen=True)
class Goal:
    """When a point ends: after some timed steps, at the value of a metric, or after the whole recipe.

    A search for a learning rate (`rate`) compares the training loss after some steps.
    """

    kind: Literal["steps", "target", "full", "rate"]
    steps: int | None = None  # after the warm-up, if only speed is measured
    warmup_steps: int = 0
    metric: str | None = None  # as in metrics.jsonl: valid_accuracy
    target: float | None = None


@dataclass(frozen=True)
class Point:
    """One run of a study."""

    id: str  # unique in the study, and the name of its folder: n4-r1
    ranks: int
    overrides: tuple[str, ...]  # on top of the study's own
    values: Mapping[str, Any]  # the varied values, by key: {"ranks": 4}, {"batch.global": 256, "optim.name": "lars"}
    repeat: int  # counted from 1
    seed: int

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise ValueError(f"the id {self.id!r} of a point is not a valid name of a folder")


@dataclass(frozen=True)
class Definition:
    """Everything that is known about a study before its first run."""

    kind: Kind
    recipe: str  # as it was given
    overrides: tuple[str, ...]
    goal: Goal
    points: tuple[Point, ...]  # in the order in which they run
    mode: Mode | None = None  # of a scaling study: weak fixes the per-rank batch, strong the global batch
    at_once: int = 1  # points that ran at the same time, and so took longer than alone
    on: str | None = None  # a scheduler or a site; None: ranks are started here, or inside this allocation
    created: str = ""
    launch_line: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    format: int = 1


@dataclass(frozen=True)
class PointState:
    """The state of a point; its measurements are in its run folder."""

    state: Literal["waiting", "running", "submitted", "finished", "failed"] = "waiting"
    reason: str | None = None  # of a failure, in one line
    attempts: int = 0
    started: str | None = None
    ended: str | None = None
    launch_line: str | None = None
    job: str | None = None  # the job id of the scheduler


@dataclass(frozen=True)
class StudyFolder:
    """The paths inside the folder of a study."""

    path: Path

    @property
    def definition(self) -> Path:
        return self.path / "study.json"

    @property
    def points(self) -> Path:
        return self.path / "points"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def figures(self) -> Path:
        return self.path / "figures"

    def run(self, point: str) -> RunFolder:
        """The run folder of a point."""
        return RunFolder(self.points / point)

    def state(self, point: str) -> Path:
        return self.path / "states" / f"{point}.json"


def write_definition(folder: StudyFolder, definition: Definition) -> None:
    """Writes study.json, from which an interrupted study resumes."""
    write_dataclass(folder.definition, definition, indent=1)


def read_definition(folder: StudyFolder) -> Definition:
    """Reads study.json; raises FolderError if the folder holds no study."""
    try:
        return read_dataclass(folder.definition, Definition)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise FolderError(
            f"{folder.path} holds no study ({folder.definition.name}: {reason}): expected a folder that tutti scale or "
            "tutti sweep has made."
        ) from error


def write_state(folder: StudyFolder, point: str, state: PointState) -> None:
    """Writes the state of a point."""
    folder.state(point).parent.mkdir(exist_ok=True)
    write_dataclass(folder.state(point), state, indent=1)


def read_state(folder: StudyFolder, point: str) -> PointState:
    """Reads the state of a point; `waiting` if none was written."""
    path = folder.state(point)
    try:
        return read_dataclass(path, PointState)
    except OSError:
        return PointState()
    except ValueError as error:
        raise FolderError(f"{path} is damaged ({error}). Remove it to run the point again.") from error
