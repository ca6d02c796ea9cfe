"""Studies whose points are jobs of a scheduler, one after another; their states are read on request.

Light: imports no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tutti.launch.cluster.resources import Wishes, load_site, settle
from tutti.launch.cluster.schedulers import scheduler_of
from tutti.launch.cluster.staging.script import choose_staging
from tutti.launch.cluster.status import Status, look
from tutti.launch.cluster.submission import Submission, require_scheduler, submit_job, write_job
from tutti.runs.jobs import read_job
from tutti.runs.record import now
from tutti.study.checking import Checked
from tutti.study.definition import Definition, PointState, StudyFolder, read_state, write_state
from tutti.study.executors import failure_reason

_MAX_REQUEUES = 10


def prepare_jobs(
    recipe: str, checked: Sequence[Checked], on: str, requested: Wishes, dry_run: bool = False
) -> list[Submission]:
    """Returns a checked job for each point; without a dry run the scheduler must be here."""
    site = load_site(on, Path(recipe).parent if Path(recipe).is_file() else None)
    if not dry_run:
        require_scheduler(site)
    jobs = []
    for each in checked:
        ranks = each.point.ranks
        per_node = min(ranks, requested.ranks_per_node or site.gpus_per_node or 1)
        own = replace(requested, nodes=math.ceil(ranks / per_node), ranks=ranks, ranks_per_node=per_node)
        resources = settle(own, site, f"{each.config.recipe}-{each.point.id}")
        jobs.append(Submission(recipe, each.config, site, resources, _MAX_REQUEUES, False, choose_staging(site)))
    return jobs


def render_scripts(folder: StudyFolder, checked: Sequence[Checked], jobs: Sequence[Submission]) -> list[str]:
    """Returns the job script of each point of a study in this folder."""
    return [job.script(folder.run(each.point.id).path) for each, job in zip(checked, jobs, strict=True)]


def write_jobs(folder: StudyFolder, definition: Definition, jobs: Sequence[Submission]) -> None:
    """Writes the job script of each point into its run folder."""
    for point, job in zip(definition.points, jobs, strict=True):
        write_job(job, folder.run(point.id))


def submit_missing(folder: StudyFolder, definition: Definition, retry: bool = False) -> list[str]:
    """Submits the waiting points, each after the end of the previous one; returns their ids."""
    last, submitted = None, []
    for point in definition.points:
        state = read_state(folder, point.id)
        if state.state in ("submitted", "running"):
            last = state.job
        elif state.state == "waiting" or (state.state == "failed" and retry):
            run = folder.run(point.id)
            last = submit_job(run, after=last)
            line = f"{scheduler_of(read_job(run).scheduler).SUBMIT} {run.job_script}"
            attempts = state.attempts + 1
            write_state(
                folder, point.id, PointState("submitted", attempts=attempts, started=now(), launch_line=line, job=last)
            )
            submitted.append(point.id)
    return submitted


def update_states(folder: StudyFolder, definition: Definition) -> None:
    """Updates the states of points from their jobs."""
    for point in definition.points:
        state = read_state(folder, point.id)
        if state.state in ("submitted", "running"):
            write_state(folder, point.id, state_of_job(state, look(folder.run(point.id))))


def state_of_job(state: PointState, status: Status) -> PointState:
    """Returns the state of a point from the status of its job."""
    if status.state == "complete":
        return replace(state, state="finished", ended=_ended(status), reason=None)
    if status.known is not None and not status.known.is_over:
        return replace(state, state="running" if status.known.state in ("running", "ending") else "submitted")
    if status.state == "waiting":  # between two starts
        return replace(state, state="submitted")
    return replace(state, state="failed", ended=_ended(status), reason=_reason(status))


def _ended(status: Status) -> str:
    return (status.job.attempts[-1].ended if status.job.attempts else None) or now()


def _reason(status: Status) -> str:
    """Returns the cause of a failure from the record or output, else the state of the job."""
    last = status.job.attempts[-1] if status.job.attempts else None
    if status.state == "failed" and last is not None and last.code:
        return failure_reason(status.folder, last.started, last.code, status.folder.logs / f"job-{last.id}.out")
    return f"its job is {status.state}" if status.state == "cancelled" else f"its job {status.state}"
