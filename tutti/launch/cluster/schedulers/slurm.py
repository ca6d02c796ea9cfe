"""Slurm: sbatch, scontrol, scancel."""

from pathlib import Path
from typing import Any

from tutti.launch.cluster.resources import Resources, Site, show_time
from tutti.launch.cluster.schedulers import JobState, call, read_id

NAME = "slurm"
SUBMIT = "sbatch"
PREFIX = "#SBATCH"
JOB_ID = "SLURM_JOB_ID"
DIRECTIVES = {
    "name": "--job-name={}",
    "account": "--account={}",
    "queue": "--partition={}",
    "constraint": "--constraint={}",
    "nodes": "--nodes={}",
    "ranks": "--ntasks={}",
    "ranks_per_node": "--ntasks-per-node={}",
    "cpus_per_rank": "--cpus-per-task={}",
    "gpus_per_node": "--gpus-per-node={}",
    "whole_nodes": "--exclusive",
    "time": "--time={}",
    "signal": "--signal=USR1@{}",
    "output": "--output={}",
    "append": "--open-mode=append",
    "requeue": "--requeue",
}
_STATES: dict[str, str] = dict.fromkeys(("PENDING", "REQUEUED", "CONFIGURING", "SUSPENDED", "REQUEUE_HOLD"), "waiting")
_STATES |= {"RUNNING": "running", "COMPLETING": "ending", "CANCELLED": "cancelled"}


def values(site: Site, resources: Resources, logs: Path) -> dict[str, Any]:
    """Return the values of this scheduler's directives."""
    return {
        **vars(resources),
        # With unequal nodes this is the most on one, and --ntasks says how many there are.
        "ranks_per_node": resources.ranks_per_node,
        "cpus_per_rank": resources.cores_per_rank and resources.cores_per_rank * site.threads_per_core,
        "whole_nodes": site.whole_nodes or None,
        "time": show_time(resources.seconds),
        "signal": min(120, resources.seconds // 4),  # seconds before the end at which the ranks get it
        "output": logs / "job-%j.out",
        "append": True,
        "requeue": True,
    }


def end_time(seconds: int) -> list[str]:
    """Return shell lines that set `ends`, the end of the allocation in seconds since 1970."""
    return [
        'ends=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e 2>/dev/null)',
        f'ends=$(date --date="${{ends:-unknown}}" +%s 2>/dev/null) || ends=$(($(date +%s) + {seconds}))',
    ]


def submit(script: Path, after: str | None = None) -> str:
    """Submit a script, to start when another job has ended in whatever way; return the id of the job."""
    wait = [f"--dependency=afterany:{after}"] if after else []
    return read_id(call(SUBMIT, "--parsable", *wait, str(script), failing=True), SUBMIT)


def query(job_id: str) -> JobState | None:
    """Return the state of a job, or None where Slurm no longer knows it."""
    answer = call("scontrol", "--oneliner", "show", "job", job_id)
    if not answer:
        return None
    facts = dict(word.split("=", 1) for word in answer.splitlines()[-1].split() if "=" in word)
    word = facts.get("JobState", "").partition("+")[0]
    state = _STATES.get(word, "ended")
    if state == "running":
        return JobState(state, f"on {facts.get('NodeList')}", _left(facts))
    reason = facts.get("Reason", "None")
    return JobState(state, word.lower() + (f" ({reason})" if reason not in ("None", "") else ""))


def cancel(job_id: str, at_once: bool) -> None:
    """End a job: the ranks get SIGTERM and may save; at once, they have the site's time between TERM and KILL."""
    known = query(job_id)
    if not at_once and known and known.state == "running":
        # To the ranks alone: a srun that gets this signal would kill them.
        call("scancel", "--signal=TERM", job_id, failing=True)
    else:
        call("scancel", job_id, failing=True)


def requeue(job_id: str, script: Path) -> str:
    """Requeue the same job; it keeps its id."""
    call("scontrol", "requeue", job_id, failing=True)
    return job_id


def _left(facts: dict[str, str]) -> int | None:
    """Seconds from D-HH:MM:SS of the limit and of the time that has passed."""
    try:
        return _seconds(facts["TimeLimit"]) - _seconds(facts["RunTime"])
    except (KeyError, ValueError):  # UNLIMITED
        return None


def _seconds(text: str) -> int:
    days, _, clock = text.rpartition("-")
    hours, minutes, seconds = clock.split(":")
    return int(days or 0) * 86400 + int(hours) * 3600 + int(minutes) * 60 + int(seconds)
