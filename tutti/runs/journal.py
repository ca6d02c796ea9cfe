"""Everything told about a run while it goes on, to all who listen: metrics.jsonl, TensorBoard, the screen."""

import time
from pathlib import Path
from typing import Any

from tutti.runs.folder import RunFolder
from tutti.runs.metrics import LineLog, trim_events
from tutti.runs.screen import Screen


class Journal:
    """Rank 0's writers; on other ranks there are none, and telling costs nothing."""

    def __init__(self, folder: RunFolder, screen: Screen | None, tensorboard: bool) -> None:
        self._screen = screen
        self._writers: list[Any] = []
        if screen:
            self._writers = [LineLog(folder.metrics), screen]
            if tensorboard:
                from tutti.runs.tensorboard import TensorBoardLog

                self._writers.append(TensorBoardLog(folder.tensorboard))

    def write(self, event: str, **values: Any) -> None:
        """Tell an event: `start` before the first step, `step` every log window, `epoch` after validation."""
        line = {"event": event, **values, "time": time.time()}
        for writer in self._writers:
            writer.write(line)

    def say(self, text: str) -> None:
        """A line for people."""
        if self._screen:
            self._screen.say(text)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def rewind(folder: RunFolder, step: int) -> None:
    """Take back what was told after a step that the run goes on from."""
    for path in (folder.metrics, *_ledgers(folder)):
        trim_events(path, step)


def _ledgers(folder: RunFolder) -> list[Path]:
    return sorted(folder.logs.glob("ledger-*.jsonl"))
