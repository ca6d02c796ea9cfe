"""The hosts of an elastic job: their discovery by a script, their limits, and their cool-down after failures."""

import errno
import math
import os
import shlex
import subprocess
import sys
import threading

from tutti.errors import LaunchError
from tutti.horovod.run.arguments import ElasticOptions
from tutti.launch.elastic.slots import CoolDown
from tutti.launch.hosts import Host, parse_hosts

POLL_SECONDS = 1.0
_SCRIPT_SECONDS = 60.0


def read_script(script: str, default_slots: int) -> list[Host]:
    """Run a discovery script, or a program with arguments, that prints `host` or `host:slots` lines."""
    words = [os.path.abspath(script)] if os.path.isfile(script) else shlex.split(script)
    try:
        done = _run(words)
    except OSError as error:
        raise LaunchError(
            f"--host-discovery-script {script} cannot be started: {error.strerror}. Give the path of a program."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"--host-discovery-script {script} has not ended within {_SCRIPT_SECONDS:g} s. Make it faster."
        ) from error
    if done.returncode != 0:
        printed = done.stderr.strip().rpartition("\n")[2] or "it printed nothing"
        raise LaunchError(
            f"--host-discovery-script {script} ended with exit code {done.returncode}: {printed}. "
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


def _run(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a program without a shell; a script that does not name its interpreter is one of /bin/sh, as in Horovod."""
    try:
        return subprocess.run(
            words, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=_SCRIPT_SECONDS
        )
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        return _run(["/bin/sh", *words])


class Discovery:
    """Runs the script repeatedly in a thread, and keeps the hosts that it printed last."""

    def __init__(self, script: str, default_slots: int) -> None:
        self._script, self._default_slots = script, default_slots
        self._hosts = read_script(script, default_slots)  # an error of the first run ends the job
        self._stop = threading.Event()
        threading.Thread(target=self._poll, name="host discovery", daemon=True).start()

    def hosts(self) -> list[Host]:
        """Return the hosts of the last run that succeeded."""
        return self._hosts

    def stop(self) -> None:
        """End the thread after the present run of the script."""
        self._stop.set()

    def _poll(self) -> None:
        reported = ""
        while not self._stop.wait(POLL_SECONDS):
            try:
                self._hosts, reported = read_script(self._script, self._default_slots), ""
            except (LaunchError, OSError) as error:
                if str(error) != reported:
                    print(f"elastic driver: {error} The hosts stay as they are.", file=sys.stderr, flush=True)
                    reported = str(error)


def check_numbers(options: ElasticOptions) -> None:
    """Refuse numbers of ranks that contradict each other."""
    given = f"-np {options.np} --min-np {options.min_np}" + (f" --max-np {options.max_np}" if options.max_np else "")
    if not 1 <= options.min_np <= options.np <= (options.max_np or options.np):
        raise LaunchError(f"{given}: expected 1 <= min-np <= np <= max-np. Change the one that is out of order.")
    if options.host_discovery_script is None:
        slots = sum(host.slots for host in options.hosts)
        if slots < options.min_np:
            raise LaunchError(
                f"{given}, but the hosts have {slots} slots, and no discovery script can add more. "
                "Name more with -H, give --host-discovery-script, or lower --min-np."
            )
    low, high = options.cooldown_range or (1.0, 1.0)
    if not 0 < low <= high:
        raise LaunchError(f"--blacklist-cooldown-range {low:g} {high:g}: expected 0 < MIN <= MAX, in seconds.")


def cool_down_of(seconds_range: tuple[float, float] | None) -> CoolDown:
    """Return the policy of --blacklist-cooldown-range; without one, a host that has failed is not used again."""
    if seconds_range is None:
        return CoolDown(math.inf, failures_allowed=0, whole_host=True)
    return CoolDown(*seconds_range, whole_host=True)
