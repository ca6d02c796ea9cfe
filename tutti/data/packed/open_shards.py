"""Open shards, read by position."""

import os
from collections.abc import Callable
from pathlib import Path

_MOST_OPEN = 256  # shards that a process keeps open


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
