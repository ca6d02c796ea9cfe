"""Whether a run that has ended is requeued: the policy as a pure function, and the record of its attempts."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tutti.errors import Interrupted, LaunchError, RankLost
from tutti.launch.cluster.schedulers import scheduler_of
from tutti.ranks.failures import Failure, first_cause, read_notes
from tutti.runs.folder import RunFolder
from tutti.runs.jobs import Attempt, changed_job, newest_step, read_job
from tutti.runs.record import now

STOPPED = Interrupted.exit_code
LOST = RankLost.exit_code
CANCELLED = "it was cancelled"
_SIGNALS = range(129, 193)  # 128 and the number of the signal that ended it
_SUBMITTING_SECONDS = 30
_MARGIN_SECONDS = 30  # by which schedulers are early or late at the end of a job's time


@dataclass(frozen=True)
class Decision:
    """What happens after the end of an attempt, and why."""

    outcome: Literal["complete", "again", "stopped", "failed"]
    reason: str


@dataclass(frozen=True)
class Ending:
    """How an attempt has ended: the decision, the exit code of the job, and the failure of the first rank."""

    decision: Decision
    code: int
    cause: Failure | None


def decide(attempts: Sequence[Attempt], max_requeues: int, ended_by: str | None = None) -> Decision:
    """Decide what happens after the last of a run's attempts; `ended_by` is the reason if a user has ended it."""
    last = attempts[-1]
    code = last.code or 0
    if code == 0:
        return Decision("complete", "the run is complete")
    if ended_by:
        return Decision("stopped", ended_by)
    if code not in (STOPPED, LOST) and not _by_signal(code):
        return Decision("failed", f"the run failed (exit code {code}), and another start would fail, too")
    if standstill := _describe_standstill(attempts):
        return Decision("failed", standstill)
    if len(attempts) > max_requeues:
        times = f"{len(attempts) - 1} time" + "s" * (len(attempts) != 2)
        return Decision("failed", f"{_why(code)}, and was already requeued {times}, of at most {max_requeues}")
    return Decision("again", f"{_why(code)}; start {len(attempts) + 1} of at most {max_requeues + 1}")


def begin(folder: RunFolder, job_id: str) -> str | None:
    """Record that a job starts a run; return the reason where it must not start."""
    _wait_until_settled(folder, job_id)
    with changed_job(folder) as job:
        if job_id not in job.ids:
            job.ids.append(job_id)
            if not job.submitting:  # a user has submitted the script: the count of attempts begins again
                job.attempts, job.cancelled = [], None
        job.submitting = False
        if job.cancelled:
            return CANCELLED
        if len(job.attempts) > job.max_requeues:
            return f"it was already requeued {job.max_requeues} times, the most that is allowed"
        for note in notes_folder(folder).glob("failure-*.json"):
            note.unlink()
        notes_folder(folder).mkdir(exist_ok=True)
        job.attempts.append(Attempt(id=job_id, started=now(), first_step=newest_step(folder)))
    return None


def finish(folder: RunFolder, exit_code: int, told_early: bool) -> Ending:
    """Record how an attempt has ended, and decide what happens next."""
    cause = first_cause(read_notes(notes_folder(folder))) if exit_code else None
    early = "its job was cancelled before the end of its time" if told_early else None
    with changed_job(folder) as job:
        last = job.attempts[-1]
        last.code = _code_of(cause) if cause else exit_code
        last.last_step, last.ended = newest_step(folder), now()
        decision = decide(job.attempts, job.max_requeues, CANCELLED if job.cancelled else early)
        last.outcome, last.reason = decision.outcome, decision.reason
    return Ending(decision, last.code, cause)


def requeue_run(folder: RunFolder) -> bool:
    """Have the scheduler requeue a run, which ends the calling job on Slurm; return False if it was just cancelled."""
    with changed_job(folder) as job:
        last = job.attempts[-1]
        if job.cancelled:
            last.outcome, last.reason = "stopped", CANCELLED
            return False
        job.submitting = True  # a new job waits until its id is known
    try:
        job_id = scheduler_of(job.scheduler).requeue(last.id, folder.job_script)
    except LaunchError as error:
        with changed_job(folder) as job:
            last = job.attempts[-1]
            job.submitting, last.outcome, last.reason = False, "failed", str(error)
        raise LaunchError(f"the run could not be requeued: {error} Submit {folder.job_script} by hand.") from error
    if job_id not in job.ids:
        with changed_job(folder) as job:
            job.ids += [job_id] if job_id not in job.ids else []
            job.submitting = False
    return True


def ended_early(env: Mapping[str, str], now_seconds: float) -> bool:
    """Return whether a job that got SIGTERM had time left: then a user has cancelled it."""
    ends = env.get("TUTTI_JOB_ENDS", "")
    return not ends.isdigit() or now_seconds < int(ends) - _MARGIN_SECONDS


def notes_folder(folder: RunFolder) -> Path:
    """Return the folder where ranks note their failures for the end of the job script."""
    return folder.logs / "notes"


def _wait_until_settled(folder: RunFolder, job_id: str) -> None:
    """Wait until the job's id was noted: the job may start before its submission returns."""
    deadline = time.monotonic() + _SUBMITTING_SECONDS
    while (job := read_job(folder)).submitting and job_id not in job.ids and time.monotonic() < deadline:
        time.sleep(0.1)


def _by_signal(code: int) -> bool:
    return code in _SIGNALS or code < 0


def _why(code: int) -> str:
    if code == STOPPED:
        return "it was stopped by a signal or at the end of its time"
    return "it lost ranks or hosts" if code == LOST else f"it was ended by a signal (exit code {code})"


def _describe_standstill(attempts: Sequence[Attempt]) -> str | None:
    """Return why another start would make no progress, or None where it may."""
    last = attempts[-1]
    if last.made_progress:
        return None
    if last.code != STOPPED:
        return f"{_why(last.code or 0)}, and there is no progress since the last start"
    if len(attempts) > 1 and attempts[-2].code == STOPPED and not attempts[-2].made_progress:
        return (
            f"two starts in a row have ended before the run passed step {last.first_step:,}: the time limit is too "
            "short to make a checkpoint. Submit with a longer --time, or a smaller checkpoint.every_steps"
        )
    return None


def _code_of(failure: Failure) -> int:
    return LOST if failure.consequence and failure.exit_code == 1 else failure.exit_code
