"""Cobalt, of legacy machines: qsub, qstat, qdel."""

from pathlib import Path
from typing import Any

from tutti.launch.cluster.resources import Resources, Site
from tutti.launch.cluster.schedulers import JobState, call, read_id

NAME = "cobalt"
SUBMIT = "qsub"
PREFIX = "#COBALT"
JOB_ID = "COBALT_JOBID"
DIRECTIVES = {
    "name": "--jobname {}",
    "account": "-A {}",
    "queue": "-q {}",
    "nodes": "-n {}",
    "constraint": "--attrs {}",
    "minutes": "-t {}",
    "output": "-o {}",
    "errors": "-e {}",
}
_STATES = {"queued": "waiting", "starting": "waiting", "running": "running", "exiting": "ending", "killing": "ending"}


def values(site: Site, resources: Resources, logs: Path) -> dict[str, Any]:
    """Return the values of this scheduler's directives."""
    output = logs / "job-cobalt.out"  # of all jobs together: the script writes one file for each
    return {**vars(resources), "minutes": -(-resources.seconds // 60), "output": output, "errors": output}


def end_time(seconds: int) -> list[str]:
    """Return shell lines that set `ends`, the end of the allocation in seconds since 1970."""
    return [f"ends=${{COBALT_ENDTIME:-$(($(date +%s) + {seconds}))}}"]


def submit(script: Path, after: str | None = None) -> str:
    """Submit a script, to start when another job has ended in whatever way; return the id of the job."""
    wait = ["--dependencies", after] if after else []
    script.chmod(0o755)
    return read_id(call(SUBMIT, "--mode", "script", *wait, str(script), failing=True), SUBMIT)


def query(job_id: str) -> JobState | None:
    """Return the state of a job, or None where Cobalt no longer knows it."""
    answer = call("qstat", "--header", "State:Location", job_id)
    rows = [line.split() for line in (answer or "").splitlines()[2:] if line.split()]  # below a title and a rule
    if not rows:
        return None
    state = _STATES.get(rows[0][0].lower(), "waiting")
    return JobState(state, f"on {rows[0][1]}" if state == "running" and len(rows[0]) > 1 else rows[0][0])


def cancel(job_id: str, at_once: bool) -> None:
    """End a job: Cobalt sends TERM, and KILL after the site's delay."""
    call("qdel", *(["-f"] if at_once else []), job_id, failing=True)


def requeue(job_id: str, script: Path) -> str:
    """Submit the same script as a new job."""
    return submit(script)
