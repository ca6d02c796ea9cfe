"""metrics.jsonl: one line an event, appended as it happens, readable after a crash at any moment."""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tutti.records.files import write_durably


class LineLog:
    """Appends events as JSON lines; a disk that is full costs lines, never the run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "a", buffering=1)  # noqa: SIM115
        self._warned = False

    def write(self, event: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(event) + "\n")
        except OSError as error:
            if not self._warned:
                print(
                    f"warning: {self._path}: {error.strerror}; lines are lost until it can be written", file=sys.stderr
                )
                self._warned = True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file in order; a last line cut short by a crash is left out."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def trim_events(path: Path, last_step: int) -> None:
    """Drop what was written after a step, so that a resumed run continues the file without doubles."""
    if path.exists():
        kept = [event for event in read_events(path) if event.get("step", 0) <= last_step]
        write_durably(path, "".join(json.dumps(event) + "\n" for event in kept))
