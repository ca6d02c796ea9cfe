"""The hosts of an elastic job: found again and again by a script, and left alone for a while after a failure."""

import os
import shlex
import subprocess
import sys
import threading

from tutti.errors import LaunchError
from tutti.launch.hosts import Host, parse_hosts

POLL_SECONDS = 1.0
_SCRIPT_SECONDS = 60.0


def read_script(script: str, default_slots: int) -> list[Host]:
    """What a discovery script, or a line of shell, prints: `host` or `host:slots`, one a line."""
    line = shlex.quote(os.path.abspath(script)) if os.path.isfile(script) else script
    try:
        done = subprocess.run(
            line,
            shell=True,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_SCRIPT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"--host-discovery-script {script} has not ended within {_SCRIPT_SECONDS:g} s. Make it quick."
        ) from error
    if done.returncode != 0:
        said = done.stderr.strip().rpartition("\n")[2]
        raise LaunchError(
            f"--host-discovery-script {script} ended with exit code {done.returncode}: {said or 'it said nothing'}. "
            "Expected exit code 0 and a line 'host' or 'host:slots' for each host."
        )
    lines = [line.strip() for line in done.stdout.splitlines()]
    named = [line if ":" in line else f"{line}:{default_slots}" for line in lines if line]
    try:
        return parse_hosts(",".join(named)) if named else []
    except LaunchError as error:
        raise LaunchError(
            f"--host-discovery-script {script} printed {done.stdout.strip()!r}. "
            "Expected a line 'host' or 'host:slots' for each host."
        ) from error


class Discovery:
    """Runs the script in a thread of its own, and knows what it printed last."""

    def __init__(self, script: str, default_slots: int) -> None:
        self._script, self._default_slots = script, default_slots
        self._hosts = read_script(script, default_slots)  # the first time its errors are the user's to mend
        self._stop = threading.Event()
        threading.Thread(target=self._poll, name="host discovery", daemon=True).start()

    def hosts(self) -> list[Host]:
        return self._hosts

    def stop(self) -> None:
        self._stop.set()

    def _poll(self) -> None:
        told = ""
        while not self._stop.wait(POLL_SECONDS):
            try:
                self._hosts, told = read_script(self._script, self._default_slots), ""
            except (LaunchError, OSError) as error:
                if str(error) != told:
                    print(f"elastic driver: {error} The hosts stay as they are.", file=sys.stderr, flush=True)
                    told = str(error)
