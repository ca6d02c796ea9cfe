"""Event files for TensorBoard, written without torch or TensorFlow."""

import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

# By this name tensorboard is told to pass over a TensorFlow that is installed; importing that takes seconds.
sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # noqa: E402 # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: E402 # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: E402

_NOT_CURVES = {"event", "step", "epoch", "time", "ranks", "batch"}


class TensorBoardLog:
    """Writes every number of an event as a curve over steps; what a run wrote after `resumed_after` is given up."""

    def __init__(self, folder: Path, resumed_after: int | None = None) -> None:
        self._writer = EventFileWriter(str(folder))
        if resumed_after is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=resumed_after + 1, session_log=start))

    def write(self, event: dict[str, Any]) -> None:
        values = [
            Summary.Value(tag=tag, simple_value=number)
            for key, number in event.items()
            if key not in _NOT_CURVES and isinstance(number, int | float)
            for tag in [_tag(key)]
        ]
        self._writer.add_event(Event(wall_time=event["time"], step=event["step"], summary=Summary(value=values)))

    def commit(self) -> list[str]:
        return []

    def close(self, ended: str = "finished") -> list[str]:
        self._writer.close()
        return []


def _tag(key: str) -> str:
    """`train_loss` and `valid_loss` become `train/loss` and `valid/loss`."""
    for split in ("train", "valid"):
        if key.startswith(f"{split}_"):
            return f"{split}/{key.removeprefix(f'{split}_')}"
    return f"step/{key}"
