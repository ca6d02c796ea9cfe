"""The run folder: one place for everything a run leaves."""

import contextlib
import os
import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tutti.errors import FolderError
from tutti.runs.files import write_durably


@dataclass(frozen=True)
class RunFolder:
    """The paths inside a run folder."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def record(self) -> Path:
        return self.path / "record.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def curves(self) -> Path:
        return self.path / "curves.png"

    @property
    def job(self) -> Path:
        return self.path / "job.json"

    @property
    def job_script(self) -> Path:
        return self.path / "job.sh"

    @property
    def study(self) -> Path:
        """The definition of the study whose point it is; of other runs there is none."""
        return self.path.parent.parent / "study.json"

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def ledger(self, rank: int) -> Path:
        return self.logs / f"ledger-{rank}.jsonl"


def create_folder(out: str, name: str, ranks: int) -> RunFolder:
    """Make `out/name/DATE_TIME_nRANKS`; a second run in the same second gets a number of its own."""
    stamp = f"{datetime.now():%Y-%m-%d_%H%M%S}_n{ranks}"
    parent = Path(out) / name
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            path = parent / (stamp if number == 1 else f"{stamp}-{number}")
            try:
                path.mkdir()
                break
            except FileExistsError:
                continue
        else:
            raise FolderError(f"{parent} already holds a thousand runs of this second.")
        (path / "logs").mkdir()
        (path / "checkpoints").mkdir()
    except OSError as error:
        raise FolderError(
            f"run folder {error.filename or parent}: cannot be written: {error.strerror}. "
            "Choose another place with out=FOLDER."
        ) from error
    return RunFolder(path)


def remove_folder(folder: RunFolder) -> None:
    """Leave nothing of a run that never began: its folder, and those above it that are empty."""
    shutil.rmtree(folder.path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.removedirs(folder.path.parent)


def check_writable(out: str) -> None:
    """Refuse a place for run folders that cannot be written, before anything starts."""
    path = Path(out)
    while not path.exists() and path != path.parent:
        path = path.parent
    if not path.is_dir():
        raise FolderError(f"out={out!r}: {path} is not a folder. Choose another place with out=FOLDER.")
    if not os.access(path, os.W_OK | os.X_OK):
        raise FolderError(f"out={out!r}: {path} cannot be written by this user. Choose another place with out=FOLDER.")
    try:  # a read-only file system passes the test above for root
        probe = path / f".tutti-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise FolderError(
            f"out={out!r}: {path} cannot be written: {error.strerror}. Choose another place with out=FOLDER."
        ) from error


def write_config(folder: RunFolder, recipe: str) -> None:
    """Keep the resolved configuration, a recipe that is ready to run again."""
    write_durably(folder.config, f"# Run again: tutti train {folder.config}\n{recipe}")
