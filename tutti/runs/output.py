"""What the ranks print: every rank into its log, in large jobs that of its node; rank 0 on the screen as well.

What C libraries print on rank 0 goes to the screen alone: sending it to both would take the terminal from Python.
"""

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO


class Tee(io.TextIOBase):
    """A stream that writes to the screen and to a log, or to one of them.

    A log that cannot be written is passed over, and so is a screen whose reader has left, as `head` does, or that is a
    file on a full disk.
    """

    def __init__(self, screen: TextIO | None, log: TextIO | None, prefix: str = "") -> None:
        self.screen = screen
        self.log = log
        self._prefix = prefix  # of every line in the log
        self._begins_line = True

    def write(self, text: str) -> int:
        if self.screen:
            with self._whoever_reads(self.screen):
                self.screen.write(text)
        if self.log:
            with contextlib.suppress(OSError):
                self.log.write(self._marked(text) if self._prefix else text)
        return len(text)

    def _marked(self, text: str) -> str:
        lines = text.splitlines(keepends=True)
        begin = [self._begins_line, *(True for _ in lines[1:])]
        self._begins_line = text.endswith("\n") if text else self._begins_line
        return "".join(self._prefix + line if begins else line for begins, line in zip(begin, lines, strict=False))

    def flush(self) -> None:
        if self.screen:
            with self._whoever_reads(self.screen):
                self.screen.flush()
        if self.log:
            with contextlib.suppress(OSError):
                self.log.flush()

    @contextlib.contextmanager
    def _whoever_reads(self, screen: TextIO) -> Iterator[None]:
        """Have the descriptor of a screen lead nowhere when it cannot be written: its buffer is written at the exit."""
        try:
            yield
        except OSError:
            with open(os.devnull, "w") as nowhere, contextlib.suppress(OSError):
                os.dup2(nowhere.fileno(), screen.fileno())

    @property
    def _first(self) -> TextIO:
        first = self.screen or self.log
        assert first is not None
        return first

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._first.encoding

    @property
    def buffer(self) -> BinaryIO:
        """For scripts that write bytes; those pass the log by on rank 0."""
        return self._first.buffer

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self.screen is not None and self.screen.isatty()

    def fileno(self) -> int:
        return self._first.fileno()


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Have this process go on when nobody reads its output any more."""
    stdout = sys.stdout
    sys.stdout = Tee(stdout, None)
    try:
        yield
    finally:
        sys.stdout = stdout


@contextlib.contextmanager
def captured_output(path: Path, on_screen: bool, prefix: str = "") -> Iterator[None]:
    """Send this process's output to its log, and for rank 0 to the screen as well.

    Several processes may write to one log: lines of Python get a prefix then, and are appended whole.
    """
    own_log = getattr(sys.stdout, "log", None)
    if own_log is not None and own_log.name == str(path):  # since the script began
        yield
        return
    log = open(path, "a", buffering=1)  # noqa: SIM115
    stdout, stderr = sys.stdout, sys.stderr
    stdout.flush()
    stderr.flush()
    saved = os.dup(1), os.dup(2)
    if on_screen:
        sys.stdout, sys.stderr = Tee(stdout, log), Tee(stderr, log)
    else:
        os.dup2(log.fileno(), 1)  # what C++ prints goes there too
        os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = Tee(None, log, prefix)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = stdout, stderr
        for target, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, target)
            os.close(copy)
        with contextlib.suppress(OSError):
            log.close()


def log_traceback() -> None:
    """The error that is being handled, into this rank's log only: the screen shows the first cause, once."""
    stream = sys.stderr.log if isinstance(sys.stderr, Tee) else sys.stderr
    with contextlib.suppress(OSError):
        traceback.print_exc(file=stream)


def last_lines(path: Path, count: int = 40) -> list[str]:
    """The end of a log, for a message about the rank that wrote it."""
    try:
        return path.read_text(errors="replace").splitlines()[-count:]
    except OSError:
        return []
