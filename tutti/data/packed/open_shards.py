"""Open shards, read by position, and ahead of their use in sequence."""

import mmap
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

_MOST_OPEN = 256  # shards that a process keeps open
_CHUNK_BYTES = 1 << 20
_PAUSE_SECONDS = 0.002
_MOST_SECONDS = 60.0  # that a reader waits for a sample

Range = tuple[int, int, int]  # a shard, and the positions of the first byte and of the one after the last


class OpenShards:
    """Shards that are opened at their first read; pread has no position, so that forked processes may share them."""

    def __init__(self, path: Callable[[int], Path]) -> None:
        self._path = path
        self._handles: dict[int, int] = {}

    def read(self, shard: int, length: int, offset: int) -> bytes:
        """Reads at a position of a shard; the end of the file may be nearer."""
        return os.pread(self._open(shard), length, offset)

    def close(self, shard: int) -> None:
        """Closes a shard if it is open."""
        handle = self._handles.pop(shard, None)
        if handle is not None:
            os.close(handle)

    def _open(self, shard: int) -> int:
        if shard not in self._handles:
            handle = os.open(self._path(shard), os.O_RDONLY)
            if len(self._handles) >= _MOST_OPEN:
                self.close(next(iter(self._handles)))
            self._handles[shard] = handle
        return self._handles[shard]

    def __del__(self) -> None:
        for handle in getattr(self, "_handles", {}).values():
            os.close(handle)


class ReadAhead:
    """Ranges of shards that a thread of this process reads in sequence, so that they are in the page cache.

    Processes that were forked from this one see how far it is, and wait for it: a read of theirs would make the disk
    seek, and take longer.
    """

    def __init__(self, path: Callable[[int], Path], shards: int) -> None:
        self._path = path
        places = memoryview(mmap.mmap(-1, 16 * max(shards, 1))).cast("q")
        self._ends, self._places = places[:shards], places[shards:]  # of each shard: to be read, and read
        self._ranges: queue.SimpleQueue[Range | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, shard: int, begin: int, end: int) -> None:
        """Has the thread read a range after those before it."""
        self._places[shard] = begin
        self._ends[shard] = end
        self._ranges.put((shard, begin, end))
        if self._thread is None:
            given = (self._path, self._ranges, self._places, self._closed)
            self._thread = threading.Thread(target=_read_ranges, args=given, name="read ahead", daemon=True)
            self._thread.start()
            weakref.finalize(self, _close, self._closed, self._ranges)

    def wait(self, shard: int, end: int) -> None:
        """Waits until a shard has been read up to a position, if that is to come."""
        if self._is_read(shard, end):
            return
        until = time.monotonic() + _MOST_SECONDS
        while not self._is_read(shard, end) and time.monotonic() < until:
            time.sleep(_PAUSE_SECONDS)

    def _is_read(self, shard: int, end: int) -> bool:
        return self._places[shard] >= min(end, self._ends[shard])


def _close(closed: threading.Event, ranges: "queue.SimpleQueue[Range | None]") -> None:
    closed.set()
    ranges.put(None)


def _read_ranges(
    path: Callable[[int], Path],
    ranges: "queue.SimpleQueue[Range | None]",
    places: memoryview,
    closed: threading.Event,
) -> None:
    """Reads ranges until the end, and notes how far it is."""
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    while (wanted := ranges.get()) is not None:
        shard, place, end = wanted
        try:
            handle = os.open(path(shard), os.O_RDONLY)
            try:
                while place < end and not closed.is_set():
                    count = os.preadv(handle, [buffer[: end - place]], place)
                    if not count:
                        break
                    place += count
                    places[shard] = place
            finally:
                os.close(handle)
        except OSError:
            pass  # whoever reads the sample reports it
        places[shard] = end
