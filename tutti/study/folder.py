"""Creates the folder of a study with the configuration of every point, finds it again, and locks it."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from tutti.errors import FolderError
from tutti.runs.folder import check_writable, write_config
from tutti.study.checking import Checked
from tutti.study.definition import Definition, Kind, Mode, StudyFolder, write_definition

STUDIES = "studies"


_LOCK = ".lock"


def make_study(out: str, name: str, definition: Definition, checked: Sequence[Checked]) -> StudyFolder:
    """Creates `out/studies/NAME/DATE_TIME_KIND` with the run folder of each point; study.json is written last."""
    check_writable(out)
    stamp = f"{datetime.now():%Y-%m-%d_%H%M%S}_{_kind_words(definition.kind, definition.mode)}"
    folder = _create(Path(out) / STUDIES / name, stamp)
    try:
        for each in checked:
            run = folder.run(each.point.id)
            for path in (run.path, run.logs, run.checkpoints):
                path.mkdir(parents=True)
            write_config(run, each.config.as_yaml())
        write_definition(folder, definition)
    except BaseException:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    return folder


def planned_study(out: str, name: str, kind: Kind, mode: Mode | None) -> StudyFolder:
    """Returns the path of a future study, with a placeholder for its date."""
    return StudyFolder(Path(out) / STUDIES / name / f"DATE_TIME_{_kind_words(kind, mode)}")


def find_study(given: str, kind: Kind, out: str) -> StudyFolder:
    """Returns the study that `--resume` names: a folder, or `latest`."""
    if given != "latest":
        return StudyFolder(Path(given))
    found = sorted(Path(out, STUDIES).rglob(f"*_{kind}*/study.json"), key=lambda path: path.parent.name)
    if not found:
        raise FolderError(
            f"--resume: there is no study of tutti {kind} in {Path(out, STUDIES)}. Give the folder of one, "
            "or the folder of all runs with --out."
        )
    return StudyFolder(found[-1].parent)


@contextlib.contextmanager
def lock_study(folder: StudyFolder) -> Iterator[None]:
    """Raises FolderError if another process runs the study; the kernel releases the lock when this process ends."""
    handle = os.open(folder.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderError(
                f"the study in {folder.path} is run by another process. Wait for its end, or end it first."
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def clear_run(folder: StudyFolder, point: str) -> None:
    """Deletes everything in a run folder except the configuration."""
    run = folder.run(point)
    for path in run.path.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path != run.config:
            path.unlink()
    run.logs.mkdir()
    run.checkpoints.mkdir()


def _kind_words(kind: Kind, mode: Mode | None) -> str:
    return f"{kind}_{mode}" if mode else kind


def _create(parent: Path, stamp: str) -> StudyFolder:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            path = parent / (stamp if number == 1 else f"{stamp}-{number}")
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return StudyFolder(path)
    except OSError as error:
        raise FolderError(
            f"study folder {error.filename or parent}: cannot be written: {error.strerror}. "
            "Choose another place with --out FOLDER."
        ) from error
    raise FolderError(f"{parent} already holds a thousand studies of this second.")
