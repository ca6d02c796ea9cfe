"""The coordinator's loop on rank 0, and the timeline of operations that rank 0 writes."""

import json
import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TextIO

from tutti.horovod.engine.coordinator import Coordinator
from tutti.horovod.engine.messages import GLOBAL_SET, Channel, ChannelClosed, Key, Response, TensorRequest
from tutti.horovod.errors import SHUT_DOWN
from tutti.horovod.settings import Settings

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

    def submitted(self, requests: Iterable[TensorRequest], rank: int) -> None:
        """A rank is ready for operations; the first one begins their negotiation."""
        with self._lock:
            for request in requests:
                self._begin(request, NEGOTIATION, f"NEGOTIATE_{request.kind.upper()}")
                self._event(self._row(request.key), NEGOTIATION, str(rank), "i", ',"s":"t"')

    def granted(self, requests: Iterable[TensorRequest]) -> None:
        """All ranks are ready, or the operation is refused."""
        with self._lock:
            for request in requests:
                self._end(request, NEGOTIATION, f"NEGOTIATE_{request.kind.upper()}")

    def began(self, requests: Iterable[TensorRequest]) -> None:
        """Rank 0 carries out operations."""
        with self._lock:
            for request in requests:
                self._begin(request, WORK, request.kind.upper())

    def ended(self, requests: Iterable[TensorRequest]) -> None:
        """Rank 0 is through with operations."""
        with self._lock:
            for request in requests:
                self._end(request, WORK, request.kind.upper())

    def cycle(self) -> None:
        """The coordinator has heard something."""
        if self._marks_cycles:
            with self._lock:
                self._event(0, 0, "CYCLE_START", "i", ',"s":"g"')

    def _begin(self, request: TensorRequest, track: int, what: str) -> None:
        if (request.key, track) not in self._open:
            self._open.add((request.key, track))
            arguments = json.dumps({"dtype": request.dtype, "shape": list(request.shape)})
            self._event(self._row(request.key), track, what, "B", f',"args":{arguments}')

    def _end(self, request: TensorRequest, track: int, what: str) -> None:
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


class Coordination:
    """A loop that ends with the job."""

    def __init__(
        self,
        size: int,
        sets: dict[int, tuple[int, ...]],
        channel: Channel,
        settings: Settings,
        timeline: Timeline,
        heartbeat_seconds: float,
        silence_seconds: float,
    ) -> None:
        self._size = size
        self._channel = channel
        self._settings = settings
        self._timeline = timeline
        self._heartbeat_seconds, self._silence_seconds = heartbeat_seconds, silence_seconds
        self._coordinator = Coordinator(size, sets, settings.fusion_bytes, settings.cache_capacity)
        self._told: set[int] = set()  # numbers of requests that all ranks concerned know
        self._waiting: set[int] = set()  # ranks that say now that somebody waits there
        self._lost: tuple[str, float] | None = None  # what first broke off on some rank, and when that was heard

    def run(self) -> None:
        """Answer until a rank leaves, or is gone; nobody must wait for ever, whatever happens here."""
        heard = dict.fromkeys(range(self._size), time.monotonic())
        told = time.monotonic()  # when all ranks last had a sign of life from here
        try:
            while True:
                error = self._hear(heard)
                if error:
                    self._answer_all([Response("shutdown", error=error)])
                    return
                self._grant()
                self._hurry()
                if time.monotonic() - told >= self._heartbeat_seconds:
                    self._answer_all([])
                    told = time.monotonic()
        except ChannelClosed:
            raise
        except Exception as error:
            log.exception("the coordinator of all ranks failed")
            self._answer_all([Response("shutdown", error=f"the coordinator failed: {error!r}. {SHUT_DOWN}")])

    def _hear(self, heard: dict[int, float]) -> str:
        """Take the next messages; why the job ends, if it does."""
        messages, now = self._channel.hear(), time.monotonic()
        if self._timeline.runs:
            self._timeline.cycle()
        for message in messages:
            heard[message.rank] = now
            self._coordinator.receive(message, now)
            if self._timeline.runs:
                self._timeline.submitted(self._coordinator.requests(message), message.rank)
        self._waiting = {message.rank for message in messages if message.waits}
        lost = next((message.lost for message in messages if message.lost), "")
        self._lost = self._lost or ((lost, now) if lost else None)
        left = any(message.leaves for message in messages)
        return SHUT_DOWN if left else self._watched(heard, now)

    def _grant(self) -> None:
        """Tell each rank what it can do now; a set that is removed gets its last answers."""
        before = dict(self._coordinator.sets)
        responses = self._coordinator.grants()
        if not responses:
            return
        if self._timeline.runs:
            for response in responses:
                self._timeline.granted(response.requests)
        sets = before | self._coordinator.sets
        short = [self._shortened(response) for response in responses]
        for rank in range(self._size):
            own = [response for response in short if rank in sets[response.process_set]]
            if own:
                self._channel.answer(rank, own)

    def _hurry(self) -> None:
        """Have ranks that somebody waits for tell what they have gathered."""
        for rank in self._coordinator.missing(self._waiting) if self._waiting else ():
            self._channel.answer(rank, [Response("hurry")])

    def _roll_call(self, what: str, since: float, heard: dict[int, float], now: float) -> str:
        """After an operation broke off: every rank that lives says something before long, and who does not is named."""
        silent = [rank for rank, last in heard.items() if last < since]
        if silent and now - since < 2 * self._heartbeat_seconds:
            return ""
        gone = (
            f" Rank {', '.join(map(str, silent))} has not been heard of since, and is taken for dead." if silent else ""
        )
        return f"{what}.{gone} {SHUT_DOWN}"

    def _shortened(self, response: Response) -> Response:
        """Without the requests, where all who get it know them by their numbers."""
        if response.error or not response.numbers or min(response.numbers) < 0:
            return response
        if self._told.issuperset(response.numbers):
            return replace(response, requests=())
        self._told.update(response.numbers)
        return response

    def _answer_all(self, responses: list[Response]) -> None:
        for rank in range(self._size):
            self._channel.answer(rank, responses)

    def _watched(self, heard: dict[int, float], now: float) -> str:
        """Warn of operations that some ranks never submit; an error when a rank is gone or a stall is too long."""
        if self._lost is not None:
            return self._roll_call(*self._lost, heard, now)
        silence = self._silence_seconds
        silent = [rank for rank, last in heard.items() if now - last > silence]
        if silent:
            ranks = ", ".join(map(str, silent))
            return f"rank {ranks} has not been heard of for {silence:g} s and is taken for dead. {SHUT_DOWN}"
        warning = self._settings.stall_warning_seconds
        if warning is None:
            return ""
        for line in self._coordinator.stalled(now, warning):
            log.warning(
                "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are "
                "waiting for remainder of ranks for more than %g seconds. %s",
                warning,
                line,
            )
        limit, oldest = self._settings.stall_shutdown_seconds, self._coordinator.oldest()
        if limit >= warning and oldest is not None and now - oldest > limit:
            return f"an operation has waited for more than {limit:g} s for some ranks. {SHUT_DOWN}"
        return ""
