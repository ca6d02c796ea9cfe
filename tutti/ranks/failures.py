"""How a rank that fails tells its launcher what happened, and how the launcher finds the first cause."""

import contextlib
import faulthandler
import json
import os
import platform
import re
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tutti.errors import Cause, Interrupted, RankLost, cause_of
from tutti.ranks.process import describe_exit
from tutti.runs.files import read_dataclass
from tutti.runs.folder import RunFolder
from tutti.runs.output import last_lines

NOTES_VARIABLE = "TUTTI_FAILURE_NOTES"  # where a rank leaves word of its failure

# What the other ranks meet when one is gone. Gloo raises plain RuntimeErrors, which only their text tells apart.
_CONSEQUENCE = re.compile(r"connection (closed|reset)|broken pipe|peer|socket|timed out|store", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """One rank's end: what to say, and whether the rank was only hit by another's end."""

    rank: int
    host: str
    time: float
    exit_code: int
    text: str
    said: bool  # the text is a whole message for the user; otherwise the log's last lines belong to it
    consequence: bool
    cause: Cause = Cause.ERROR

    def sentence(self) -> str:
        """The text, marked as an error unless the run was only stopped."""
        return self.text if self.exit_code == Interrupted.exit_code else f"error: {self.text}"

    def message(self, folder: RunFolder) -> str:
        """What the screen shows."""
        if self.said:
            return self.sentence()
        log = folder.log(self.rank)
        lines = last_lines(log)
        tail = f"Last lines of {log}:{quote(lines)}" if lines else f"It has written nothing to {log}"
        return f"error: rank {self.rank} on host {self.host} failed: {self.text}. {tail}"


def quote(lines: list[str]) -> str:
    """Lines of a log or a traceback, set off from the message they belong to."""
    return "".join(f"\n  | {line}" for line in lines)


def describe(rank: int, error: BaseException, exit_code: int, said: bool) -> Failure:
    """A failure of this process."""
    text = str(error) if said else f"{type(error).__name__}: {error}".split("\n")[0].rstrip(".")
    lost = isinstance(error, RankLost) or getattr(error, "told", False)
    consequence = lost or (not said and is_consequence(error))
    return Failure(rank, platform.node(), time.time(), exit_code, text, said, consequence, cause_of(error))


def is_consequence(error: BaseException) -> bool:
    """Whether an error is what a rank meets when another one is gone."""
    text = f"{type(error).__name__}: {error}"
    return isinstance(error, RuntimeError | ConnectionError) and bool(_CONSEQUENCE.search(text))


def leave_note(folder: Path, failure: Failure) -> None:
    """Write a failure where the launcher looks for it."""
    note = folder / f"failure-{failure.rank}.json"
    try:
        aside = note.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(asdict(failure)))
        aside.replace(note)
    except OSError:
        pass  # the exit code still says that something failed


def read_notes(folder: Path) -> list[Failure]:
    """The failures that ranks have written; of a damaged note the exit code of its rank says enough."""
    found = []
    for note in sorted(folder.glob("failure-*.json")):
        with contextlib.suppress(OSError, ValueError):
            found.append(read_dataclass(note, Failure))
    return found


def from_exit_code(rank: int, exit_code: int) -> Failure:
    """A failure that left no note: the rank was killed, or ended by itself."""
    terminated = exit_code == -signal.SIGTERM  # the agent's own way of ending the others
    cause = Cause.RANK_LOST if exit_code < 0 else Cause.ERROR
    return Failure(rank, platform.node(), time.time(), 1, describe_exit(exit_code), False, terminated, cause)


def first_cause(failures: list[Failure]) -> Failure:
    """The failure to show: the first that is no consequence of another."""
    return min(failures, key=lambda failure: (failure.consequence, failure.time))


def end_rank(rank: int, text: str, exit_code: int, screen: int | None) -> None:
    """Leave word, write all stacks to this rank's log, and end this process at once."""
    notes = os.environ.get(NOTES_VARIABLE)
    if notes:
        cause = Cause.RANK_LOST if exit_code == RankLost.exit_code else Cause.TIMEOUT
        leave_note(
            Path(notes), Failure(rank, platform.node(), time.time(), exit_code, text, True, screen is None, cause)
        )
    elif screen is not None:
        with contextlib.suppress(OSError):
            os.write(screen, f"error: {text}\n".encode())
    with contextlib.suppress(Exception):
        faulthandler.dump_traceback(sys.stderr.fileno())
        sys.stdout.flush()
    os._exit(exit_code)
