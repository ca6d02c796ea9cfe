"""`tutti submit`, and the command with which a job script begins and ends."""

import os
import sys
import time
from pathlib import Path

from tutti.launch.cluster.requeue import begin, ended_early, finish, start_again
from tutti.launch.cluster.resources import Wishes, show_time
from tutti.launch.cluster.submission import hand_in, prepare
from tutti.runs.folder import RunFolder
from tutti.runs.jobs import describe


def submit(
    recipe: str, overrides: list[str], on: str, wishes: Wishes, max_requeues: int, preflight: bool, dry_run: bool
) -> None:
    """Check, write the script, submit it, and say how to follow the job."""
    submission = prepare(recipe, overrides, on, wishes, max_requeues, preflight)
    if dry_run:
        print(submission.script(submission.planned_folder()), end="")
        return
    folder, job_id = hand_in(submission)
    resources = submission.resources
    print(f"job:        {submission.site.scheduler} {job_id}, {resources.describe()}, {show_time(resources.seconds)}")
    print(f"run folder: {folder.path}")
    print(f"script:     {folder.path / 'job.sh'}")
    print(f"follow:     tutti status {folder.path}\n            tutti logs --follow {folder.path}")


def requeue(folder: Path, job_id: str | None, code: int | None, told: bool) -> None:
    """Note the start of a job, or what follows from its end."""
    run = RunFolder(folder)
    if job_id is not None:
        refusal = begin(run, job_id)
        if refusal:
            print(f"tutti: {folder} is not started: {refusal}.", flush=True)
            sys.exit(1)
        return
    ending = finish(run, code or 0, told_early=told and ended_early(os.environ, time.time()))
    if ending.cause:
        print(ending.cause.message(run))
    outcome = ending.decision.outcome
    print(f"tutti: {describe(outcome, ending.decision.reason)}.", flush=True)
    if outcome == "again":
        start_again(run)
    sys.exit(0 if outcome in ("again", "complete") else ending.code)
