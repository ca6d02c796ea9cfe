"""Points as processes of their own: started, waited for, ended with this one; what one says when it fails.

Light: imports no torch.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tutti.launch.parents import end_with_parent

_SAVING_SECONDS = 60.0  # for a run that is told to end
_LOOK_SECONDS = 0.1  # between two looks at several runs
_LONGEST_REASON = 300


def start_process(command: list[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command whose output is added to a file; it ends with this process."""
    with open(log, "ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(env),
            process_group=0,  # Ctrl-C is this process's to pass on
            preexec_fn=end_with_parent,
        )


def wait_for_one(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until one of them has ended; beside a single one nothing runs that could disturb it."""
    if len(processes) == 1:
        processes[0].wait()
    while all(process.poll() is None for process in processes):
        time.sleep(_LOOK_SECONDS)


def end_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Let runs save; a second Ctrl-C, or the end of their time, ends them at once."""
    alive = [process for process in processes if process.poll() is None]
    deadline = time.monotonic() + _SAVING_SECONDS
    try:
        for process in alive:
            process.terminate()
        for process in alive:
            process.wait(max(0.0, deadline - time.monotonic()))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass
    finally:
        for process in alive:
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
