"""The note that a failing rank writes for its launcher, and how the launcher finds the first cause."""

import contextlib
import faulthandler
import json
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tutti.errors import Cause, Interrupted, RankLost, TuttiError, cause_of
from tutti.ranks.process import describe_exit
from tutti.runs.files import read_dataclass
from tutti.runs.folder import RunFolder
from tutti.runs.output import last_lines

NOTES_VARIABLE = "TUTTI_FAILURE_NOTES"  # the folder where a rank writes a note of its failure
_SIGNAL_NOTE = "signal"

# By name, since torch is not imported here: errors of the connections to the store and between ranks.
_CONNECTION_ERRORS = {"DistNetworkError", "DistStoreError"}
# Gloo raises plain RuntimeErrors, which name the place in its source, and NCCL one type for all that can go wrong.
_GLOO = re.compile(r"\[[^\]\s]*\bgloo/[^\]\s]*:\d+\]|^Gloo \w+ failed")
_NCCL_LOST = re.compile(r"ncclRemoteError|ncclSystemError|remote process exited|communicator was aborted|[Ww]atchdog")


class ConnectionToRankLost(ConnectionResetError):
    """The connection to another rank is closed: that rank has ended."""


@dataclass(frozen=True)
class Failure:
    """How one rank failed, and whether that was only a consequence of another rank's failure."""

    rank: int
    host: str
    time: float
    exit_code: int
    text: str
    said: bool  # the text is a whole message for the user; otherwise the last lines of the log follow it
    consequence: bool
    cause: Cause = Cause.ERROR
    lost_rank: int | None = None  # the rank that the text names, where that is another one

    def sentence(self) -> str:
        """Return the text, marked as an error unless the run was only stopped."""
        return self.text if self.exit_code == Interrupted.exit_code else f"error: {self.text}"

    def message(self, folder: RunFolder) -> str:
        """Return the message for the screen."""
        if self.said:
            return self.sentence()
        log = folder.log(self.rank)
        lines = last_lines(log)
        tail = f"Last lines of {log}:{quote(lines)}" if lines else f"It has written nothing to {log}"
        return f"error: rank {self.rank} on host {self.host} failed: {self.text}. {tail}"


def quote(lines: list[str]) -> str:
    """Indent lines of a log or a traceback below the message that they belong to."""
    return "".join(f"\n  | {line}" for line in lines)


def describe(rank: int, error: BaseException, exit_code: int, said: bool) -> Failure:
    """Describe a failure of this process."""
    text = str(error) if said else f"{type(error).__name__}: {error}".split("\n")[0].rstrip(".")
    lost = isinstance(error, RankLost) or getattr(error, "told", False)
    consequence = lost or (not said and is_consequence(error))
    named = getattr(error, "rank", None)
    return Failure(rank, platform.node(), time.time(), exit_code, text, said, consequence, cause_of(error), named)


def is_consequence(error: BaseException) -> bool:
    """Return whether an error is one of connections between ranks, which break when another rank is lost."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, ConnectionToRankLost) or kinds & _CONNECTION_ERRORS:
        return True
    if "DistBackendError" in kinds:
        return bool(_NCCL_LOST.search(str(error)) or _GLOO.search(str(error)))
    return isinstance(error, RuntimeError) and bool(_GLOO.search(str(error)))


def leave_note(folder: Path, failure: Failure) -> None:
    """Write a failure to the folder of notes."""
    note = folder / f"failure-{failure.rank}.json"
    try:
        aside = note.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(asdict(failure)))
        aside.replace(note)
    except OSError:
        pass  # the exit code still shows the failure


def note_signal(number: int) -> None:
    """Write down, for the ranks of this launcher, which signal it forwards: they get SIGINT and SIGHUP as SIGTERM."""
    with contextlib.suppress(OSError, KeyError):
        (Path(os.environ[NOTES_VARIABLE]) / _SIGNAL_NOTE).write_text(signal.Signals(number).name)


def name_signal(number: int) -> str:
    """Return the name of a signal that this rank got; of one that its launcher forwards, what the launcher got."""
    with contextlib.suppress(OSError, KeyError):
        forwarded = (Path(os.environ[NOTES_VARIABLE]) / _SIGNAL_NOTE).read_text()
        if forwarded and number == signal.SIGTERM:
            return forwarded
    return signal.Signals(number).name


def read_notes(folder: Path) -> list[Failure]:
    """Read the failures that ranks have noted; for a damaged note, the exit code of its rank has to do."""
    found = []
    for note in sorted(folder.glob("failure-*.json")):
        with contextlib.suppress(OSError, ValueError):
            found.append(read_dataclass(note, Failure))
    return found


def from_exit_code(rank: int, exit_code: int) -> Failure:
    """Describe the failure of a rank that has written no note."""
    terminated = exit_code == -signal.SIGTERM  # this is how the agent ends the other ranks
    cause = Cause.RANK_LOST if exit_code < 0 else Cause.ERROR
    return Failure(rank, platform.node(), time.time(), 1, describe_exit(exit_code), False, terminated, cause)


def first_cause(noted: Sequence[Failure], unnoted: Sequence[Failure] = ()) -> Failure | None:
    """Return the failure that the others followed from: the first that is no consequence of another.

    A rank's own failure comes before the report that another rank is lost, whatever the clocks of their hosts show.
    A rank of which only the exit code is known comes last: the agent may have killed it.
    """
    causes = [(failure.consequence, False, failure.exit_code == RankLost.exit_code, failure) for failure in noted]
    causes += [(failure.consequence, True, False, failure) for failure in unnoted]
    return min(causes, key=lambda cause: (*cause[:3], cause[3].time))[3] if causes else None


def end_rank(rank: int, error: TuttiError, screen: int | None) -> None:
    """Write a note, write all stacks to this rank's log, and end this process at once."""
    notes = os.environ.get(NOTES_VARIABLE)
    if notes:
        noted = describe(rank, error, error.exit_code, said=True)
        leave_note(Path(notes), replace(noted, consequence=screen is None))
    elif screen is not None:
        with contextlib.suppress(OSError):
            os.write(screen, f"error: {error}\n".encode())
    with contextlib.suppress(Exception):
        faulthandler.dump_traceback(sys.stderr.fileno())
        sys.stdout.flush()
    os._exit(error.exit_code)
