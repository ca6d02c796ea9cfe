"""One rank of a job over hosts: a process on this host, or on another by ssh, that ends with its launcher."""

import base64
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from tutti.errors import LaunchError
from tutti.launch.hosts import Slot, is_local, own_address
from tutti.launch.output import RankOutput

GRACE_SECONDS = 5  # from SIGTERM to SIGKILL
_SSH_SECONDS = 30

# The shell that becomes the rank. What to run comes through its standard input, where no list of processes shows it.
# A watcher outside the rank's process group holds that input open: when it ends, because the launcher closes it or is
# gone, the watcher ends the whole group, here as on another host.
_START = """
setup=
while IFS= read -r line && [ "$line" != "# go" ]; do setup="$setup$line
"; done
exec 3<&0
(setsid /bin/sh -c '
  word=
  read -r word <&3
  exec 3<&-
  [ "$word" = now ] || kill -s TERM -- -$1
  steps=0
  while [ "$word" != now ] && [ $steps -lt $2 ] && kill -s 0 -- -$1; do sleep 0.1; steps=$((steps + 1)); done
  kill -s KILL -- -$1
' watcher $$ GRACE >/dev/null 2>&1 &)
exec </dev/null 3<&-
eval "$setup"
""".replace("GRACE", str(GRACE_SECONDS * 10))

# Variables that belong to the host or the terminal of the launcher.
_BOUND_TO_HOST = re.compile(
    r"BASH_FUNC_.*|_|OLDPWD|PWD|SHLVL|HOME|HOSTNAME|HOST|USER|LOGNAME|SHELL|MAIL|DISPLAY|TERM|TMPDIR|SSH_.*|XDG_.*|DBUS_.*"
    r"|SLURMD_.*"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Ssh:
    """How other hosts are reached."""

    port: int | None = None
    identity_file: str | None = None

    def words(self, host: str) -> list[str]:
        """The command that a remote command is put behind."""
        options = ["PasswordAuthentication=no", "StrictHostKeyChecking=no", "BatchMode=yes", "LogLevel=ERROR"]
        options += [f"ConnectTimeout={_SSH_SECONDS}", "ServerAliveInterval=15", "ServerAliveCountMax=4"]
        words = ["ssh", *(word for option in options for word in ("-o", option))]
        if self.port is not None:
            words += ["-p", str(self.port)]
        if self.identity_file is not None:
            words += ["-i", self.identity_file]
        return [*words, host]

    def ask(self, host: str, command: str, environment: Mapping[str, str]) -> str:
        """What a short shell command prints on a host."""
        words = [*self.words(host), _one_line(_exports(environment, ("PATH",)) + command)]
        try:
            asked = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=2 * _SSH_SECONDS, check=False
            )
            said = asked.stderr.strip().replace("\n", " ") or f"exit code {asked.returncode}"
            if asked.returncode == 0:
                return asked.stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            said = str(error)
        raise LaunchError(
            f"host {host} cannot be used by ssh: {said.rstrip('.')}. Expected a login without a password. "
            f"Try: {shlex.join([*self.words(host), 'true'])}"
        )


class Worker:
    """A started rank; start it from a thread of any length of life, and `poll` it until it has ended."""

    def __init__(
        self,
        name: str,
        host: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: RankOutput,
        ssh: Ssh | None = None,
    ) -> None:
        self.name = name  # for messages, such as "rank 3"
        self.host = host
        self.local = is_local(host)
        setup = [f"cd {shlex.quote(os.getcwd())} || exit 1", f"exec {shlex.join(command)}"]
        if self.local:
            words = ["/bin/sh", "-c", _START]
        else:
            setup.insert(0, _exports(environment))
            start = shlex.join(["setsid", "/bin/sh", "-c", _START])
            # This shell would say of a rank that it was killed; its exit code does.
            outer = f"exec 3>&2 2>/dev/null\n{start} 2>&3 3>&-\nexit $?"
            words = [*(ssh or Ssh()).words(host), _one_line(outer)]
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(environment) if self.local else None,
                start_new_session=True,  # Ctrl-C is for the launcher
                bufsize=0,
            )
        except OSError as error:
            raise LaunchError(
                f"{name} on host {host} cannot be started: {words[0]}: {error.strerror}. Install it, or mend PATH."
            ) from error
        self._threads = [
            threading.Thread(target=output.forward, args=(source, stream), daemon=True)
            for source, stream in ((self._process.stdout, "stdout"), (self._process.stderr, "stderr"))
        ]
        for thread in self._threads:
            thread.start()
        self._say("\n".join([*setup, "# go"]) + "\n")

    @property
    def pid(self) -> int:
        """The process here: the rank itself, or the ssh to its host."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code once the rank has ended and its output has been passed on; negative for a signal, if known."""
        code = self._process.poll()
        if code is None:
            return None
        if not self._input.closed:
            self.end()  # of what the rank has left behind
            for thread in self._threads:
                thread.join(2.0)  # somebody else may hold the streams open
        return 128 - code if not self.local and 128 < code < 160 else code

    def end(self) -> None:
        """Ask the rank and its children to end, and have them killed after the grace; returns at once."""
        with suppress(OSError):
            self._input.close()

    def kill(self) -> None:
        """Kill the rank and its children; returns at once."""
        self._say("now\n")
        self.end()
        if self.local:
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def drop(self) -> None:
        """Give up what is left here of a rank that did not end: an ssh whose host does not answer."""
        self.end()
        self._process.kill()
        self._process.wait()

    def how_it_ended(self) -> str:
        """Its end in words."""
        code = self.poll()
        if code is None:
            return "still runs"
        if code < 0:
            return f"was ended by signal {_signal_name(-code)}"
        if code == 255 and not self.local:
            return "ended with exit code 255: ssh could not reach the host, or lost it"
        return f"ended with exit code {code}"

    @property
    def _input(self) -> BinaryIO:
        assert self._process.stdin is not None
        return self._process.stdin  # pyright: ignore[reportReturnType]

    def _say(self, text: str) -> None:
        with suppress(OSError, ValueError):
            content = text.encode(errors="surrogateescape")
            while content:
                content = content[self._input.write(content) :]


def end_all(workers: Iterable[Worker]) -> None:
    """End ranks together and wait until they have; every way out of a launcher goes through here."""
    left = [worker for worker in workers if worker.poll() is None]
    for worker in left:
        worker.end()
    left = _wait(left, GRACE_SECONDS + 3)
    for worker in left:
        worker.kill()
    for worker in _wait(left, 2):
        worker.drop()


def _wait(workers: list[Worker], seconds: float) -> list[Worker]:
    """The workers that have not ended in time."""
    deadline = time.monotonic() + seconds
    while (left := [worker for worker in workers if worker.poll() is None]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _one_line(script: str) -> str:
    """A script for /bin/sh as a word that every login shell takes, csh included."""
    code = base64.b64encode(script.encode(errors="surrogateescape")).decode()
    return f"/bin/sh -c 'eval \"$(echo {code} | base64 -d)\"'"


def _exports(environment: Mapping[str, str], only: Iterable[str] | None = None) -> str:
    """A line of shell that sets the variables that may travel to another host."""
    names = environment if only is None else [name for name in only if name in environment]
    return "".join(f"export {name}={shlex.quote(environment[name])}\n" for name in names if may_travel(name))


def may_travel(name: str) -> bool:
    """Whether a variable of this process means the same on another host."""
    return bool(_NAME.fullmatch(name)) and not _BOUND_TO_HOST.fullmatch(name)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


# What another launcher has told this process about itself is not true of the ranks started here.
_OF_ANOTHER_LAUNCHER = re.compile(
    r"OMPI_COMM_WORLD_.*|PMI_.*|PMIX_.*|MPI_LOCAL.*|PALS_.*|TORCHELASTIC_.*|TUTTI_RUN_FOLDER|TUTTI_FAILURE_NOTES"
)


def without_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment that says nothing about ranks."""
    return {name: value for name, value in environment.items() if not _OF_ANOTHER_LAUNCHER.fullmatch(name)}


def rank_environment(slot: Slot, address: str, port: int, interfaces: Sequence[str] = ()) -> dict[str, str]:
    """What one rank is told: who it is, and where rank 0 holds the store."""
    told = {
        "HOROVOD_RANK": slot.rank,
        "HOROVOD_SIZE": slot.size,
        "HOROVOD_LOCAL_RANK": slot.local_rank,
        "HOROVOD_LOCAL_SIZE": slot.local_size,
        "HOROVOD_CROSS_RANK": slot.cross_rank,
        "HOROVOD_CROSS_SIZE": slot.cross_size,
        "HOROVOD_HOSTNAME": slot.host,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "RANK": slot.rank,
        "WORLD_SIZE": slot.size,
        "LOCAL_RANK": slot.local_rank,
        "LOCAL_WORLD_SIZE": slot.local_size,
        "GROUP_RANK": slot.node_rank,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "PYTHONUNBUFFERED": 1,
    }
    return {name: str(value) for name, value in told.items()} | interface_environment(interfaces)


def interface_environment(interfaces: Sequence[str]) -> dict[str, str]:
    """The network interfaces for Gloo and NCCL, where the user has chosen them."""
    if not interfaces:
        return {}
    every = ",".join(interfaces)
    return {"HOROVOD_GLOO_IFACE": interfaces[0], "GLOO_SOCKET_IFNAME": every, "NCCL_SOCKET_IFNAME": every}


_PORTS = range(15_000, 31_000)  # below those that the system hands out
_PROBE = f"""
import random, socket
for port in random.sample(range({_PORTS.start}, {_PORTS.stop}), 100):
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            continue
        print("free port", port)
        break
"""


def check_hosts(hosts: Sequence[str], ssh: Ssh, environment: Mapping[str, str]) -> None:
    """Refuse hosts that ssh does not reach, before anything starts."""
    others = [host for host in dict.fromkeys(hosts) if not is_local(host)]
    if others:
        with ThreadPoolExecutor(min(32, len(others))) as pool:
            list(pool.map(lambda host: ssh.ask(host, "command -v setsid >/dev/null", environment), others))


def meeting_point(
    hosts: Sequence[str], ssh: Ssh, environment: Mapping[str, str], interfaces: Sequence[str] = ()
) -> tuple[str, int]:
    """The address and a free port of the first host, where rank 0 holds the store."""
    first, others = hosts[0], [host for host in hosts if not is_local(host)]
    if not is_local(first):
        said = ssh.ask(first, f"for each in python3 python; do $each -c '{_PROBE}' && exit; done; exit 1", environment)
        return first, int(said.rpartition("free port")[2])
    interface = interfaces[0] if interfaces else None
    return own_address(interface, others[0] if others else None), free_port()


def free_port() -> int:
    """A port that nobody listens on here."""
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:
                continue
    raise LaunchError(f"no free port of 100 tried between {_PORTS.start} and {_PORTS.stop}. End what holds them.")
