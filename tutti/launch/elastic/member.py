"""A host in an elastic job: it offers places for ranks, and does in every round what the first launcher says."""

import os
import platform
import queue
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tutti.errors import LaunchError, RankLost
from tutti.launch.elastic.messages import Connection, connect
from tutti.ranks.cores import threads_per_rank
from tutti.ranks.process import FOLDER_VARIABLE

_KILLED_SECONDS = 10.0


@dataclass(frozen=True)
class Offer:
    """With what a host joins a job."""

    slots: int
    recipe: str
    version: str  # of tutti
    order: int  # its ranks come after those of hosts with a lower one


class Member:
    """This host's part of the conversation with the first launcher."""

    def __init__(self, connection: Connection, address: str, threads: int | None = None) -> None:
        self._connection = connection
        self._address = address
        self._threads = threads
        self._environment = dict(os.environ)
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._agent: Any = None
        self._arguments: list[str] = []

    def leave(self) -> None:
        """Have the job save and go on without this host; may be called in a signal handler."""
        self._inbox.put({"kind": "leave"})

    def run(self, offer: Offer) -> tuple[int, str]:
        """Take part until the job ends; its exit code, and what there is to say."""
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
                    self._abandon()
                    return code, text
                case {"kind": "gone"}:
                    self._abandon()
                    return RankLost.exit_code, f"the first launcher of this job, at {self._address}, is gone."

    def _read(self) -> None:
        for message in self._connection.messages():
            self._inbox.put(message)
        self._inbox.put({"kind": "gone"})

    def _begin(self, share: dict[str, Any]) -> None:
        from tutti.launch.elastic.agent import Agent, Ended, Share

        def report(ended: list[Ended]) -> None:
            self._connection.send("ended", round=share["round"], ranks=[rank.as_content() for rank in ended])

        os.environ["OMP_NUM_THREADS"] = str(threads_per_rank(share["ranks"], self._environment, self._threads))
        self._agent = Agent(Share(**share), self._address, self._arguments, report)

    def _abandon(self) -> None:
        """Leave no rank behind."""
        if self._agent:
            self._agent.kill()
            self._agent.wait(_KILLED_SECONDS)
        self._connection.close()


def reach(address: str, port: int) -> Connection:
    """A connection to the first launcher of a job."""
    try:
        return connect(address, port)
    except OSError as error:
        raise LaunchError(
            f"--join {address}:{port}: no job answers there ({error.strerror or error}). Give the address that the "
            "first launcher of the job has printed, and check that the network between the hosts is open."
        ) from error
