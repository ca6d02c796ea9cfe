"""The messages between the driver of an elastic job and its workers.

A worker is a process with a number of its own; its rank changes from one generation of the job to the next.
"""

from dataclasses import dataclass
from typing import Any, Literal

from tutti.ranks.messages import Event, MessageServer, Peer
from tutti.runs.files import to_dataclass

ELASTIC_VARIABLE = "HOROVOD_ELASTIC"
ADDRESS_VARIABLE = "TUTTI_ELASTIC_ADDRESS"  # host:port of the driver
WORKER_VARIABLE = "TUTTI_ELASTIC_WORKER"  # the number of the worker


@dataclass(frozen=True)
class RankRequest:
    """A worker asks for a rank in the next generation."""

    number: int  # of this worker's requests
    has_state: bool = False  # the worker holds the state that the training has reached
    skip_sync: bool = False  # as far as the worker knows, all workers hold the same state


@dataclass(frozen=True)
class Assignment:
    """The answer to a request: a rank in a generation, or why there is none."""

    generation: int = -1
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    store_port: int = 0  # of the driver's store, where the ranks meet
    store_address: str = ""  # as other hosts of the generation see it; "" where this worker knows it
    skip_sync: bool = False  # no worker is new, and all hold the same state
    refusal: str = ""
    leave: bool = False  # the refusal is no failure: the worker's host is no longer in the job
    request: int = 0  # the number of the request


@dataclass(frozen=True)
class Notice:
    """A change in a generation: one of its workers was lost, or hosts were added or removed."""

    change: Literal["lost", "hosts"]
    generation: int = -1
    text: str = ""
    skip_sync: bool = False  # hosts were only removed


class WorkerServer(MessageServer):
    """Admits the workers of a job, which introduce themselves by their numbers."""

    kinds = ("request", "ping")
    keep_alive = False  # the driver sees its workers end

    def admit(self, arrival: int, message: dict[str, Any], peer: Peer) -> Event | None:
        """Admit a worker by its number."""
        match message:
            case {"kind": "worker", "worker": int(number)}:
                return number, message
        return None

    def on_message(self, number: int, message: dict[str, Any]) -> None:
        """Add only complete requests to the events; the ValueError of another one disconnects its worker."""
        if message["kind"] == "request":
            content = {key: value for key, value in message.items() if key != "kind"}
            message = {"kind": "request", "request": to_dataclass(content, RankRequest)}
        super().on_message(number, message)
