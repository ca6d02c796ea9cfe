"""The coordinator's loop on rank 0, and the timeline of operations that rank 0 writes."""

import json
import logging
import math
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from io import FileIO

from tutti.horovod.engine.coordinator import Coordinator
from tutti.horovod.engine.messages import GLOBAL_SET, Channel, ChannelClosed, Key, Response, TensorRequest
from tutti.horovod.errors import SHUT_DOWN
from tutti.horovod.settings import Settings

FLUSH_SECONDS = 1.0
NEGOTIATION, WORK = 0, 1  # tracks of a row: other ranks may submit again while rank 0 still executes

log = logging.getLogger("tutti.horovod")


class Timeline:
    """A file of events, one row for each tensor, for Perfetto or chrome://tracing. Any thread may call it.

    A thread writes new events every second. After each write the file is complete JSON, also if the process is killed.
    """

    def __init__(self) -> None:
        self.runs = False
        self._lock = threading.Lock()
        self._file: FileIO | None = None
        self._written = 0  # bytes of events in the file
        self._events: list[str] = []  # that are not in the file yet
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._marks_cycles = False
        self._rows: dict[Key, int] = {}
        self._open: set[tuple[Key, int]] = set()  # tracks with an event that has not ended

    def start(self, path: str, marks_cycles: bool) -> None:
        """Start a file, and close the one that is being written."""
        self.stop()
        with self._lock:
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115
            self._written, self._events = 0, []
            self._rows, self._open, self._marks_cycles = {}, set(), marks_cycles
            began = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
            self._events.append(json.dumps({"name": "job", "ph": "M", "pid": 0, "tid": 0, "args": began}))
            self._name_row(0, "cycles")
            self._write()
            self.runs = self._file is not None
            self._stopped, own = threading.Event(), {"name": "hvd_timeline", "daemon": True}
            self._thread = threading.Thread(target=self._write_regularly, args=(self._stopped,), **own)
            self._thread.start()

    def stop(self) -> None:
        """Write the last events and close the file, if there is one."""
        with self._lock:
            self._stopped.set()
            self._write()
            self._close()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()  # before the interpreter ends

    def _write_regularly(self, stopped: threading.Event) -> None:
        while not stopped.wait(FLUSH_SECONDS):
            with self._lock:
                if not stopped.is_set():
                    self._write()

    def _write(self) -> None:
        """Append the new events, and the bracket that closes the list, over the bracket of the last write."""
        if self._file is None or not self._events:
            return
        content = ((",\n" if self._written else "[\n") + ",\n".join(self._events)).encode()
        self._events = []
        left = memoryview(content + b"\n]\n")
        try:
            self._file.seek(self._written)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            log.warning("the timeline is incomplete: %s", error)
            self._close()
        self._written += len(content)

    def _close(self) -> None:
        self.runs = False
        ended, self._file = self._file, None
        with suppress(OSError):
            if ended is not None:
                ended.close()

    def submitted(self, requests: Iterable[TensorRequest], rank: int) -> None:
        """Record that a rank submitted operations; the first rank starts their negotiation."""
        with self._lock:
            for request in requests:
                self._begin(request, NEGOTIATION, f"NEGOTIATE_{request.kind.upper()}")
                self._event(self._row(request.key), NEGOTIATION, str(rank), "i", ',"s":"t"')

    def granted(self, requests: Iterable[TensorRequest]) -> None:
        """Record that operations were granted or refused."""
        with self._lock:
            for request in requests:
                self._end(request, NEGOTIATION, f"NEGOTIATE_{request.kind.upper()}")

    def began(self, requests: Iterable[TensorRequest]) -> None:
        """Record that rank 0 starts to execute operations."""
        with self._lock:
            for request in requests:
                self._begin(request, WORK, request.kind.upper())

    def ended(self, requests: Iterable[TensorRequest]) -> None:
        """Record that rank 0 has executed operations."""
        with self._lock:
            for request in requests:
                self._end(request, WORK, request.kind.upper())

    def cycle(self) -> None:
        """Record that the coordinator has received messages."""
        if self._marks_cycles:
            with self._lock:
                self._event(0, 0, "CYCLE_START", "i", ',"s":"g"')

    def _begin(self, request: TensorRequest, track: int, what: str) -> None:
        if (request.key, track) not in self._open:
            self._open.add((request.key, track))
            arguments = json.dumps({"dtype": request.dtype, "shape": list(request.shape)})
            self._event(self._row(request.key), track, what, "B", f',"args":{arguments}')

    def _end(self, request: TensorRequest, track: int, what: str) -> None:
        if (request.key, track) in self._open:  # otherwise it began before the file
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
        """Record an event; the names of events need no quoting."""
        if self._file is not None:
            now = time.monotonic() * 1e6
            self._events.append(f'{{"name":"{name}","ph":"{phase}","ts":{now:.1f},"pid":{row},"tid":{track}{rest}}}')


class Coordination:
    """Receives the messages of ranks, detects ranks that do not respond, and sends responses until the job ends."""

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
        self._known_to_ranks: set[int] = set()  # numbers of requests that all ranks of the set know
        self._waiting: set[int] = set()  # ranks that wait for a result, by their last messages
        self._lost: tuple[str, float] | None = (
            None  # the first operation that failed on a rank, and when that was received
        )

    def run(self) -> None:
        """Respond until a rank leaves or is lost; no rank may wait forever, whatever happens here."""
        received = dict.fromkeys(range(self._size), time.monotonic())
        last_heartbeat = time.monotonic()  # when the last heartbeat was sent to all ranks
        try:
            while True:
                error = self._receive(received)
                if error:
                    self._respond_to_all([Response("shutdown", error=error)])
                    return
                self._grant()
                self._hurry()
                if time.monotonic() - last_heartbeat >= self._heartbeat_seconds:
                    self._respond_to_all([])
                    last_heartbeat = time.monotonic()
        except ChannelClosed:
            raise
        except Exception as error:
            log.exception("the coordinator of all ranks failed")
            self._respond_to_all([Response("shutdown", error=f"the coordinator failed: {error!r}. {SHUT_DOWN}")])

    def _receive(self, received: dict[int, float]) -> str:
        """Receive the next messages, and return why the job ends, or an empty string."""
        messages, now = self._channel.receive(), time.monotonic()
        if self._timeline.runs:
            self._timeline.cycle()
        for message in messages:
            received[message.rank] = -math.inf if message.gone else now
            self._coordinator.receive(message, now)
            if self._timeline.runs:
                self._timeline.submitted(self._coordinator.requests(message), message.rank)
        self._waiting = {message.rank for message in messages if message.waits}
        lost = next((message.lost for message in messages if message.lost), "")
        self._lost = self._lost or ((lost, now) if lost else None)
        left = any(message.leaves for message in messages)
        return SHUT_DOWN if left else self._problem(received, now)

    def _grant(self) -> None:
        """Send each rank the operations it can execute now; a set that is removed gets its last responses."""
        before = dict(self._coordinator.sets)
        responses = self._coordinator.grants()
        if not responses:
            return
        if self._timeline.runs:
            for response in responses:
                self._timeline.granted(response.requests)
        sets = before | self._coordinator.sets
        short = [self._shortened(response) for response in responses]
        for ranks, own in _by_ranks(self._size, short, [sets[response.process_set] for response in short]):
            self._channel.respond(ranks, own)

    def _hurry(self) -> None:
        """Make ranks that others wait for send the requests they have collected."""
        missing = self._coordinator.missing(self._waiting) if self._waiting else ()
        if missing:
            self._channel.respond(sorted(missing), [Response("hurry")])

    def _describe_loss(self, what: str, since: float, received: dict[int, float], now: float) -> str:
        """Describe why an operation failed, and name the ranks that have sent no heartbeat since as dead."""
        silent = [rank for rank, last in received.items() if last < since]
        unsure = any(received[rank] > -math.inf for rank in silent)
        if unsure and now - since < 2 * self._heartbeat_seconds:
            return ""
        gone = f" Rank {', '.join(map(str, silent))} has not responded since, and is treated as dead." if silent else ""
        return f"{what}.{gone} {SHUT_DOWN}"

    def _shortened(self, response: Response) -> Response:
        """Return a response without its requests, if all ranks that receive it know their numbers."""
        if response.error or not response.numbers or min(response.numbers) < 0:
            return response
        if self._known_to_ranks.issuperset(response.numbers):
            return replace(response, requests=())
        self._known_to_ranks.update(response.numbers)
        return response

    def _respond_to_all(self, responses: list[Response]) -> None:
        self._channel.respond(range(self._size), responses)

    def _problem(self, received: dict[int, float], now: float) -> str:
        """Warn of operations that some ranks do not submit; return an error for a dead rank or a long stall."""
        if self._lost is not None:
            return self._describe_loss(*self._lost, received, now)
        silence = self._silence_seconds
        silent = [rank for rank, last in received.items() if now - last > silence]
        if silent:
            gone = all(received[rank] == -math.inf for rank in silent)
            how = "since its connection was closed" if gone else f"for {silence:g} s"
            ranks = ", ".join(map(str, silent))
            return f"rank {ranks} has not responded {how} and is treated as dead. {SHUT_DOWN}"
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


def _by_ranks(
    size: int, responses: list[Response], members: list[tuple[int, ...]]
) -> Iterable[tuple[list[int], list[Response]]]:
    """Return which ranks get which responses; ranks that get the same are told together."""
    if all(len(ranks) == size for ranks in members):
        return [(list(range(size)), responses)]
    told: dict[tuple[int, ...], list[int]] = {}
    for rank in range(size):
        own = tuple(place for place, ranks in enumerate(members) if rank in ranks)
        told.setdefault(own, []).append(rank)
    return [(ranks, [responses[place] for place in own]) for own, ranks in told.items() if own]
