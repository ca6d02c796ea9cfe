"""Start, watch and end processes: on this host in a process group of their own, or on any host of a job by ssh.

Every process that is started here ends with its launcher, however the launcher ends.
"""

import contextlib
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, TypeVar

from tutti.errors import FolderError, LaunchError
from tutti.launch.hosts import Ssh, as_one_word, export_lines, is_local
from tutti.ranks.process import describe_exit, end_with_parent

GRACE_SECONDS = 5  # from SIGTERM to SIGKILL
_KILL_SECONDS = 2.0  # from SIGKILL until the process is given up
_POLL_SECONDS = 0.02
_WAIT_SECONDS = 60.0  # of one wait for a single process
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Stream = Literal["stdout", "stderr"]
_LINE_END = re.compile(rb"\r\n|\n|\r")  # a progress bar ends its lines with a carriage return
_screen = threading.Lock()


class Supervised(Protocol):
    """A process that can be watched and ended."""

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs; negative for a signal."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended; after `timeout` seconds raise subprocess.TimeoutExpired."""
        ...

    def terminate(self) -> None:
        """Ask the process to end, and return at once."""
        ...

    def kill(self) -> None:
        """Kill the process and its children, and return at once."""
        ...

    def abandon(self) -> None:
        """Give up a process that was killed and has not ended."""
        ...


class Stopped(BaseException):
    """A signal asks the launcher to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Have the signals that end a launcher raise `Stopped` in its main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _stop) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: Any) -> None:
    raise Stopped(number)


P = TypeVar("P", bound=Supervised)


def wait_for_any(processes: Sequence[P], poll_seconds: float = _POLL_SECONDS, seconds: float | None = None) -> list[P]:
    """Wait until at least one process has ended, and return those that have; none if `seconds` are over before."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while not (ended := [process for process in processes if process.poll() is not None]):
        left = _WAIT_SECONDS if deadline is None else deadline - time.monotonic()
        if left <= 0:
            return []
        if len(processes) == 1:  # a poll would disturb the process that is being measured
            with contextlib.suppress(subprocess.TimeoutExpired):
                processes[0].wait(min(left, _WAIT_SECONDS))
        else:
            time.sleep(min(left, poll_seconds))
    return ended


def _wait_quietly(process: subprocess.Popen[bytes], timeout: float | None) -> int:
    """Wait for a child without waking up before it ends, which Python's own wait with a timeout does."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:  # it has ended, or the kernel is an old one
        return subprocess.Popen.wait(process, timeout)
    try:
        ready = select.poll()
        ready.register(handle, select.POLLIN)
        if timeout is not None and not ready.poll(timeout * 1000):
            raise subprocess.TimeoutExpired(process.args, timeout)
    finally:
        os.close(handle)
    return subprocess.Popen.wait(process)


def end_processes(
    processes: Iterable[Supervised], grace_seconds: float = GRACE_SECONDS + 3, reraise: bool = False
) -> None:
    """Terminate processes together, kill those that outlast the grace period, and wait until all have ended.

    Another signal to the launcher meanwhile kills them at once; with `reraise` it is raised when they have ended.
    """
    alive = [process for process in processes if process.poll() is None]
    interrupt: BaseException | None = None
    try:
        for process in alive:
            process.terminate()
        _wait(alive, grace_seconds)
    except (KeyboardInterrupt, Stopped) as error:
        interrupt = error
    ended = False
    while not ended:
        try:
            for process in alive:
                process.kill()
            for process in _wait(alive, _KILL_SECONDS):
                process.abandon()
            ended = True
        except (KeyboardInterrupt, Stopped) as error:
            interrupt = error
    if interrupt is not None and reraise:
        raise interrupt


def _wait(processes: list[Supervised], seconds: float) -> list[Supervised]:
    """Return the processes that have not ended in time."""
    deadline = time.monotonic() + seconds
    while (left := [process for process in processes if process.poll() is None]) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return left


class LocalProcess(subprocess.Popen[bytes]):
    """A command on this host, in a process group of its own; its output is appended to a file."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        with open(log, "ab") as output:
            super().__init__(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                process_group=0,  # Ctrl-C reaches the launcher alone, which terminates its processes
                preexec_fn=end_with_parent,
            )

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended."""
        return _wait_quietly(self, timeout) if self.poll() is None else self.returncode

    def kill(self) -> None:
        """Kill the whole process group, also where its first process has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def abandon(self) -> None:
        """Wait for the kernel: a process that was killed on this host ends."""
        self.wait()


class RankOutput:
    """Where the two streams of one rank go."""

    def __init__(self, rank: int, size: int, folder: str | None = None, timestamp: bool = False) -> None:
        self.rank = rank
        self._timestamp = timestamp
        self._files: dict[Stream, BinaryIO] = {}
        if folder is not None:
            own = Path(folder) / f"rank.{rank:0{len(str(max(size - 1, 0)))}d}"
            try:
                own.mkdir(parents=True, exist_ok=True)
                self._files = {"stdout": (own / "stdout").open("wb"), "stderr": (own / "stderr").open("wb")}
            except OSError as error:
                raise FolderError(
                    f"--output-filename {folder}: {error.strerror} ({error.filename}). Give a folder that can be made."
                ) from error

    def forward(self, source: BinaryIO, stream: Stream) -> None:
        """Pass on a stream until its end, a whole line at a time."""
        rest = b""
        while piece := os.read(source.fileno(), 65_536):
            rest += piece
            lines, start = [], 0
            for end in _LINE_END.finditer(rest):
                lines.append(rest[start : end.end()])
                start = end.end()
            rest = rest[start:]
            self._write(stream, lines)
        if rest:
            self._write(stream, [rest + b"\n"])
        source.close()
        if stream in self._files:
            self._files[stream].close()

    def _write(self, stream: Stream, lines: list[bytes]) -> None:
        when = time.asctime() if self._timestamp else ""
        prefix = f"{when}[{self.rank}]<{stream}>:".encode()
        try:
            if stream in self._files:
                self._files[stream].write(b"".join(lines))
                self._files[stream].flush()
            screen = (sys.stdout if stream == "stdout" else sys.stderr).buffer
            with _screen:
                screen.write(b"".join(prefix + line for line in lines))
                screen.flush()
        except (OSError, ValueError):
            pass  # the reader of this output has ended; the rank continues


# The shell that becomes the command. The command comes through standard input, where no list of processes shows it.
# A watcher outside the process group holds that input open: when the launcher closes it or is gone, the watcher ends
# the whole group, on this host as on another.
_START = """
setup=
while IFS= read -r line && [ "$line" != "# go" ]; do setup="$setup$line
"; done
exec 3<&0
(setsid /bin/sh -c '
  order=
  read -r order <&3
  exec 3<&-
  [ "$order" = now ] || kill -s TERM -- -$1
  steps=0
  while [ "$order" != now ] && [ $steps -lt $2 ] && kill -s 0 -- -$1; do sleep 0.1; steps=$((steps + 1)); done
  kill -s KILL -- -$1
' watcher $$ GRACE >/dev/null 2>&1 &)
exec </dev/null 3<&-
eval "$setup"
""".replace("GRACE", str(GRACE_SECONDS * 10))


class HostProcess:
    """A command on a host of the job: on this one, or on another by ssh. Any thread may start and poll it."""

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
            setup.insert(0, export_lines(environment))
            start = shlex.join(["setsid", "/bin/sh", "-c", _START])
            # Without this, the outer shell prints that the process was killed; the exit code reports it already.
            outer = f"exec 3>&2 2>/dev/null\n{start} 2>&3 3>&-\nexit $?"
            words = [*(ssh or Ssh()).words(host), as_one_word(outer)]
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(environment) if self.local else None,
                start_new_session=True,  # Ctrl-C reaches the launcher alone
                bufsize=0,
            )
        except OSError as error:
            raise LaunchError(
                f"{name} on host {host} cannot be started: {words[0]}: {error.strerror}. Install it, or correct PATH."
            ) from error
        self._threads = [
            threading.Thread(target=output.forward, args=(source, stream), daemon=True)
            for source, stream in ((self._process.stdout, "stdout"), (self._process.stderr, "stderr"))
        ]
        for thread in self._threads:
            thread.start()
        self._write("\n".join([*setup, "# go"]) + "\n")

    def poll(self) -> int | None:
        """Return the exit code once the process has ended and its output was forwarded; negative for a known signal."""
        code = self._process.poll()
        if code is None:
            return None
        if not self._input.closed:
            self.terminate()  # the children that the process has left
            for thread in self._threads:
                thread.join(2.0)  # another process may hold the streams open
        return 128 - code if not self.local and 128 < code < 160 else code

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended."""
        return _wait_quietly(self._process, timeout)

    def terminate(self) -> None:
        """Have the process and its children terminated, and killed after the grace period; return at once."""
        with contextlib.suppress(OSError):
            self._input.close()

    def kill(self) -> None:
        """Kill the process and its children; return at once."""
        if self.poll() is not None:
            return
        self._write("now\n")
        self.terminate()
        if self.local:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def abandon(self) -> None:
        """End the ssh to a host that does not answer."""
        self.terminate()
        self._process.kill()
        self._process.wait()

    def describe_end(self) -> str:
        """Describe how the process has ended."""
        code = self.poll()
        if code is None:
            return "still runs"
        if code == 255 and not self.local:
            return "ended with exit code 255: ssh could not reach the host, or lost it"
        return f"was {describe_exit(code)}" if code < 0 else describe_exit(code)

    @property
    def _input(self) -> BinaryIO:
        assert self._process.stdin is not None
        return self._process.stdin  # pyright: ignore[reportReturnType]

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            content = text.encode(errors="surrogateescape")
            while content:
                content = content[self._input.write(content) :]
