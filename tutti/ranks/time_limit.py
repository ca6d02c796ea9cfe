"""The time limit of the allocation that a run is in."""

import contextlib
import re
import subprocess
from datetime import datetime

from tutti.errors import LaunchError
from tutti.ranks.placement import Environment

ENDS_VARIABLE = "TUTTI_JOB_ENDS"  # seconds since the epoch; job scripts set it
_QUERY_SECONDS = 10


def allocation_end(env: Environment) -> float | None:
    """Return the end of this allocation in seconds since the epoch; None if there is none."""
    for name in (ENDS_VARIABLE, "SLURM_JOB_END_TIME"):
        if text := env.get(name):
            try:
                return float(text)
            except ValueError:
                raise LaunchError(f"{name}={text!r}: expected seconds since the epoch, as date +%s prints.") from None
    if job := env.get("SLURM_JOB_ID"):
        return _ask_slurm(job)
    return None


def _ask_slurm(job: str) -> float | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", job],
            capture_output=True,
            text=True,
            check=True,
            timeout=_QUERY_SECONDS,
        )
        return end_time(answer.stdout)
    return None


def end_time(text: str) -> float | None:
    """Parse the end of a job from the output of `scontrol show job`; None for a job without a limit."""
    match = re.search(r"\bEndTime=(\S+)", text)
    with contextlib.suppress(ValueError):
        if match:
            return datetime.fromisoformat(match[1]).timestamp()
    return None
