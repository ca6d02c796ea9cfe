"""torchrun's agent supervises the ranks of one host in one round of an elastic job.

The first launcher of the job decides which ranks a round has, so that torchrun's own rendezvous is replaced by one that
returns this decision; agents of several hosts exchange nothing. Every round has a store for its ranks in that launcher,
so that any rank may fail. The ranks of a job that is not elastic are those of its only round; their store listens at
the loopback address of their host.
"""

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from tutti.launch.elastic.slots import RankEnd, RoundShare
from tutti.launch.hosts import LOOPBACK
from tutti.ranks.failures import NOTES_VARIABLE, Failure, from_exit_code, read_notes
from tutti.ranks.messages import listen
from tutti.ranks.process import send_signal

_POLL_SECONDS = 0.1
_SOON_SECONDS = 5  # the agent kills ranks that ignore SIGTERM later than this after the first failure

_BACKEND = "tutti"


def silence_torch() -> None:
    """Keep the messages of torchrun's agent off the screen, where the first cause is reported once."""
    parents = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
    # Some of its modules set a level of their own, which that of their parent does not change.
    for name in (*parents, *(each for each in logging.root.manager.loggerDict if each.startswith(parents))):
        logging.getLogger(name).setLevel(logging.CRITICAL)


silence_torch()


class Agent:
    """The ranks of this host in one round, supervised in a thread."""

    def __init__(
        self, share: RoundShare, address: str, arguments: list[str], at_end: Callable[[list[RankEnd]], None]
    ) -> None:
        self._rendezvous = _DecidedRendezvous(share, address, self._terminate_if_asked)
        self._arguments = arguments
        self._share = share
        self._at_end = at_end
        self._asked = threading.Event()
        self._terminated = self._killed = False
        self._agent: LocalElasticAgent | None = None
        self._thread = threading.Thread(target=self._run, name="agent", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Have the ranks save and end."""
        self._asked.set()

    def kill(self) -> None:
        """End the ranks at once."""
        self._asked.set()
        self._killed = True
        self._signal(signal.SIGKILL)

    def wait(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)

    def _run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="tutti-agent-") as notes:
            self._at_end(self._supervise(Path(notes)))

    def _supervise(self, notes: Path) -> list[RankEnd]:
        os.environ[NOTES_VARIABLE] = str(notes)
        spec = WorkerSpec(
            role="rank",
            local_world_size=self._share.ranks,
            rdzv_handler=self._rendezvous,
            entrypoint=sys.executable,
            args=("-u", *self._arguments),
            max_restarts=0,
            monitor_interval=_POLL_SECONDS,
        )
        logs = DefaultLogsSpecs(log_dir=str(notes))
        self._agent = agent = _RoundAgent(self._share, spec, logs)
        try:
            result: RunResult | None = agent.run()  # pyright: ignore[reportAssignmentType]
        except Exception as error:
            return [
                RankEnd(replace(from_exit_code(0, 1), text=f"{type(error).__name__}: {error}", consequence=True), False)
            ]
        finally:
            self._agent = None  # the ids of its processes may be reused
        return _explain(result.failures if result else {}, read_notes(notes), self._killed)

    def _terminate_if_asked(self) -> None:
        if self._asked.is_set() and not self._terminated:
            self._terminated = True
            self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        agent = self._agent
        ranks = agent.get_worker_group().workers if agent else ()
        send_signal((rank.id for rank in ranks if rank.id is not None), number)


def _explain(failures: dict[int, ProcessFailure], notes: list[Failure], killed_by_us: bool) -> list[RankEnd]:
    """Describe each rank that failed: by its note, otherwise by its exit code."""
    noted = {note.rank: note for note in notes}
    first = min((failure.timestamp for failure in failures.values()), default=0)
    ended = [RankEnd(note, False) for note in notes]
    for rank, failure in failures.items():
        if rank not in noted:
            soon = failure.timestamp - first < _SOON_SECONDS and not killed_by_us
            killed = failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM and soon
            of_signal = failure.exitcode in (128 + signal.SIGINT, 128 + signal.SIGTERM)
            found = from_exit_code(rank, failure.exitcode)
            ended.append(
                RankEnd(replace(found, consequence=found.consequence or of_signal or not (soon or killed)), killed)
            )
    return ended


class _RoundAgent(LocalElasticAgent):
    """torchrun's agent with ranks that are already decided, and nothing to exchange with the agents of other hosts."""

    def __init__(self, share: RoundShare, spec: WorkerSpec, logs: DefaultLogsSpecs) -> None:
        super().__init__(spec, logs)
        self._share = share

    def _assign_worker_ranks(self, *_: Any) -> list[Worker]:
        first, size = self._share.first_rank, self._share.world_size
        return [Worker(n, first + n, first + n, size, size) for n in range(self._share.ranks)]

    def _exit_barrier(self) -> None:
        """Do not wait for the other hosts: the first launcher does."""


class _DecidedRendezvous(RendezvousHandler):
    """Returns the agent's part in a round that is already decided."""

    def __init__(self, share: RoundShare, address: str, at_poll: Callable[[], None]) -> None:
        self._share = share
        self._address = address
        self._at_poll = at_poll
        self._started = False
        self.store: TCPStore | None = None  # of the round, where this process holds it

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return _BACKEND

    def get_run_id(self) -> str:
        return f"round-{self._share.round}"

    def next_rendezvous(self) -> RendezvousInfo:
        if self._started:
            raise RendezvousGracefulExitError("a round has one start")
        self._started = True
        where = RendezvousStoreInfo(self._address, self._share.port)
        return RendezvousInfo(HashStore(), self._share.host, self._share.hosts, where)

    def num_nodes_waiting(self) -> int:
        """Return 0: new hosts wait for the next round. The agent calls this whenever it polls the ranks."""
        self._at_poll()
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


def register_rendezvous() -> str:
    """Have torchrun's agent use a decided rendezvous of this host alone; return the name by which it is chosen."""
    rendezvous_handler_registry.register(_BACKEND, _only_round)
    return _BACKEND


def _only_round(_: RendezvousParameters) -> RendezvousHandler:
    store = hold_store(LOOPBACK)
    # The agent is torchrun's own, which computes the ranks of one host by itself.
    share = RoundShare(round=0, first_rank=0, ranks=0, world_size=0, host=0, hosts=1, port=store.port)
    handler = _DecidedRendezvous(share, LOOPBACK, lambda: None)
    handler.store = store
    return handler


def hold_store(address: str) -> TCPStore:
    """Hold a store of ranks in this process, at any port of an address, or of all where that is ""."""
    listener = listen(0, address)
    port = listener.getsockname()[1]
    return TCPStore(
        address or LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
