"""A host in an elastic job: it offers slots for ranks, and starts the ranks that the first launcher decides on."""

import os
import platform
import queue
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from tutti.errors import LaunchError, RankLost
from tutti.launch.elastic.slots import RankEnd, RoundShare
from tutti.ranks.cores import threads_per_rank
from tutti.ranks.messages import Connection, NotOfThisJob, connect
from tutti.ranks.process import FOLDER_VARIABLE, LINE_VARIABLE
from tutti.ranks.secret import FILE_VARIABLE, Secret
from tutti.runs.files import to_dataclass

_KILLED_SECONDS = 10.0
_MAX_LINE = 10_000  # characters of the command line in the environment of ranks


@dataclass(frozen=True)
class Offer:
    """What a host offers when it joins a job, and what its ranks would run."""

    slots: int
    recipe: str
    overrides: list[str]  # with which a run folder is resumed
    version: str  # of tutti
    order: int  # its ranks come after those of hosts with a lower one


@dataclass(frozen=True)
class Welcome:
    """All that a host takes from a job that it joins; the rest of its ranks' command and environment is its own."""

    folder: str  # of the run
    line: str  # with which the job was started, for the record of the run
    job: str  # from which the secret of the job's ranks is derived

    def __post_init__(self) -> None:
        if not os.path.isabs(self.folder) or "\0" in self.folder + self.line:
            raise ValueError(f"expected an absolute run folder and a command line, not {self.folder!r:.200}")


class Member:
    """This host's connection to the first launcher, and its ranks."""

    def __init__(
        self,
        connection: Connection,
        address: str,
        secret: Secret,
        arguments: Callable[[Path], list[str]],
        threads: int | None = None,
    ) -> None:
        """Take part with ranks that run `python ARGUMENTS`, which this host makes for a run folder, or refuses to."""
        self._connection = connection
        self._address = address
        self._secret = secret
        self._make_arguments = arguments
        self._threads = threads
        self._environment = dict(os.environ)
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._agent: Any = None
        self._arguments: list[str] | None = None
        self._slots = 0

    def leave(self) -> None:
        """Have the job save and continue without this host; may be called in a signal handler."""
        self._inbox.put({"kind": "leave"})

    def run(self, offer: Offer) -> tuple[int, str]:
        """Take part until the job ends; return its exit code and message."""
        self._slots = offer.slots
        threading.Thread(target=self._read, name="member", daemon=True).start()
        self._connection.send("join", host=platform.node(), **asdict(offer))
        try:
            while (ended := self._act(self._inbox.get())) is None:
                pass
            return ended
        except ValueError as error:
            text = f"the first launcher of this job, at {self._address}, has sent a message that is not valid: {error}."
            return LaunchError.exit_code, text
        finally:
            self._end_ranks()

    def _act(self, message: dict[str, Any]) -> tuple[int, str] | None:
        """Do what a message asks for; return how the job has ended for this host, if it has."""
        match message:
            case {"kind": "welcome", "welcome": welcome} if self._arguments is None:
                self._enter(to_dataclass(welcome, Welcome))
            case {"kind": "round", "share": share} if self._arguments is not None:
                self._begin(to_dataclass(share, RoundShare), self._arguments)
            case {"kind": "stop"} if self._agent:
                self._agent.stop()
            case {"kind": "kill"} if self._agent:
                self._agent.kill()
            case {"kind": "leave"}:
                self._connection.send("leave")
            case {"kind": "end", "code": int(code), "text": str(text)}:
                return code, text
            case {"kind": "disconnected"}:
                return RankLost.exit_code, f"the first launcher of this job, at {self._address}, was lost."
        return None

    def _read(self) -> None:
        for message in self._connection.messages():
            self._inbox.put(message)
        self._inbox.put({"kind": "disconnected"})

    def _enter(self, welcome: Welcome) -> None:
        self._arguments = self._make_arguments(Path(welcome.folder))
        os.environ |= {FOLDER_VARIABLE: welcome.folder, LINE_VARIABLE: welcome.line[:_MAX_LINE]}
        os.environ |= Secret(self._secret.key(f"ranks of job {welcome.job}")).environment()

    def _begin(self, share: RoundShare, arguments: list[str]) -> None:
        from tutti.launch.elastic.agent import Agent

        in_world = 0 <= share.first_rank < share.first_rank + share.ranks <= share.world_size
        in_hosts = 0 <= share.host < share.hosts and share.ranks <= self._slots
        if not (in_world and in_hosts and 0 < share.port < 1 << 16):
            raise ValueError(f"{share}, for a host of {self._slots} slots")
        address = str(ip_address(share.address)) if share.address else self._address

        def report(ended: list[RankEnd]) -> None:
            self._connection.send("ended", round=share.round, ranks=[asdict(rank) for rank in ended])

        os.environ["OMP_NUM_THREADS"] = str(threads_per_rank(share.ranks, self._environment, self._threads))
        self._agent = Agent(share, address, arguments, report)

    def _end_ranks(self) -> None:
        """End the ranks of this host."""
        if self._agent:
            self._agent.kill()
            self._agent.wait(_KILLED_SECONDS)
        self._connection.close()


def connect_to_leader(address: str, port: int, secret: Secret) -> Connection:
    """Connect to the first launcher of a job."""
    try:
        return connect(address, port, secret)
    except NotOfThisJob as error:
        raise LaunchError(
            f"--join {address}:{port}: {error}. Expected a job of the same user with the same home folder; where hosts "
            f"have none in common, set {FILE_VARIABLE} on all of them to copies of one file with mode 600."
        ) from error
    except OSError as error:
        raise LaunchError(
            f"--join {address}:{port}: no job answers there ({error.strerror or error}). Give the address that the "
            "first launcher of the job has printed, and check that the network between the hosts is open."
        ) from error
