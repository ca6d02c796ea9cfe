"""Files that are whole or not there: written aside, made durable, then moved into place."""

import os
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Replace a file's content so that a crash at any moment leaves the old or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(aside, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
