"""A worker's membership in an elastic job: it requests ranks from the driver, and receives notices about the others."""

import atexit
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict

import torch.distributed as dist

from tutti.config.schema import RuntimeConfig
from tutti.horovod.engine.messages import Channel, HubChannel
from tutti.horovod.errors import HorovodInternalError
from tutti.horovod.run.messages import ADDRESS_VARIABLE, WORKER_VARIABLE, Assignment, Notice, RankRequest
from tutti.ranks.group import Group, join
from tutti.ranks.messages import Connection, connect
from tutti.ranks.placement import Placement
from tutti.ranks.secret import find_secret

LAUNCHER = "the elastic driver"
DRIVER_ENDED = "The elastic driver has ended; the job cannot continue without it."
_CONNECT_SECONDS = 60.0
_PING_SECONDS = 5.0  # between two questions whether the driver is there, while a worker waits for a rank
_SILENT_SECONDS = 60.0  # in which the driver answers one of them
_NOTICE_SECONDS = 10.0  # in which the driver knows why a rendezvous failed
_LAST_SECONDS = 1.0  # for a rendezvous that may have succeeded before a rank was lost

_membership: "Membership | None" = None


def is_driven() -> bool:
    """Return whether an elastic driver has started this process."""
    return ADDRESS_VARIABLE in os.environ


def membership() -> "Membership":
    """Return this process's membership; the first call connects to the driver."""
    global _membership
    if _membership is None:
        _membership = Membership(os.environ[ADDRESS_VARIABLE], int(os.environ[WORKER_VARIABLE]))
    return _membership


class Membership:
    """This worker's connection to the driver; a thread receives the assignments and notices."""

    def __init__(self, address: str, worker: int) -> None:
        self.worker = worker
        self.assignment = Assignment()
        self.has_state = False  # this worker holds the state that the training has reached
        self._requests = 0
        self._skip_sync = False
        self._own_interface = "GLOO_SOCKET_IFNAME" in os.environ
        self._address, _, port = address.rpartition(":")
        self._changed = threading.Condition()
        self._answer: Assignment | None = None
        self._driver_ended = False
        self._heard = time.monotonic()  # when the driver's last message came
        self._lost = Notice("lost")  # of the newest generation that has lost a worker
        self._hosts = Notice("hosts")
        self._channel: HubChannel | None = None
        self._connection = self._connect(int(port))
        self._receiver = threading.Thread(target=self._receive, name="hvd_membership", daemon=True)
        self._receiver.start()
        atexit.register(self._close)

    def join(self, runtime: RuntimeConfig) -> tuple[Placement, Group]:
        """Request a rank and join the ranks of its generation; repeat when one of them ends before all have joined."""
        while True:
            self.assignment = assignment = self._request()
            placement = self._placement(assignment)
            group = self._rendezvous(placement, runtime)
            if group is not None:
                return placement, group

    def watch(self, channel: Channel) -> None:
        """Have a job's channel interrupted as soon as the driver reports that one of its ranks is lost."""
        with self._changed:
            self._channel = channel if isinstance(channel, HubChannel) else None
            lost = self._lost if self._is_lost() else None
        if lost is not None:
            self._interrupt(lost.text + ".")

    def hosts_changed(self) -> Notice | None:
        """Return the driver's notice that hosts were added or removed since this generation began."""
        with self._changed:
            return self._hosts if self._hosts.generation == self.assignment.generation else None

    def wish_to_skip_sync(self, wish: bool) -> None:
        """State in the next request that all ranks hold the same state."""
        self._skip_sync = wish

    def _connect(self, port: int) -> Connection:
        try:
            connection = connect(self._address, port, find_secret(), _CONNECT_SECONDS, keep_alive=False)
        except OSError as error:
            raise HorovodInternalError(
                f"worker {self.worker} could not reach the elastic driver at {self._address}:{port} within "
                f"{_CONNECT_SECONDS:g} s: it has ended, or the network between the hosts is closed."
            ) from error
        connection.send("worker", worker=self.worker)
        return connection

    def _request(self) -> Assignment:
        """Wait for a rank as long as the driver is there: others may train for hours before ranks are given anew."""
        self._requests += 1
        request = RankRequest(self._requests, self.has_state, self._skip_sync)
        self._skip_sync = False
        self._connection.send("request", **asdict(request))
        self._heard = time.monotonic()
        while not self._wait_for_answer(_PING_SECONDS):
            if time.monotonic() - self._heard > _SILENT_SECONDS:
                raise HorovodInternalError(
                    f"The elastic driver has not answered worker {self.worker} for {_SILENT_SECONDS:g} s: it is "
                    "stopped, or its host is unreachable."
                )
            self._connection.send("ping")
        with self._changed:
            assignment = self._answer if self._is_answered() else None
        if assignment is None:
            raise HorovodInternalError(DRIVER_ENDED)
        if assignment.leave:
            print(f"worker {self.worker} leaves: {assignment.refusal}", file=sys.stderr, flush=True)
            raise SystemExit(0)
        if assignment.refusal:
            raise HorovodInternalError(
                f"The elastic driver gives no rank to worker {self.worker}: {assignment.refusal}"
            )
        return assignment

    def _wait_for_answer(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._driver_ended or self._is_answered(), seconds)

    def _is_answered(self) -> bool:
        return self._answer is not None and self._answer.request == self._requests

    def _placement(self, given: Assignment) -> Placement:
        """Set the variables of this rank, also for the processes that it starts; the store is the driver's."""
        os.environ |= {
            "HOROVOD_RANK": str(given.rank),
            "HOROVOD_SIZE": str(given.size),
            "HOROVOD_LOCAL_RANK": str(given.local_rank),
            "HOROVOD_LOCAL_SIZE": str(given.local_size),
            "HOROVOD_CROSS_RANK": str(given.node_rank),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(given.generation),  # the prefix of this generation's keys in the store
        }
        if not self._own_interface:  # it was chosen for the hosts of the last generation
            os.environ.pop("GLOO_SOCKET_IFNAME", None)
        numbers = given.rank, given.size, given.local_rank, given.local_size, given.node_rank
        return Placement(LAUNCHER, *numbers, given.store_address or self._address, given.store_port).checked()

    def _rendezvous(self, placement: Placement, runtime: RuntimeConfig) -> Group | None:
        """Return the group, or None when a rank of this generation is lost; a thread waits, which nothing can wake."""
        dist.distributed_c10d._world.group_count = 0  # part of a group's name; it differs after a failed rendezvous
        attempt = _RendezvousAttempt(placement, runtime, self._changed)
        with self._changed:
            self._changed.wait_for(lambda: attempt.ended or self._is_lost())
            if not attempt.ended:
                self._changed.wait_for(lambda: attempt.ended, _LAST_SECONDS)
            if attempt.group is not None:
                return attempt.group
            attempt.abandoned = True
            lost = attempt.error is None or self._changed.wait_for(self._is_lost, _NOTICE_SECONDS)
        close_group(whole=False)
        if not lost:
            raise HorovodInternalError(f"The rendezvous of the ranks failed: {attempt.error}") from attempt.error
        return None

    def _is_lost(self) -> bool:
        return self._lost.generation == self.assignment.generation

    def _receive(self) -> None:
        """Take in the driver's messages until it ends; the job then ends, too."""
        for message in self._connection.messages():
            kind = message.pop("kind", None)
            with self._changed:
                self._heard = time.monotonic()
                if kind == "assignment":
                    self._answer = Assignment(**message)
                elif kind == "notice":
                    self._note(Notice(**message))
                self._changed.notify_all()
                lost = self._lost if self._channel and self._is_lost() else None
            if lost is not None:
                self._interrupt(lost.text + ".")
        with self._changed:
            self._driver_ended = True
            self._changed.notify_all()
        self._interrupt(DRIVER_ENDED)

    def _note(self, notice: Notice) -> None:
        if notice.change == "hosts":
            self._hosts = notice
        else:
            self._lost = notice

    def _interrupt(self, why: str) -> None:
        with self._changed:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.interrupt(why)

    def _close(self) -> None:
        """End the thread before the interpreter ends."""
        self._connection.close()
        self._receiver.join(1.0)


class _RendezvousAttempt:
    """One rendezvous of all ranks of a generation, in a thread that may be abandoned."""

    def __init__(self, placement: Placement, runtime: RuntimeConfig, changed: threading.Condition) -> None:
        self.group: Group | None = None
        self.error: Exception | None = None
        self.ended = self.abandoned = False
        self._changed = changed
        threading.Thread(target=self._try, args=(placement, runtime), name="hvd_rendezvous", daemon=True).start()

    def _try(self, placement: Placement, runtime: RuntimeConfig) -> None:
        group, error, world = None, None, None
        try:
            group = join(placement, runtime)
            world = dist.group.WORLD
            group.barrier("hvd.init()", runtime.start_timeout_seconds)
        except Exception as problem:
            error = problem
        with self._changed:
            self.group, self.error, self.ended = None if error else group, error, True
            self._changed.notify_all()
            late = self.abandoned and world is not None and world is dist.group.WORLD
            unused = group if error or self.abandoned else None
        if late:
            close_group(whole=False)
        if unused is not None:
            unused.hub.close(0.0)


def close_group(whole: bool) -> None:
    """End torch's process group in this process; without waiting for the other ranks where some are lost."""
    if not dist.is_initialized():
        return
    hook = sys.excepthook
    # torch's hook names the rank of the last generation.
    if hook.__name__ == "_distributed_excepthook" and hook.__closure__:
        sys.excepthook = next(cell.cell_contents for cell in hook.__closure__ if callable(cell.cell_contents))
    world = dist.group.WORLD
    if not whole and world is not None:
        with suppress(Exception):
            world.abort()
    with suppress(Exception):
        dist.destroy_process_group()
