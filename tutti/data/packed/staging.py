"""Shards on a disk of the host: copied once, in the background of the training, and read from there as they arrive."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import threading
import time
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from tutti import units
from tutti.data.packed.open_shards import OpenShards

Say = Callable[[str], None]
_CHUNK_BYTES = 8 << 20
_SPARE_BYTES = 64 << 20  # of the disk that stay free
_PROGRESS_SECONDS = 30.0
_DIGESTED = 4096  # records
_MOST_TRIES, _PAUSE_SECONDS = 100, 0.1
_END_SECONDS = 60.0  # for the chunk that is being copied when the run ends


class StagedShards:
    """The copies of a split's shards as a process reads them; every failure leads back to the source."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open = OpenShards(partial(_copy_path, folder))
        self._lost: set[int] = set()
        self._is_gone = False

    def __reduce__(self) -> tuple[type["StagedShards"], tuple[Path]]:
        return StagedShards, (self.folder,)

    def path(self, shard: int) -> Path:
        """The place of a shard's copy, which has its name only when it is complete."""
        return _copy_path(self.folder, shard)

    def read(self, shard: int, length: int, offset: int) -> bytes | None:
        """Read from a copy; None where it has not arrived or cannot be read."""
        if self._is_gone or shard in self._lost:
            return None
        try:
            content = self._open.read(shard, length, offset)
        except FileNotFoundError:
            if not self.folder.is_dir():
                self.give_up_all()
                _warn(f"{self.folder} is gone: all samples are read from the source")
            return None
        except OSError as error:
            self.give_up(shard, error.strerror or str(error))
            return None
        if len(content) < length:
            self.give_up(shard, "it is shorter than the source")
            return None
        return content

    def give_up_all(self) -> None:
        """Read everything from the source from now on."""
        self._is_gone = True

    def give_up(self, shard: int, reason: str) -> None:
        """Read a shard from the source from now on."""
        self._lost.add(shard)
        self._open.close(shard)
        _warn(f"{self.path(shard)} cannot be used ({reason}): its samples are read from the source")


class Stage:
    """The staging of a split by a rank; one process of each host copies, and the last one that ends removes."""

    def __init__(
        self,
        source: Callable[[int], Path],
        records: np.ndarray,
        sizes: dict[int, int],
        disk: str,
        name: str,
        keep: bool,
    ) -> None:
        last = int(records["shard"][-1]) if len(records) else -1
        self.shards: Sequence[int] = [shard for shard in sorted(sizes) if shard <= last]
        self._source, self._records, self._sizes, self._keep = source, records, sizes, keep
        self.disk = Path(os.path.expandvars(os.path.expanduser(disk)))
        self.staged = StagedShards(self.disk / f"tutti-data-{os.geteuid()}-{name}-{_digest(records, sizes)}")
        self._say: Say = _print
        self._pace: Callable[[int], None] = lambda size: None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._locks = contextlib.ExitStack()

    def begin(self, say: Say | None = None, pace: Callable[[int], None] | None = None) -> None:
        """Copy in the background, unless another process of this host does; `pace` is called before each chunk."""
        self._say, self._pace = say or self._say, pace or self._pace
        if "$" in str(self.disk) or not self.disk.is_absolute():
            return self._refuse("expected an absolute path, with variables that are set here")
        try:
            self._enter()
            if self.staged.folder.stat().st_uid != os.geteuid():
                return self._refuse(f"{self.staged.folder} belongs to another user")
            (self.staged.folder / "copying").touch(mode=0o600)
            if not self._lock(self.staged.folder / "copying", fcntl.LOCK_EX):
                return None  # another process of this host copies
        except OSError as error:
            return self._refuse(error.strerror or str(error))
        self._thread = threading.Thread(target=self._copy_all, name="staging", daemon=True)
        return self._thread.start()

    def join(self, seconds: float | None = None) -> bool:
        """Wait until this process has nothing left to copy; return whether that is so."""
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def end(self, complete: bool) -> None:
        """Stop copying; at the end of a complete run, the last process of the host removes the copies."""
        self._stop.set()
        if not self.join(_END_SECONDS):  # a file system that does not answer; the thread ends with the process
            self._say(
                f"data: a copy into {self.staged.folder} has not ended in {_END_SECONDS:g} s: the copies stay there. "
                "Look at the disk, and remove the folder."
            )
            return
        self._locks.close()
        folder = self.staged.folder
        if self._keep or not complete or not folder.is_dir():
            return
        with contextlib.suppress(OSError):
            if self._lock(folder, fcntl.LOCK_EX):
                shutil.rmtree(folder, ignore_errors=True)
        self._locks.close()

    def _enter(self) -> None:
        """Make the folder and hold it, so that no process removes it; one that just does has removed it soon."""
        for _ in range(_MOST_TRIES):
            self.staged.folder.mkdir(mode=0o700, exist_ok=True)
            if self._lock(self.staged.folder, fcntl.LOCK_SH):
                return
            time.sleep(_PAUSE_SECONDS)
        raise OSError(f"another process has locked {self.staged.folder}")

    def _lock(self, path: Path, kind: int) -> bool:
        """Take a lock until `end`, without waiting; return whether it was free."""
        handle = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        except BaseException:
            os.close(handle)
            raise
        self._locks.callback(_unlock, handle)
        return path.exists() and path.samefile(f"/proc/self/fd/{handle}")

    def _refuse(self, reason: str) -> None:
        self.staged.give_up_all()  # there is none, or it is not to be used
        self._say(f"data: no shards are staged in {self.disk} ({reason}): all samples are read from the source")

    def _copy_all(self) -> None:
        found = [shard for shard in self.shards if self._has(shard)]
        missing = [shard for shard in self.shards if shard not in set(found)]
        begin = told = time.monotonic()
        done = 0
        for number, shard in enumerate(missing):
            try:
                self._check_space(shard)
                self._copy(shard)
            except OSError as error:
                left = units.count(len(missing) - number, "shard")
                self._say(
                    f"data: {left} cannot be staged in {self.staged.folder} ({error.strerror or error}): their samples "
                    "are read from the source"
                )
                return
            if self._stop.is_set():
                return
            done += self._sizes[shard]
            if time.monotonic() - told > _PROGRESS_SECONDS:
                told = time.monotonic()
                self._say(f"data: {len(found) + number + 1:,} of {len(self.shards):,} shards are staged")
        seconds = time.monotonic() - begin
        copied = f"{units.count(len(missing), 'shard')} ({units.size(done)}) copied in {units.duration(seconds)}"
        self._say(f"data: all shards are staged in {self.staged.folder}: {copied}, {len(found):,} found there")

    def _has(self, shard: int) -> bool:
        try:
            return self.staged.path(shard).stat().st_size == self._sizes[shard]
        except OSError:
            return False

    def _check_space(self, shard: int) -> None:
        free = shutil.disk_usage(self.staged.folder).free
        if free < self._sizes[shard] + _SPARE_BYTES:
            raise OSError(f"{units.size(free)} are free there, the next one needs {units.size(self._sizes[shard])}")

    def _copy(self, shard: int) -> None:
        """Copy a shard, twice if its samples have wrong checksums, and give it its name."""
        part = self.staged.path(shard).with_suffix(".part")
        try:
            for _ in range(2):
                for _ in self._chunks(shard, part):
                    if self._stop.is_set():
                        return
                if self._is_right(shard, part):
                    os.replace(part, self.staged.path(shard))
                    return
            self._say(f"data: {self._source(shard)} has wrong checksums: it is not staged")
        finally:
            part.unlink(missing_ok=True)

    def _chunks(self, shard: int, part: Path) -> Iterator[int]:
        """Copy chunk by chunk; yields the bytes of each."""
        with open(self._source(shard), "rb") as source, open(part, "wb", opener=_open_private) as copy:
            while chunk := source.read(_CHUNK_BYTES):
                self._pace(len(chunk))
                copy.write(chunk)
                yield len(chunk)

    def _is_right(self, shard: int, path: Path) -> bool:
        first, end = (bisect_left(self._records, value, key=_shard_of) for value in (shard, shard + 1))
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size != self._sizes[shard]:
                return False
            return all(
                zlib.crc32(os.pread(file.fileno(), int(record["length"]), int(record["offset"]))) == record["checksum"]
                for record in self._records[first:end]
            )


def _copy_path(folder: Path, shard: int) -> Path:
    return folder / f"{shard:05d}.tar"


def _shard_of(record: np.void) -> int:
    return int(record["shard"])


def _digest(records: np.ndarray, sizes: dict[int, int]) -> str:
    """A digest of an index by some of its records, so that its time does not grow with the samples."""
    some = records[:: max(1, len(records) // _DIGESTED)].tobytes()
    return hashlib.blake2b(some + repr((len(records), sorted(sizes.items()))).encode()).hexdigest()[:16]


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _unlock(handle: int) -> None:
    """Release a lock, which forked processes have inherited."""
    fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def _print(text: str) -> None:
    print(text, flush=True)


def _warn(text: str) -> None:
    print(f"warning: data: {text}", file=sys.stderr, flush=True)
