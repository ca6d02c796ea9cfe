"""Loggers besides metrics.jsonl: a CSV file, and processes that pass events on to Weights & Biases or MLflow.

metrics.jsonl is the record of a run; loggers copy it. A CSV file is rewritten as events require. Weights & Biases and
MLflow cannot take back what they were given, so they are given an event when a checkpoint that holds it is durable:
a run that is resumed never repeats it. What they do in a process of their own can neither end nor stall training.
"""

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any, Protocol

from tutti.runs.folder import RunFolder
from tutti.runs.metrics import read_events

END_SECONDS = 60.0  # within which a logger has to finish at the end of a run
STOP_SECONDS = 15.0  # the same for a run that was stopped, whose allocation may end
STALL_SECONDS = 300.0  # after which a logger that has not taken what it was given is left out
# MLflow reports its use to its makers unless this is set; a run makes no contact that was not asked for.
_QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true"}


class LoggerError(Exception):
    """A logger has failed; the run goes on without it."""


class Logger(Protocol):
    """What a journal passes events on to; an exception costs the logger, never the run."""

    def write(self, event: dict[str, Any]) -> None:
        """Take an event that was written to metrics.jsonl."""
        ...

    def commit(self) -> list[str]:
        """Take note that no resumed run repeats the events so far; returns lines for people."""
        ...

    def close(self, ended: str = "finished") -> list[str]:
        """End with a run that is `finished`, `interrupted`, `stopped` or `failed`; returns lines for people."""
        ...


class CsvLog:
    """metrics.csv: one row an event, with a column for every key of metrics.jsonl so far."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._path = folder.path / "metrics.csv"
        self._columns: dict[str, None] = {}
        self._rewrite()

    def write(self, event: dict[str, Any]) -> None:
        if event.keys() <= self._columns.keys():
            with open(self._path, "a", newline="") as file:
                csv.DictWriter(file, list(self._columns)).writerow(event)
        else:
            self._rewrite()

    def commit(self) -> list[str]:
        return []

    def close(self, ended: str = "finished") -> list[str]:
        return []

    def _rewrite(self) -> None:
        """Write all events again: there is a new column, or the run was resumed before the end of the file."""
        events = list(read_events(self._folder.metrics))
        self._columns = dict.fromkeys(key for event in events for key in event)
        aside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with open(aside, "w", newline="") as file:
            writer = csv.DictWriter(file, list(self._columns))
            writer.writeheader()
            writer.writerows(events)
        os.replace(aside, self._path)


class LoggerProcess:
    """A process that reads metrics.jsonl as far as it is told, and passes the events on."""

    def __init__(
        self,
        name: str,
        folder: RunFolder,
        end_seconds: float = END_SECONDS,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self._metrics, self._log = folder.metrics, folder.logs / f"{name}.log"
        self._end_seconds, self._stall_seconds = end_seconds, stall_seconds
        self._taken = self._told = self._metrics.stat().st_size  # bytes
        self._waits_since: float | None = None  # where it was told more than it has taken
        self._answers = b""
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tutti.runs.logger_process", name, str(folder.path), str(self._told)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_QUIET | os.environ,
                start_new_session=True,  # no signals from a terminal, and one group with what it starts
            )
        assert self._process.stdin and self._process.stdout
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        for end in (self._input, self._output):
            os.set_blocking(end, False)

    def write(self, event: dict[str, Any]) -> None:
        """Notice that the process has ended or hangs."""
        if self._process.poll() is not None:
            self._kill()
            raise LoggerError(self._reason())
        if self._waits_since is not None and time.monotonic() - self._waits_since > self._stall_seconds:
            self._kill()
            raise LoggerError(self._with_log(f"it has not answered for {self._stall_seconds:g} s"))

    def commit(self) -> list[str]:
        self._told = self._metrics.stat().st_size
        self._tell({"size": self._told})  # where the pipe is full, a later message says more
        if self._waits_since is None:
            self._waits_since = time.monotonic()
        return self._read()

    def close(self, ended: str = "finished") -> list[str]:
        """Wait until the process has ended, for a limited time; a finished run gives it all events."""
        size = self._metrics.stat().st_size if ended == "finished" else self._told
        seconds = self._end_seconds if ended == "finished" else min(self._end_seconds, STOP_SECONDS)
        is_told = self._tell({"size": size, "ended": ended})
        try:
            self._process.wait(seconds if is_told else 0)
            found = self._read()
        except subprocess.TimeoutExpired:
            raise LoggerError(self._with_log(f"it has not finished within {seconds:g} s")) from None
        finally:
            self._kill()
        if self._process.returncode:
            raise LoggerError(self._reason())
        return found

    def _tell(self, message: dict[str, Any]) -> bool:
        """Write a message, if the process has read those before it; less than PIPE_BUF, it is written whole."""
        try:
            os.write(self._input, (json.dumps(message) + "\n").encode())
        except BlockingIOError:
            return False
        except BrokenPipeError:  # it has ended, and its exit code says how
            pass
        return True

    def _read(self) -> list[str]:
        """What the process has answered: how far it has come, and lines for people."""
        found: list[str] = []
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._output, 1 << 16):
                self._answers += chunk
        *lines, self._answers = self._answers.split(b"\n")
        for answer in map(json.loads, lines):
            found += [answer["say"]] if "say" in answer else []
            self._taken = max(self._taken, answer.get("taken", 0))
            self._waits_since = None if self._taken >= self._told else time.monotonic()
        return found

    def _reason(self) -> str:
        """Why the process has ended: a signal, or what its last line says."""
        code, last = self._process.returncode, ""
        if code < 0:
            return self._with_log(f"its process was ended by signal {-code} ({signal.strsignal(-code)})")
        with contextlib.suppress(OSError):
            last = "".join(self._log.read_text(errors="replace").splitlines()[-1:]).rstrip(". ")
        return self._with_log(last or f"its process ended with code {code}")

    def _with_log(self, reason: str) -> str:
        """A reason, and the file that has more, if it has anything."""
        with contextlib.suppress(OSError):
            if self._log.stat().st_size:
                return f"{reason} (more in {self._log})"
        return reason

    def _kill(self) -> None:
        """End the process, if it has not ended, and what it has started."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()


def open_logger(name: str, folder: RunFolder) -> Logger:
    """The logger of a name in `log.to`."""
    if name == "tensorboard":
        from tutti.runs.tensorboard import TensorBoardLog

        last = max((event["step"] for event in read_events(folder.metrics) if "step" in event), default=-1)
        return TensorBoardLog(folder.tensorboard, last if folder.tensorboard.exists() else None)
    return CsvLog(folder) if name == "csv" else LoggerProcess(name, folder)
