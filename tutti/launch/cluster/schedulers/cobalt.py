"""Cobalt, of legacy machines: qsub, qstat, qdel."""

from pathlib import Path
from typing import Any

from tutti.launch.cluster.resources import Resources
from tutti.launch.cluster.schedulers.commands import JobState, ask, read_id
from tutti.launch.cluster.site import Site

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
    """What this scheduler is told, by the words of its dictionary."""
    output = logs / "job-cobalt.out"  # of all jobs together: the script writes one file for each
    return {**vars(resources), "minutes": -(-resources.seconds // 60), "output": output, "errors": output}


def end_time(seconds: int) -> list[str]:
    """Shell that sets `ends`, the time at which the allocation ends, in seconds since 1970."""
    return [f"ends=${{COBALT_ENDTIME:-$(($(date +%s) + {seconds}))}}"]


def submit(script: Path, after: str | None = None) -> str:
    """Hand in a script, to start when another job has ended in whatever way; the job's id."""
    wait = ["--dependencies", after] if after else []
    script.chmod(0o755)
    return read_id(ask(SUBMIT, "--mode", "script", *wait, str(script), failing=True), SUBMIT)


def query(job_id: str) -> JobState | None:
    """How a job stands, or None where Cobalt has forgotten it."""
    answer = ask("qstat", "--header", "State:Location", job_id)
    rows = [line.split() for line in (answer or "").splitlines()[2:] if line.split()]  # below a title and a rule
    if not rows:
        return None
    state = _STATES.get(rows[0][0].lower(), "waiting")
    return JobState(state, f"on {rows[0][1]}" if state == "running" and len(rows[0]) > 1 else rows[0][0])


def cancel(job_id: str, at_once: bool) -> None:
    """End a job: Cobalt sends TERM, and KILL after the site's delay."""
    ask("qdel", *(["-f"] if at_once else []), job_id, failing=True)


def start_again(job_id: str, script: Path) -> str:
    """Hand in the same script as a new job."""
    return submit(script)
