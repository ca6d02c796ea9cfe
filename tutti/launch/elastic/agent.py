"""torchrun's agent keeps the ranks of one host through one round of an elastic job.

Which ranks a round has is decided by the first launcher of the job, so that in the place of torchrun's own rendezvous
there is one that hands over what was decided. Every round has a store of its own in that launcher, so that any rank may
die.
"""

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from tutti.launch.supervisor import send_signal
from tutti.ranks.failures import NOTES_VARIABLE, Failure, from_exit_code, read_notes

_STORE_SECONDS = 60.0
_EXIT_SECONDS = 60.0  # how long hosts wait for each other when their ranks are done
_POLL_SECONDS = 0.1
_SOON_SECONDS = 5  # the agent itself kills ranks that do not heed it, later than this after the first failure

logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what happened is told once, at the end


@dataclass(frozen=True)
class Share:
    """What one host does in a round."""

    round: int
    ranks: int  # on this host
    host: int  # its place among the hosts of the round
    hosts: int
    port: int  # of the round's store in the first launcher


@dataclass(frozen=True)
class Ended:
    """How a rank that did not complete its work has ended."""

    failure: Failure
    killed: bool  # by a signal that was not the agent's

    def as_content(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_content(cls, content: dict[str, Any]) -> "Ended":
        return cls(Failure(**content["failure"]), content["killed"])


class Agent:
    """The ranks of this host in one round; they run in a thread of their own."""

    def __init__(self, share: Share, address: str, arguments: list[str], at_end: Callable[[list[Ended]], None]) -> None:
        self._meeting = _Meeting(share, address, self._stop_if_asked)
        self._arguments = arguments
        self._share = share
        self._at_end = at_end
        self._asked = threading.Event()
        self._told = self._kills = False
        self._agent: LocalElasticAgent | None = None
        self._thread = threading.Thread(target=self._run, name="agent", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Have the ranks save and end."""
        self._asked.set()

    def kill(self) -> None:
        """End the ranks at once."""
        self._asked.set()
        self._kills = True
        self._signal(signal.SIGKILL)

    def wait(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)

    def _run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="tutti-agent-") as notes:
            self._at_end(self._keep_ranks(Path(notes)))

    def _keep_ranks(self, notes: Path) -> list[Ended]:
        os.environ[NOTES_VARIABLE] = str(notes)
        spec = WorkerSpec(
            role="rank",
            local_world_size=self._share.ranks,
            rdzv_handler=self._meeting,
            entrypoint=sys.executable,
            args=("-u", *self._arguments),
            max_restarts=0,
            monitor_interval=_POLL_SECONDS,
        )
        logs = DefaultLogsSpecs(log_dir=str(notes))
        self._agent = agent = LocalElasticAgent(spec, logs, exit_barrier_timeout=_EXIT_SECONDS)
        try:
            result: RunResult | None = agent.run()  # pyright: ignore[reportAssignmentType]
        except Exception as error:  # the first launcher is gone, and its store with it
            return [
                Ended(replace(from_exit_code(0, 1), text=f"{type(error).__name__}: {error}", consequence=True), False)
            ]
        finally:
            self._agent = None  # the numbers of its processes may be given to others
        return _explain(result.failures if result else {}, read_notes(notes), self._kills)

    def _stop_if_asked(self) -> None:
        if self._asked.is_set() and not self._told:
            self._told = True
            self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        agent = self._agent
        ranks = agent.get_worker_group().workers if agent else ()
        send_signal((rank.id for rank in ranks if rank.id is not None), number)


def _explain(failures: dict[int, ProcessFailure], notes: list[Failure], ours: bool) -> list[Ended]:
    """What is known of each rank that failed: what it has left word of, otherwise its exit code."""
    noted = {note.rank: note for note in notes}
    first = min((failure.timestamp for failure in failures.values()), default=0)
    ended = [Ended(note, False) for note in notes]
    for rank, failure in failures.items():
        if rank not in noted:
            soon = failure.timestamp - first < _SOON_SECONDS and not ours
            killed = failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM and soon
            of_signal = failure.exitcode in (128 + signal.SIGINT, 128 + signal.SIGTERM)
            told = from_exit_code(rank, failure.exitcode)
            ended.append(
                Ended(replace(told, consequence=told.consequence or of_signal or not (soon or killed)), killed)
            )
    return ended


class _Meeting(RendezvousHandler):
    """Hands the agent its part in a round that is already decided."""

    def __init__(self, share: Share, address: str, at_poll: Callable[[], None]) -> None:
        self._share = share
        self._address = address
        self._at_poll = at_poll
        self._met = False

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "tutti"

    def get_run_id(self) -> str:
        return f"round-{self._share.round}"

    def next_rendezvous(self) -> RendezvousInfo:
        if self._met:
            raise RendezvousGracefulExitError("a round has one start")
        self._met = True
        where = RendezvousStoreInfo(self._address, self._share.port)
        seconds = timedelta(seconds=_STORE_SECONDS)
        store = TCPStore(self._address, self._share.port, is_master=False, timeout=seconds, wait_for_workers=False)
        return RendezvousInfo(PrefixStore("agents", store), self._share.host, self._share.hosts, where)

    def num_nodes_waiting(self) -> int:
        """Asked at every look at the ranks; new hosts wait for the next round."""
        self._at_poll()
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True
