"""How a rank ends when its main thread cannot: with word to its launcher or on the screen, and an exit code."""

import contextlib
import faulthandler
import os
import platform
import sys
import time
from pathlib import Path

from tutti.launch.failure import Failure, leave_note
from tutti.launch.local import NOTES_VARIABLE


def end_rank(rank: int, text: str, exit_code: int, screen: int | None) -> None:
    """Leave word, write all stacks to this rank's log, and end this process at once."""
    notes = os.environ.get(NOTES_VARIABLE)
    if notes:
        leave_note(Path(notes), Failure(rank, platform.node(), time.time(), exit_code, text, True, screen is None))
    elif screen is not None:
        with contextlib.suppress(OSError):
            os.write(screen, f"error: {text}\n".encode())
    with contextlib.suppress(Exception):
        faulthandler.dump_traceback(sys.stderr.fileno())
        sys.stdout.flush()
    os._exit(exit_code)
