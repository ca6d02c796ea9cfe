"""The run folder: one place for everything a run leaves, with locks: one process trains in it.

The owner of a folder holds a lock of the system (flock) on owner.json, which names it, and sets the file's time every
two seconds. A lock of the system ends with its process. Some file systems do not share it between hosts, and some have
none: an owner on another host is therefore taken for dead only if the time of the file does not change while it is
watched for ten seconds, whatever the clocks of the hosts show.
"""

import contextlib
import errno
import fcntl
import json
import os
import platform
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from string import ascii_uppercase

from tutti.errors import FolderError
from tutti.runs.files import parse_json, to_dataclass, write_durably
from tutti.runs.record import now

WATCH_SECONDS = 10.0  # how long an owner on another host is watched for a heartbeat
_BEAT_SECONDS = 2.0
_TRY_SECONDS = 1.0  # a process that ends may hold its lock a moment longer
_LOCK_SECONDS = 30.0  # job.json is changed in milliseconds
_POLL_SECONDS = 0.05
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


MOST_RANK_LOGS = 256  # with more ranks there is one log for each node


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

    @property
    def script_runs(self) -> Path:
        """The folders of the runs that a script has in others, a line each; this one has the logs of its ranks."""
        return self.path / "runs.txt"

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def shared_log(self, rank: int, world_size: int, node_rank: int) -> tuple[Path, str]:
        """The log of a rank and the prefix of its lines there: of a large job, ranks of a node share one.

        File systems of clusters do not bear thousands of files that are created at once.
        """
        if rank == 0 or world_size <= MOST_RANK_LOGS:
            return self.log(rank), ""
        return self.logs / f"node-{node_rank}.log", f"[rank {rank}] "

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


def note_script_run(launched: RunFolder, folder: RunFolder) -> None:
    """Note in the folder that a launcher has made for a script that a run of the script is in another."""
    if launched.path.resolve() != folder.path.resolve():
        with contextlib.suppress(OSError), open(launched.script_runs, "a") as file:
            file.write(f"{folder.path}\n")


def read_script_runs(launched: RunFolder) -> list[RunFolder]:
    """The folders that were noted, each once, in the order of their runs."""
    with contextlib.suppress(OSError):
        return [RunFolder(Path(line)) for line in dict.fromkeys(launched.script_runs.read_text().splitlines())]
    return []


def remove_folder(folder: RunFolder) -> None:
    """Leave nothing of a run that never began: its folder, and those above it that are empty."""
    shutil.rmtree(folder.path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.removedirs(folder.path.parent)


def check_writable(out: str, option: str = "out=FOLDER") -> None:
    """Refuse a place for run folders that cannot be written, before anything starts; `option` gives another one."""
    path, given = Path(out), f"{option.rstrip(ascii_uppercase)}{out!r}"
    fix = f"Choose another place with {option}."
    while not path.exists() and path != path.parent:
        path = path.parent
    if not path.is_dir():
        raise FolderError(f"{given}: {path} is not a folder. {fix}")
    if not os.access(path, os.W_OK | os.X_OK):
        raise FolderError(f"{given}: {path} cannot be written by this user. {fix}")
    try:  # a read-only file system passes the test above for root
        probe = path / f".tutti-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise FolderError(f"{given}: {path} cannot be written: {error.strerror}. {fix}") from error


def write_config(folder: RunFolder, recipe: str) -> None:
    """Keep the resolved configuration, a recipe that is ready to run again."""
    write_durably(folder.config, f"# Run again: tutti train {folder.config}\n{recipe}")


@dataclass(frozen=True)
class Owner:
    """The process that trains in a run folder."""

    host: str
    process: int
    process_start: str | None  # in the kernel's ticks, which tells it from a later process of the same number
    since: str


@contextlib.contextmanager
def owned(folder: RunFolder, watch_seconds: float = WATCH_SECONDS) -> Iterator[None]:
    """Hold a run folder as its one owner, or raise an error that names the process that does."""
    path = folder.path / "owner.json"
    handle = _take(path, watch_seconds)
    over = threading.Event()
    beats = threading.Thread(target=_beat, args=(handle, over), name="folder owner", daemon=True)
    beats.start()
    try:
        yield
    finally:
        over.set()
        beats.join(_TRY_SECONDS)
        with contextlib.suppress(OSError):
            if _names(path, handle):
                path.unlink()
            fcntl.flock(handle, fcntl.LOCK_UN)  # forked children have a copy of the handle
        os.close(handle)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock for a moment; a process that holds it too long is an error, never a silent wait."""
    handle = _open(path)
    try:
        is_ours = _lock(handle, _LOCK_SECONDS)
        if is_ours is None:
            with _made_alone(path.with_name(f"{path.name}.held")):
                yield
            return
        if not is_ours:
            raise FolderError(f"{path} is locked by another process for more than {_LOCK_SECONDS:g} s. End it.")
        yield
    finally:
        os.close(handle)


def _take(path: Path, watch_seconds: float) -> int:
    """Lock the file and write this process into it; returns the handle that holds the lock."""
    while True:
        handle = _open(path)
        try:
            is_ours = _lock(handle, _TRY_SECONDS)
            owner = _read(handle)
            if is_ours is False or (owner and _is_alive(owner, path, is_ours, watch_seconds)):
                raise _in_use(path, owner)
            if _names(path, handle):  # the owner before may just have removed the file
                _write(handle, path)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise FolderError(f"{path} cannot be written: {error.strerror}. Check who may write to the folder.") from error


def _lock(handle: int, seconds: float) -> bool | None:
    """Whether the lock of the system was taken; None where the file system has none."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)


def _is_alive(owner: Owner, path: Path, is_locked: bool | None, watch_seconds: float) -> bool:
    """Whether the process that a file names still trains, where this process could lock the file."""
    if owner.host == platform.node():
        return is_locked is None and _process_start(owner.process) == owner.process_start is not None
    first, deadline = _time_of(path), time.monotonic() + watch_seconds
    while time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        if _time_of(path) != first:
            return True
    return False


def _in_use(path: Path, owner: Owner | None) -> FolderError:
    who = f"process {owner.process} on host {owner.host}, since {owner.since}" if owner else "another process"
    return FolderError(
        f"{path.parent} is in use by {who}: expected a folder in which no other process trains. "
        "Wait until that process has ended, or end it there."
    )


def _read(handle: int) -> Owner | None:
    try:
        return to_dataclass(parse_json(os.pread(handle, 4096, 0)), Owner)
    except (OSError, ValueError):
        return None


def _write(handle: int, path: Path) -> None:
    owner = Owner(platform.node(), os.getpid(), _process_start(os.getpid()), now())
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(asdict(owner)).encode() + b"\n", 0)
        os.fsync(handle)
    except OSError as error:
        raise FolderError(
            f"{path} cannot be written: {error.strerror}. Free space, or choose another folder."
        ) from error


def _names(path: Path, handle: int) -> bool:
    """Whether a path still names an open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except OSError:
        return False


def _time_of(path: Path) -> int:
    """The time of a file as its server has it: network file systems look again when a file is opened."""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return 0


def _beat(handle: int, over: threading.Event) -> None:
    while not over.wait(_BEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(handle)


def _process_start(process: int) -> str | None:
    """When a process of this host was started; None where there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


@contextlib.contextmanager
def _made_alone(path: Path) -> Iterator[None]:
    """Hold a lock by making a file, which only one process can, where the file system has no other locks."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o644))
            break
        except FileExistsError:
            if time.monotonic() > deadline:
                raise FolderError(
                    f"{path} is there for more than {_LOCK_SECONDS:g} s: the process that made it has ended or hangs. "
                    "Remove the file if no process of tutti changes this folder."
                ) from None
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
