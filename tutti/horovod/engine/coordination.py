"""The coordinator at work on rank 0: it hears the ranks, watches over them, and answers."""

import logging
import time
from dataclasses import replace

from tutti.horovod.engine.channel import Channel, ChannelClosed
from tutti.horovod.engine.coordinator import Coordinator
from tutti.horovod.engine.messages import Response
from tutti.horovod.engine.timeline import Timeline
from tutti.horovod.errors import SHUT_DOWN
from tutti.horovod.settings import Settings

log = logging.getLogger("tutti.horovod")


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
