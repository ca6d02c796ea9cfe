"""A folder in which TensorBoard finds runs under short names: links to where their events are written."""

import contextlib
import os
from pathlib import Path

from tutti.records.names import list_folders, name_runs

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
