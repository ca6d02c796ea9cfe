"""Event files for TensorBoard, written without torch or TensorFlow, and a folder of links to them with short names."""

import contextlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tutti.runs.listing import list_folders, name_runs

# By this name tensorboard is told to pass over a TensorFlow that is installed; importing that takes seconds.
sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))

from tensorboard.compat.proto.event_pb2 import Event  # noqa: E402 # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: E402 # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: E402

_NOT_CURVES = {"event", "step", "epoch", "time", "ranks"}


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


FOLDER = ".board"


def find_events(out: Path) -> dict[str, Path]:
    """By short name, the folders of events of the runs below a folder."""
    found = name_runs(folder for folder in list_folders(out) if folder.tensorboard.is_dir())
    return {name: folder.tensorboard for name, folder in found.items()}


def link_events(board: Path, events: dict[str, Path]) -> None:
    """Have the board hold a link for each run and no other; links that are right already stay untouched."""
    board.mkdir(exist_ok=True)
    wanted = {board / name: folder for name, folder in events.items()}
    for link in _links(board):
        if link not in wanted:
            link.unlink(missing_ok=True)
    for link, folder in wanted.items():
        target = os.path.relpath(folder.resolve(), link.parent.resolve())
        if link.is_symlink():
            if os.readlink(link) == target:
                continue
            link.unlink()
        link.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another board has just made it
            link.symlink_to(target, target_is_directory=True)


def _links(board: Path) -> list[Path]:
    return [path for path in board.rglob("*") if path.is_symlink()]
