"""When each tensor was submitted by which rank, and worked on: a file of rank 0 for Perfetto or chrome://tracing."""

import json
import logging
import threading
import time
from collections.abc import Iterable
from typing import TextIO

from tutti.horovod.engine.messages import GLOBAL_SET, Key, Request

FLUSH_SECONDS = 1.0
NEGOTIATION, WORK = 0, 1  # tracks of a row: other ranks may be ready again while rank 0 is still at work

log = logging.getLogger("tutti.horovod")


class Timeline:
    """A file of events, one row for each tensor; nothing is noted while it does not run. Any thread may call."""

    def __init__(self) -> None:
        self.runs = False
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        self._marks_cycles = False
        self._rows: dict[Key, int] = {}
        self._open: set[tuple[Key, int]] = set()  # tracks on which something has begun and not ended
        self._flushed = 0.0

    def start(self, path: str, marks_cycles: bool) -> None:
        """Begin a file; one that is being written is ended."""
        self.stop()
        with self._lock:
            self._file = open(path, "w")  # noqa: SIM115
            self._rows, self._open, self._marks_cycles = {}, set(), marks_cycles
            began = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
            self._file.write("[\n" + json.dumps({"name": "job", "ph": "M", "pid": 0, "tid": 0, "args": began}))
            self._name_row(0, "cycles")
            self._flushed = time.monotonic()
            self.runs = True

    def stop(self) -> None:
        """End the file, if there is one."""
        with self._lock:
            self.runs = False
            ended, self._file = self._file, None
            try:
                if ended is not None:
                    ended.write("\n]\n")
                    ended.close()
            except OSError as error:
                log.warning("the timeline could not be written to its end: %s", error)

    def submitted(self, requests: Iterable[Request], rank: int) -> None:
        """A rank is ready for operations; the first one begins their negotiation."""
        with self._lock:
            for request in requests:
                self._begin(request, NEGOTIATION, f"NEGOTIATE_{request.kind.upper()}")
                self._event(self._row(request.key), NEGOTIATION, str(rank), "i", ',"s":"t"')

    def granted(self, requests: Iterable[Request]) -> None:
        """All ranks are ready, or the operation is refused."""
        with self._lock:
            for request in requests:
                self._end(request, NEGOTIATION, f"NEGOTIATE_{request.kind.upper()}")

    def began(self, requests: Iterable[Request]) -> None:
        """Rank 0 carries out operations."""
        with self._lock:
            for request in requests:
                self._begin(request, WORK, request.kind.upper())

    def ended(self, requests: Iterable[Request]) -> None:
        """Rank 0 is through with operations."""
        with self._lock:
            for request in requests:
                self._end(request, WORK, request.kind.upper())

    def cycle(self) -> None:
        """The coordinator has heard something."""
        if self._marks_cycles:
            with self._lock:
                self._event(0, 0, "CYCLE_START", "i", ',"s":"g"')

    def _begin(self, request: Request, track: int, what: str) -> None:
        if (request.key, track) not in self._open:
            self._open.add((request.key, track))
            arguments = json.dumps({"dtype": request.dtype, "shape": list(request.shape)})
            self._event(self._row(request.key), track, what, "B", f',"args":{arguments}')

    def _end(self, request: Request, track: int, what: str) -> None:
        if (request.key, track) in self._open:  # else it began before the file
            self._open.remove((request.key, track))
            self._event(self._row(request.key), track, what, "E", "")

    def _row(self, key: Key) -> int:
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = len(self._rows) + 1
            self._name_row(row, key[1] if key[0] == GLOBAL_SET else f"{key[1]} of process set {key[0]}")
        return row

    def _name_row(self, row: int, name: str) -> None:
        self._event(row, 0, "process_name", "M", f',"args":{json.dumps({"name": name})}')
        self._event(row, 0, "process_sort_index", "M", f',"args":{{"sort_index":{row}}}')

    def _event(self, row: int, track: int, name: str, phase: str, rest: str) -> None:
        """Names of events need no quoting: they are ours."""
        if self._file is None:
            return
        now = time.monotonic()
        try:
            self._file.write(
                f',\n{{"name":"{name}","ph":"{phase}","ts":{now * 1e6:.1f},"pid":{row},"tid":{track}{rest}}}'
            )
            if now - self._flushed > FLUSH_SECONDS:  # what a killed process leaves is readable to the last second
                self._flushed = now
                self._file.flush()
        except OSError as error:
            log.warning("the timeline ends here: %s", error)
            self._file, self.runs = None, False
