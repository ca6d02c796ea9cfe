"""A worker's line to the driver of an elastic job: it asks for its place, and hears what happens to the others."""

import atexit
import os
import sys
import threading
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from tutti.config.schema import RuntimeConfig
from tutti.horovod.engine.messages import Channel, ChannelClosed, StoreChannel
from tutti.horovod.errors import HorovodInternalError
from tutti.horovod.run.messages import ADDRESS_VARIABLE, ASKS, WORKER_VARIABLE, Ask, News, Place, news_key, place_key
from tutti.ranks.group import Group, join
from tutti.ranks.placement import Placement

LAUNCHER = "the elastic driver"
_CONNECT_SECONDS = 60.0
_FOR_EVER = timedelta(days=365)  # the driver answers when it can, and its end breaks the connection
_NEWS_SECONDS = 10.0  # in which the driver knows why ranks could not meet
_LAST_SECONDS = 1.0  # for a meeting that may have succeeded before a rank was lost

_membership: "Membership | None" = None


def is_driven() -> bool:
    """Whether an elastic driver has started this process."""
    return ADDRESS_VARIABLE in os.environ


def membership() -> "Membership":
    """This process's line to the driver, made when it is first needed."""
    global _membership
    if _membership is None:
        _membership = Membership(os.environ[ADDRESS_VARIABLE], int(os.environ[WORKER_VARIABLE]))
    return _membership


class Membership:
    """What this worker knows about its job; a thread of its own hears the news."""

    def __init__(self, address: str, worker: int) -> None:
        self.worker = worker
        self.place = Place()
        self.has_state = False  # the state here is what the training has come to
        self._asks = 0
        self._wishes_skip = False
        self._own_interface = "GLOO_SOCKET_IFNAME" in os.environ
        self._address, _, port = address.rpartition(":")
        self._port = int(port)
        self._store = self._connect()
        self._changed = threading.Condition()
        self._lost = News("lost")  # of the newest generation that was
        self._hosts = News("hosts")
        self._channel: StoreChannel | None = None
        self._listener = threading.Thread(target=self._listen, args=(self._connect(),), name="hvd_news", daemon=True)
        self._listener.start()
        atexit.register(self._stop)

    def join(self, runtime: RuntimeConfig) -> tuple[Placement, Group]:
        """Get a place from the driver and meet the ranks of its generation; once more when one of them dies first."""
        while True:
            self.place = place = self._ask()
            placement = self._placement(place)
            group = self._meet(placement, runtime)
            if group is not None:
                return placement, group

    def watch(self, channel: Channel) -> None:
        """Have a job's channel interrupted as soon as the driver says that one of its ranks is gone."""
        with self._changed:
            self._channel = channel if isinstance(channel, StoreChannel) else None
            lost = self._lost if self._lost.generation == self.place.generation else None
        if lost is not None:
            self._interrupt(lost)

    def hosts_changed(self) -> News | None:
        """The driver's word that hosts have come or gone since this generation began."""
        with self._changed:
            return self._hosts if self._hosts.generation == self.place.generation else None

    def wish_to_skip_sync(self, wish: bool) -> None:
        """Say with the next ask that all ranks have the same state."""
        self._wishes_skip = wish

    def _connect(self) -> dist.TCPStore:
        try:
            store = dist.TCPStore(
                self._address,
                self._port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=_CONNECT_SECONDS),
            )
        except dist.DistError as error:
            raise HorovodInternalError(
                f"worker {self.worker} could not reach the elastic driver at {self._address}:{self._port} within "
                f"{_CONNECT_SECONDS:g} s: it has ended, or the network between the hosts is closed."
            ) from error
        store.set_timeout(_FOR_EVER)
        return store

    def _ask(self) -> Place:
        self._asks += 1
        key = place_key(self.worker, self._asks)
        ask = Ask(self.worker, self._asks, self.has_state, self._wishes_skip)
        self._wishes_skip = False
        try:
            self._store.queue_push(ASKS, ask.encode())
            place = Place.decode(self._store.get(key))
        except dist.DistError as error:
            raise HorovodInternalError("The elastic driver has ended; the job cannot go on without it.") from error
        if place.leave:
            print(f"worker {self.worker} leaves: {place.refusal}", file=sys.stderr, flush=True)
            raise SystemExit(0)
        if place.refusal:
            raise HorovodInternalError(f"The elastic driver gives no place to worker {self.worker}: {place.refusal}")
        return place

    def _placement(self, place: Place) -> Placement:
        """The same, for this process and what it starts; the store is the driver's, with a prefix a generation."""
        os.environ |= {
            "HOROVOD_RANK": str(place.rank),
            "HOROVOD_SIZE": str(place.size),
            "HOROVOD_LOCAL_RANK": str(place.local_rank),
            "HOROVOD_LOCAL_SIZE": str(place.local_size),
            "HOROVOD_CROSS_RANK": str(place.node_rank),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(place.generation),
        }
        if not self._own_interface:  # it was chosen for the hosts of the last generation
            os.environ.pop("GLOO_SOCKET_IFNAME", None)
        numbers = place.rank, place.size, place.local_rank, place.local_size, place.node_rank
        return Placement(LAUNCHER, *numbers, self._address, self._port).checked()

    def _meet(self, placement: Placement, runtime: RuntimeConfig) -> Group | None:
        """The group; or None when a rank of this generation is gone. A thread waits, since it cannot be woken."""
        dist.distributed_c10d._world.group_count = 0  # a group's name; ranks that have failed to meet would be ahead
        attempt = _Attempt(placement, runtime, self._changed)
        with self._changed:
            self._changed.wait_for(lambda: attempt.ended or self._is_lost())
            if not attempt.ended:
                self._changed.wait_for(lambda: attempt.ended, _LAST_SECONDS)
            if attempt.group is not None:
                return attempt.group
            attempt.abandoned = True
            lost = attempt.error is None or self._changed.wait_for(self._is_lost, _NEWS_SECONDS)
        close_group(whole=False)
        if not lost:
            raise HorovodInternalError(f"The ranks could not meet: {attempt.error}") from attempt.error
        return None

    def _is_lost(self) -> bool:
        return self._lost.generation == self.place.generation

    def _listen(self, store: dist.Store) -> None:
        """The thread that hears the news."""
        while True:
            try:
                news = News.decode(store.queue_pop(news_key(self.worker), True))
            except RuntimeError:  # the driver is gone, and the channels of the job with its store
                return
            if news.kind == "end":
                return
            with self._changed:
                channel = None
                if news.kind == "hosts":
                    self._hosts = news
                else:
                    self._lost = news
                    channel = self._channel if self._is_lost() else None
                self._changed.notify_all()
            if channel is not None:
                self._interrupt(news)

    def _interrupt(self, news: News) -> None:
        with self._changed:
            channel, self._channel = self._channel, None
        if channel is not None:
            with suppress(ChannelClosed):
                channel.interrupt(f"{news.text}.")

    def _stop(self) -> None:
        """End the thread before the interpreter does."""
        with suppress(RuntimeError):
            self._store.set_timeout(timedelta(seconds=1))
            self._store.queue_push(news_key(self.worker), News("end").encode())
            self._listener.join(1.0)


class _Attempt:
    """One try to meet all ranks of a generation, in a thread that may be left behind."""

    def __init__(self, placement: Placement, runtime: RuntimeConfig, changed: threading.Condition) -> None:
        self.group: Group | None = None
        self.error: Exception | None = None
        self.ended = self.abandoned = False
        self._changed = changed
        threading.Thread(target=self._try, args=(placement, runtime), name="hvd_meet", daemon=True).start()

    def _try(self, placement: Placement, runtime: RuntimeConfig) -> None:
        group, error, world = None, None, None
        try:
            group = join(placement, runtime)
            world = dist.group.WORLD
            group.barrier("hvd.init()", runtime.start_timeout_seconds)
        except Exception as problem:
            group, error = None, problem
        with self._changed:
            self.group, self.error, self.ended = group, error, True
            self._changed.notify_all()
            late = self.abandoned and world is not None and world is dist.group.WORLD
        if late:
            close_group(whole=False)


def close_group(whole: bool) -> None:
    """End torch's process group here; without waiting for anybody where it is not whole."""
    if not dist.is_initialized():
        return
    hook = sys.excepthook
    if hook.__name__ == "_distributed_excepthook" and hook.__closure__:  # torch's, which names a rank that is no more
        sys.excepthook = next(cell.cell_contents for cell in hook.__closure__ if callable(cell.cell_contents))
    world = dist.group.WORLD
    if not whole and world is not None:
        with suppress(Exception):
            world.abort()
    with suppress(Exception):
        dist.destroy_process_group()
