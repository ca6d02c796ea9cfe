"""OpenPBS and PBS Pro: qsub, qstat, qdel."""

import json
from pathlib import Path
from typing import Any

from tutti.launch.cluster.resources import Resources, Site, show_time
from tutti.launch.cluster.schedulers import JobState, call, read_id

NAME = "pbs"
SUBMIT = "qsub"
PREFIX = "#PBS"
JOB_ID = "PBS_JOBID"
DIRECTIVES = {
    "name": "-N {}",
    "account": "-A {}",
    "queue": "-q {}",
    "select": "-l select={}",
    "place": "-l place={}",
    "filesystems": "-l filesystems={}",
    "time": "-l walltime={}",
    "output": "-o {}",
    "joined": "-j oe",
    "rerun": "-r y",
}
_STATES = dict.fromkeys("QHWTS", "waiting") | {"B": "running", "R": "running", "E": "ending"}


def values(site: Site, resources: Resources, logs: Path) -> dict[str, Any]:
    """Return the values of this scheduler's directives."""
    return {
        **vars(resources),
        "select": _select(site, resources),
        "place": site.place,
        "filesystems": site.filesystems,
        "time": show_time(resources.seconds),
        "output": logs / "job-pbs.out",  # PBS writes this file at the end of the job: the script writes one of its own
        "joined": True,
        "rerun": True,
    }


def end_time(seconds: int) -> list[str]:
    """Return shell lines that set `ends`, the end of the allocation in seconds since 1970."""
    return [f"ends=$(($(date +%s) + {seconds}))"]


def submit(script: Path, after: str | None = None) -> str:
    """Submit a script, to start when another job has ended in whatever way; return the id of the job."""
    wait = ["-W", f"depend=afterany:{after}"] if after else []
    return read_id(call(SUBMIT, *wait, str(script), failing=True), SUBMIT)


def query(job_id: str) -> JobState | None:
    """Return the state of a job, or None where PBS no longer knows it."""
    answer = call("qstat", "-f", "-F", "json", job_id)
    try:
        facts = next(iter(json.loads(answer or "{}")["Jobs"].values()))
    except (ValueError, KeyError, StopIteration):
        return None
    state = _STATES.get(facts.get("job_state", ""), "ended")
    if state == "running":
        return JobState(state, f"on {facts.get('exec_host', 'its nodes')}", _left(facts))
    return JobState(state, facts.get("comment", ""))


def cancel(job_id: str, at_once: bool) -> None:
    """End a job: PBS sends TERM, and KILL after the site's delay."""
    call("qdel", *(["-W", "force"] if at_once else []), job_id, failing=True)


def requeue(job_id: str, script: Path) -> str:
    """Submit the same script as a new job."""
    return submit(script)


def _select(site: Site, resources: Resources) -> str:
    """The chunks of a job, one for each node; whole nodes need no numbers of cores and GPUs."""
    words = [str(resources.nodes), *([resources.constraint] if resources.constraint else [])]
    if not site.whole_nodes:
        cores = (resources.cores_per_rank or 1) * resources.ranks_per_node * site.threads_per_core
        words += [f"ncpus={cores}", f"mpiprocs={resources.ranks_per_node}"]
        words += [f"ngpus={resources.gpus_per_node}"] if resources.gpus_per_node else []
    return ":".join(words)


def _left(facts: dict[str, Any]) -> int | None:
    try:
        return _seconds(facts["Resource_List"]["walltime"]) - _seconds(facts["resources_used"]["walltime"])
    except (KeyError, ValueError):  # a job that has just begun has used nothing yet
        return None


def _seconds(text: str) -> int:
    hours, minutes, seconds = text.split(":")
    return int(hours) * 3600 + int(minutes) * 60 + int(seconds)
