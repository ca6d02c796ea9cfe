"""A scheduler's commands called, and what they answer in words that all share."""

import shutil
import subprocess
from dataclasses import dataclass

from tutti.errors import LaunchError

_DEADLINE_SECONDS = 60


@dataclass(frozen=True)
class JobState:
    """What a scheduler knows of a job."""

    state: str  # waiting, running, ending, ended or cancelled
    detail: str = ""  # where it runs, or why it waits
    seconds_left: int | None = None

    @property
    def is_over(self) -> bool:
        return self.state in ("ended", "cancelled")


def require(command: str, scheduler: str) -> None:
    """Refuse to go on where a scheduler's command is not installed."""
    if shutil.which(command) is None:
        raise LaunchError(
            f"{command}, with which jobs are submitted to {scheduler}, is not on this machine. Submit from a login "
            "node of the cluster, name another scheduler or site with --on, or look at the script alone with --dry-run."
        )


def ask(*words: str, failing: bool = False) -> str | None:
    """What a command answers; where it fails, None, or its own message as an error."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_DEADLINE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        if failing:
            raise LaunchError(f"{words[0]} cannot be called: {error}.") from error
        return None
    if done.returncode:
        if failing:
            said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").rstrip(".")
            raise LaunchError(f"{' '.join(words)} failed with exit code {done.returncode}: {said}.")
        return None
    return done.stdout.strip()


def read_id(answer: str | None, command: str) -> str:
    """The job id that stands at the end of what a scheduler answers to a submission."""
    last = (answer or "").strip().splitlines()[-1:]
    job_id = last[0].partition(";")[0].strip() if last else ""
    if not job_id[:1].isdigit() or len(job_id.split()) != 1:
        raise LaunchError(f"{command} answered {answer!r}: expected a job id. Look with the scheduler's own commands.")
    return job_id
