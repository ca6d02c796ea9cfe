"""How jobs are submitted, queried and cancelled: one module for each scheduler, and what they share.

Every module has the names NAME, SUBMIT, PREFIX, JOB_ID, DIRECTIVES, values, end_time, submit, query, cancel, requeue.
"""

import importlib
import shutil
import subprocess
from dataclasses import dataclass
from types import ModuleType

from tutti.errors import LaunchError

NAMES = ("slurm", "pbs", "cobalt")
_DEADLINE_SECONDS = 60


def scheduler_of(name: str) -> ModuleType:
    """Import the module of a scheduler."""
    return importlib.import_module(f"{__name__}.{name}")


@dataclass(frozen=True)
class JobState:
    """The state of a job, as its scheduler reports it."""

    state: str  # waiting, running, ending, ended or cancelled
    detail: str = ""  # where it runs, or why it waits
    seconds_left: int | None = None

    @property
    def is_over(self) -> bool:
        return self.state in ("ended", "cancelled")


def require(command: str, scheduler: str) -> None:
    """Raise an error if a command of the scheduler is not installed."""
    if shutil.which(command) is None:
        raise LaunchError(
            f"{command}, with which jobs are submitted to {scheduler}, is not on this machine. Submit from a login "
            "node of the cluster, name another scheduler or site with --on, or look at the script alone with --dry-run."
        )


def call(*words: str, failing: bool = False) -> str | None:
    """Run a command of the scheduler and return its output; if it fails, return None, or raise if `failing`."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_DEADLINE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        if failing:
            raise LaunchError(f"{words[0]} cannot be called: {error}.") from error
        return None
    if done.returncode:
        if failing:
            printed = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").rstrip(".")
            raise LaunchError(f"{' '.join(words)} failed with exit code {done.returncode}: {printed}.")
        return None
    return done.stdout.strip()


def read_id(answer: str | None, command: str) -> str:
    """Return the job id at the end of the output of a submission."""
    last = (answer or "").strip().splitlines()[-1:]
    job_id = last[0].partition(";")[0].strip() if last else ""
    if not job_id[:1].isdigit() or len(job_id.split()) != 1:
        raise LaunchError(f"{command} answered {answer!r}: expected a job id. Look with the scheduler's own commands.")
    return job_id
