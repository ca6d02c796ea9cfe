"""A point as a process of its own: started, waited for, ended with this one; what it says when it fails.

Light: imports no torch.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tutti.launch.parents import end_with_parent

_SAVING_SECONDS = 60.0  # for a run that is told to end
_LONGEST_REASON = 300


def run_process(command: list[str], log: Path, env: Mapping[str, str]) -> int:
    """Run a command to its end, its output added to a file; where this process is told to end, so is that one."""
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(env),
            process_group=0,  # Ctrl-C is this process's to pass on
            preexec_fn=end_with_parent,
        )
    try:
        return process.wait()
    finally:
        if process.returncode is None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let a run save; the second Ctrl-C, or the end of its time, ends it at once."""
    process.terminate()
    try:
        process.wait(_SAVING_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def reason_of(code: int, log: Path) -> str:
    """Why a command has failed, in a line: its last error, or how it has ended."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    errors = [line for line in lines if line.startswith("error: ")]
    if errors:
        told = errors[-1].removeprefix("error: ").partition(" Last lines of ")[0].partition(" Its last calls:")[0]
        return told[:_LONGEST_REASON]
    ended = f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{ended}; its last line: {said}"[:_LONGEST_REASON] if said else f"{ended}, and said nothing"
