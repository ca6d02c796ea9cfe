"""A host in an elastic job: it offers slots for ranks, and starts the ranks that the first launcher decides on."""

import os
import platform
import queue
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tutti.errors import LaunchError, RankLost
from tutti.launch.elastic.slots import RankEnd, RoundShare
from tutti.ranks.cores import threads_per_rank
from tutti.ranks.messages import Connection, connect
from tutti.ranks.process import FOLDER_VARIABLE
from tutti.ranks.secret import Secret
from tutti.runs.files import to_dataclass

_KILLED_SECONDS = 10.0


@dataclass(frozen=True)
class Offer:
    """What a host offers when it joins a job."""

    slots: int
    recipe: str
    version: str  # of tutti
    order: int  # its ranks come after those of hosts with a lower one


class Member:
    """This host's connection to the first launcher, and its ranks."""

    def __init__(self, connection: Connection, address: str, threads: int | None = None) -> None:
        self._connection = connection
        self._address = address
        self._threads = threads
        self._environment = dict(os.environ)
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._agent: Any = None
        self._arguments: list[str] = []

    def leave(self) -> None:
        """Have the job save and continue without this host; may be called in a signal handler."""
        self._inbox.put({"kind": "leave"})

    def run(self, offer: Offer) -> tuple[int, str]:
        """Take part until the job ends; return its exit code and message."""
        threading.Thread(target=self._read, name="member", daemon=True).start()
        self._connection.send("join", host=platform.node(), **asdict(offer))
        while True:
            match self._inbox.get():
                case {"kind": "welcome", "arguments": arguments, "environment": environment}:
                    self._arguments = arguments
                    os.environ.update(environment)
                    if not (Path(environment[FOLDER_VARIABLE]) / "config.yaml").is_file():
                        self._connection.close()
                        raise LaunchError(
                            f"the run folder {environment[FOLDER_VARIABLE]} cannot be seen on host {platform.node()}: "
                            "expected one on a file system that all hosts share. Set out=FOLDER on the first host."
                        )
                case {"kind": "round", "share": share}:
                    self._begin(share)
                case {"kind": "stop"} if self._agent:
                    self._agent.stop()
                case {"kind": "kill"} if self._agent:
                    self._agent.kill()
                case {"kind": "leave"}:
                    self._connection.send("leave")
                case {"kind": "end", "code": code, "text": text}:
                    self._end_ranks()
                    return code, text
                case {"kind": "disconnected"}:
                    self._end_ranks()
                    return (
                        RankLost.exit_code,
                        f"the first launcher of this job, at {self._address}, was lost.",
                    )

    def _read(self) -> None:
        for message in self._connection.messages():
            self._inbox.put(message)
        self._inbox.put({"kind": "disconnected"})

    def _begin(self, share: dict[str, Any]) -> None:
        from tutti.launch.elastic.agent import Agent

        def report(ended: list[RankEnd]) -> None:
            self._connection.send("ended", round=share["round"], ranks=[asdict(rank) for rank in ended])

        os.environ["OMP_NUM_THREADS"] = str(threads_per_rank(share["ranks"], self._environment, self._threads))
        self._agent = Agent(to_dataclass(share, RoundShare), self._address, self._arguments, report)

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
    except OSError as error:
        raise LaunchError(
            f"--join {address}:{port}: no job answers there ({error.strerror or error}). Give the address that the "
            "first launcher of the job has printed, and check that the network between the hosts is open."
        ) from error
