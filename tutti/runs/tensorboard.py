"""Event files for TensorBoard, written without torch or TensorFlow."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

# By this name tensorboard is told to pass over a TensorFlow that is installed; importing that takes seconds.
sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))

from tensorboard.compat.proto.event_pb2 import Event  # noqa: E402 # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: E402 # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: E402

_NOT_CURVES = {"event", "step", "epoch", "time", "ranks", "batch"}


class TensorBoardLog:
    """Writes every number of an event as a curve over steps."""

    def __init__(self, folder: Path) -> None:
        self._writer = EventFileWriter(str(folder))

    def write(self, event: dict[str, Any]) -> None:
        values = [
            Summary.Value(tag=tag, simple_value=number)
            for key, number in event.items()
            if key not in _NOT_CURVES and isinstance(number, int | float)
            for tag in [_tag(key)]
        ]
        self._writer.add_event(Event(wall_time=event["time"], step=event["step"], summary=Summary(value=values)))

    def close(self) -> None:
        self._writer.close()


def _tag(key: str) -> str:
    """`train_loss` and `valid_loss` become `train/loss` and `valid/loss`."""
    for split in ("train", "valid"):
        if key.startswith(f"{split}_"):
            return f"{split}/{key.removeprefix(f'{split}_')}"
    return f"step/{key}"
