"""How long the scheduler lets a run go on."""

import contextlib
import re
import subprocess
from datetime import datetime

from tutti.errors import LaunchError
from tutti.ranks.placement import Environment

ENDS_VARIABLE = "TUTTI_JOB_ENDS"  # seconds since the epoch; job scripts set it
_PATIENCE_SECONDS = 10


def allocation_end(env: Environment) -> float | None:
    """When this allocation ends, in seconds since the epoch; None where nobody says."""
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
        said = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", job],
            capture_output=True,
            text=True,
            check=True,
            timeout=_PATIENCE_SECONDS,
        )
        return end_time(said.stdout)
    return None


def end_time(text: str) -> float | None:
    """The end of a job in what `scontrol show job` prints; a job without a limit has none."""
    match = re.search(r"\bEndTime=(\S+)", text)
    with contextlib.suppress(ValueError):
        if match:
            return datetime.fromisoformat(match[1]).timestamp()
    return None
