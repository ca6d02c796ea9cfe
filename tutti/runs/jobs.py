"""job.json: the job that a run was submitted as, and every start it has had."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti.errors import FolderError
from tutti.runs.files import read_dataclass, write_dataclass
from tutti.runs.folder import RunFolder, locked
from tutti.runs.record import now

FORMAT = 1


@dataclass
class Attempt:
    """One start of a run by its scheduler, from a step to a step."""

    id: str
    started: str
    first_step: int
    last_step: int | None = None
    ended: str | None = None
    code: int | None = None
    outcome: str | None = None
    reason: str | None = None

    @property
    def made_progress(self) -> bool:
        """Whether it has left a newer checkpoint than it found."""
        return (self.last_step or 0) > self.first_step


@dataclass
class JobRecord:
    """What is known of a submitted run; written whole, and changed only through `changed_job`."""

    scheduler: str
    site: str
    recipe: str
    resources: dict[str, Any]
    max_requeues: int
    script: str
    submitted: str = field(default_factory=now)
    cancelled: str | None = None
    submitting: bool = False  # the scheduler was asked, and its answer is not in `ids` yet
    ids: list[str] = field(default_factory=list)  # one on Slurm; where a run is submitted again, one for each time
    attempts: list[Attempt] = field(default_factory=list)
    format: int = FORMAT

    def write(self, folder: RunFolder) -> None:
        write_dataclass(folder.job, self)


def describe(outcome: str | None, reason: str | None) -> str:
    """What followed from the end of an attempt, in a few words."""
    if outcome == "complete":
        return "the run is complete"
    return f"{'requeued' if outcome == 'again' else 'not requeued'}: {reason}"


def read_job(folder: RunFolder) -> JobRecord:
    """The job of a run, or an error that says how a run gets one."""
    path = folder.job
    try:
        return read_dataclass(path, JobRecord)
    except FileNotFoundError:
        raise FolderError(
            f"{folder.path} is not the folder of a submitted run: it has no {path.name}. "
            "Give a run folder that `tutti submit` has printed."
        ) from None
    except (OSError, ValueError) as error:
        raise FolderError(f"{path} cannot be read: {error}. Was it written by another version of tutti?") from error


@contextmanager
def changed_job(folder: RunFolder) -> Iterator[JobRecord]:
    """Read the job of a run, and write it when the block ends; other processes wait, so that no change is lost."""
    read_job(folder)  # a folder without a job is not written to
    with locked(folder.path / ".job.lock"):
        job = read_job(folder)
        yield job
        job.write(folder)


def find_jobs(out: Path) -> list[RunFolder]:
    """The folders of submitted runs, oldest first."""
    folders = [RunFolder(path.parent) for path in out.rglob("job.json")]
    return sorted(folders, key=lambda folder: (read_job(folder).submitted, folder.path.name))


def newest_step(folder: RunFolder) -> int:
    """The step of the newest durable checkpoint, 0 where there is none."""
    try:
        return int((folder.checkpoints / "latest").read_text().strip().removeprefix("step-"))
    except (OSError, ValueError):
        return 0
