"""The engine: operations are submitted from any thread, matched by name over ranks, and executed in one order."""

import itertools
import logging
import threading
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from tutti.horovod.engine.coordination import Coordination, Timeline
from tutti.horovod.engine.execute import Members, OperationTensors, abort, dissolve, execute, form, release
from tutti.horovod.engine.messages import (
    SET_CHANGES,
    UNNAMED,
    Channel,
    ChannelClosed,
    Key,
    Message,
    Response,
    TensorRequest,
)
from tutti.horovod.errors import SHUT_DOWN, HorovodInternalError
from tutti.horovod.settings import Settings

HEARTBEAT_SECONDS = 5.0
SILENCE_SECONDS = 22.0  # after which a rank without heartbeat is treated as dead, and soon after a coordinator
LEAVE_SECONDS = 5.0  # to wait for the other ranks at the end
HURRY_SECONDS, HURRY_AGAIN_SECONDS = 0.1, 0.5  # of waiting for a result, before other ranks must send at once

log = logging.getLogger("tutti.horovod")


@dataclass
class Pending:
    """An operation that was submitted and whose result has not been taken."""

    request: TensorRequest
    work: OperationTensors
    engine: "Engine"
    ready: torch.cuda.Event | None = None  # when the GPU has computed the input
    done: bool = False
    finished: torch.cuda.Event | None = None  # when the GPU has computed the output
    error: str = ""
    last_joined: int = -1
    set_number: int = -1
    given: Any = None  # the caller's own output tensor

    def result(self) -> OperationTensors:
        """Wait for the result; on a GPU the caller's stream waits, not the caller."""
        if not self.done:
            self.engine.wait_for(self)
        if self.error:
            raise HorovodInternalError(self.error)
        if self.finished is not None:
            torch.cuda.current_stream().wait_event(self.finished)
        return self.work


class Engine:
    """One rank's part of a job; `sets` holds the process sets by number.

    It has two threads, and a third on rank 0: one sends requests to the coordinator, one executes what is granted, and
    one is the coordinator. None of them polls.
    """

    def __init__(self, rank: int, size: int, channel: Channel, sets: dict[int, Members], settings: Settings) -> None:
        self.rank, self.size, self.sets = rank, size, sets
        self._channel = channel
        self._settings = settings
        self._table: dict[Key, Pending] = {}
        self._outbox: list[TensorRequest] = []
        self._gathered = 0  # bytes of the tensors in the outbox
        self._numbers: dict[TensorRequest, int] = {}
        self._requests: dict[int, TensorRequest] = {}  # by their numbers
        self._urgent = False  # the outbox must be sent now
        self._waits = False  # a thread of this rank waits, and the coordinator does not know
        self._awaited = False  # another rank waits for requests of this rank
        self._unnamed: dict[int, itertools.count[int]] = defaultdict(itertools.count)
        self._changed = threading.Condition()
        self._news = threading.Condition()  # some operations are done
        self._leaves = False
        self.failed = False  # connections broke here, of an operation or to the coordinator
        self._lost = ""  # the operation that failed here; the coordinator determines why
        self._ended = ""  # why no operation can be executed any more
        self._stream: torch.cuda.Stream | None = None
        self.timeline = Timeline()  # written on rank 0 only
        if settings.timeline and rank == 0:
            try:
                self.timeline.start(settings.timeline, settings.marks_cycles)
            except OSError as error:
                log.warning("HOROVOD_TIMELINE=%s: %s. There will be no timeline.", settings.timeline, error)
        work = [self._send_requests, self._execute_granted] + ([self._coordinate] if rank == 0 else [])
        self._threads = [threading.Thread(target=each, name=f"hvd{each.__name__}", daemon=True) for each in work]
        for thread in self._threads:
            thread.start()

    @property
    def fusion_bytes(self) -> int:
        """Return the maximum size of one message."""
        return self._settings.fusion_bytes

    def submit(self, *operations: tuple[TensorRequest, OperationTensors]) -> list[Pending]:
        """Submit operations together; a name that is already in flight is an error, and nothing is submitted then."""
        with self._changed:
            if self._ended:
                raise HorovodInternalError(self._ended)
            for request, _ in operations:
                if request.process_set not in self.sets:
                    raise ValueError(f"process set {request.process_set} has been removed.")
                if request.key in self._table:
                    raise ValueError(
                        f"Requested to {request.kind} a tensor with the same name as another tensor that is currently "
                        f"being processed: {request.name!r}. If you want to request another tensor, use a different "
                        "tensor name."
                    )
            pending = [Pending(request, work, self, _recorded(work)) for request, work in operations]
            is_first = not self._outbox
            for each in pending:
                self._table[each.request.key] = each
                self._outbox.append(each.request)
                self._gathered += each.work.tensor.nbytes
            if (
                is_first or self._gathered >= self._settings.gather_bytes
            ):  # otherwise the thread would wake up for nothing
                self._changed.notify()
        return pending

    def agree(self, request: TensorRequest) -> Pending:
        """Submit an operation without data, and wait for it."""
        (pending,) = self.submit((request, OperationTensors(torch.empty(0), None)))
        pending.result()
        return pending

    def hurry(self, others: bool = False) -> None:
        """Send the requests of this rank at once; with `others`, those of other ranks too."""
        with self._changed:
            if self._outbox or others:
                self._urgent, self._waits = True, self._waits or others
                self._changed.notify()

    def wait_for(self, pending: Pending) -> None:
        """Wait until an operation is done; if that takes long, make slower ranks send their requests at once."""
        self.hurry()
        seconds = HURRY_SECONDS
        while not self._is_done(pending, seconds):
            self.hurry(others=True)
            seconds = HURRY_AGAIN_SECONDS

    def _is_done(self, pending: Pending, seconds: float) -> bool:
        with self._news:
            return self._news.wait_for(lambda: pending.done, seconds)

    def _finish(self, operations: list[Pending], error: str = "") -> None:
        with self._news:
            for each in operations:
                each.error, each.done = error, True
            self._news.notify_all()

    def next_name(self, process_set: int) -> str:
        """Return a name for an operation without one, numbered in its process set."""
        return f"{UNNAMED}{next(self._unnamed[process_set])}"

    def shut_down(self) -> bool:
        """End the job for all ranks, fail pending operations, and return whether all threads have ended."""
        with self._changed:
            self._leaves = True
            self._changed.notify()
        for thread in self._threads:
            thread.join(
                2 * LEAVE_SECONDS
            )  # longer than it waits itself: a thread that returns during finalization aborts Python
        self.timeline.stop()
        ended = not any(thread.is_alive() for thread in self._threads)
        if ended:
            release()
        return ended

    # The thread that sends requests to the coordinator.

    def _send_requests(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._outbox or self._must_send(), HEARTBEAT_SECONDS)
                if self._outbox:  # more may follow, and one message for all of them is faster
                    short, long = self._settings.short_gather_seconds, self._settings.gather_seconds
                    self._changed.wait_for(self._must_send, short if self._awaited else long)
                if self._ended and (self._lost or not self.failed):
                    return
                requests, self._outbox, self._gathered = self._outbox, [], 0
                waits, self._waits, self._urgent = self._waits, False, False
                if waits:
                    self._awaited = False
                leaves, lost = self._leaves or (self.failed and not self._lost), self._lost
            numbers = [self._numbers.get(request, -1) for request in requests]  # once: another thread assigns numbers
            known = tuple(sorted(number for number in numbers if number >= 0))
            new = tuple(request for request, number in zip(requests, numbers, strict=True) if number < 0)
            try:
                self._channel.send(Message(self.rank, new, known, waits, lost, leaves))
            except ChannelClosed as error:
                self._lose(error)
                return
            if leaves:
                return

    def _must_send(self) -> bool:
        return bool(self._urgent or self._gathered >= self._settings.gather_bytes or self._leaves or self._ended)

    # The thread that executes what the coordinator grants.

    def _execute_granted(self) -> None:
        try:
            while not self._ended:
                for response in self._channel.responses(SILENCE_SECONDS + HEARTBEAT_SECONDS):
                    if response.kind == "shutdown":
                        self._end(response.error or SHUT_DOWN)
                    if self._ended:
                        break
                    if response.kind == "hurry":
                        self._send_now()
                    elif not self._lost:
                        self._do(response)
            self._channel.leave(self.size, LEAVE_SECONDS)
        except ChannelClosed as error:
            self._lose(error)
        except Exception as error:  # whatever it is, no rank may wait forever
            log.exception("the thread that executes operations failed")
            self.failed = True
            self._end(f"rank {self.rank} failed: {error!r}. {SHUT_DOWN}")

    def _send_now(self) -> None:
        with self._changed:
            self._awaited = True
            self._urgent = bool(self._outbox)
            self._changed.notify()

    def _do(self, response: Response) -> None:
        if response.numbers and not response.requests:
            response = replace(response, requests=tuple(self._requests[number] for number in response.numbers))
        with self._changed:
            pending = [self._table.pop(request.key, None) for request in response.requests]
        mine = [each for each in pending if each is not None]
        if response.error:
            self._finish(mine, response.error)
            return
        for request, number in zip(response.requests, response.numbers, strict=False):
            if number >= 0:
                self._numbers[request], self._requests[number] = number, request
        try:
            self._run(response, pending)
        except Exception as error:
            with suppress(Exception):  # the connections may be closed already
                abort(self.sets[response.process_set])
            with self._changed:  # it fails with the rest, once the coordinator knows which rank is dead
                self._table |= {each.request.key: each for each in mine}
                self._lost = f"{response.requests[0].key[1]} failed: {error}"
                self.failed = self._urgent = True
                self._changed.notify()
            return
        if response.kind == "join":
            self._unnamed.clear()  # ranks have submitted different numbers of operations
        for each in mine:
            each.last_joined, each.set_number = response.last_joined, response.set_number
        self._finish(mine)

    def _run(self, response: Response, pending: list[Pending | None]) -> None:
        if response.kind in SET_CHANGES:
            self._change_sets(response)
            return
        if not self.timeline.runs:
            self._compute(response, pending)
            return
        self.timeline.began(response.requests)
        self._compute(response, pending)
        if self._stream is not None:
            self._stream.synchronize()  # a timeline shows when the GPU executes, not when it is launched
        self.timeline.ended(response.requests)

    def _compute(self, response: Response, pending: list[Pending | None]) -> None:
        works = [each.work if each is not None else None for each in pending]
        members = self.sets[response.process_set]
        if not any(request.device == "cuda" for request in response.requests):
            execute(response, works, members)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            for each in pending:
                if each is not None and each.ready is not None:
                    self._stream.wait_event(each.ready)
            execute(response, works, members)
            finished = self._stream.record_event()
        for each in pending:
            if each is not None:
                each.finished = finished  # pyright: ignore[reportAttributeAccessIssue]

    def _change_sets(self, response: Response) -> None:
        """Add a process set, or remove one: its pending operations fail, and its requests lose their numbers."""
        number = response.set_number
        if response.kind == "add_set":
            self.sets[number] = form(response.requests[0].members, self.rank)
            return
        with self._changed:
            members = self.sets.pop(number)
            left = [self._table.pop(key) for key in list(self._table) if key[0] == number]
        for each in left:
            self._finish([each], f"{each.request.key[1]}: process set {number} has been removed.")
        self._requests = {own: request for own, request in self._requests.items() if request.process_set != number}
        self._numbers = {request: own for own, request in self._requests.items()}
        self._unnamed.pop(number, None)
        if self._stream is not None:
            self._stream.synchronize()
        dissolve(members)

    def _lose(self, error: ChannelClosed) -> None:
        if not self._ended:  # afterwards no message is expected
            self.failed = True
            self._end(f"rank 0, which coordinates all ranks, has ended or cannot be reached ({error}). {SHUT_DOWN}")

    def _end(self, why: str) -> None:
        self.timeline.stop()  # first: the file must be complete when others see the end
        with self._changed:
            self._ended = self._ended or why
            left, self._table = list(self._table.values()), {}
            self._changed.notify_all()
        self._finish(left, why)

    # The thread of the coordinator, on rank 0.

    def _coordinate(self) -> None:
        ranks = {number: members.ranks for number, members in self.sets.items()}
        pulse = HEARTBEAT_SECONDS, SILENCE_SECONDS
        try:
            Coordination(self.size, ranks, self._channel, self._settings, self.timeline, *pulse).run()
        except ChannelClosed as error:
            self._lose(error)


def _recorded(work: OperationTensors) -> torch.cuda.Event | None:
    return torch.cuda.current_stream().record_event() if work.tensor.is_cuda else None  # pyright: ignore[reportReturnType]
