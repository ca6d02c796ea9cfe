"""What the driver of an elastic job and its workers say to each other, through a store that the driver holds.

A worker is a process with a number of its own; which rank it is changes from one generation of the job to the next.
"""

import json
from dataclasses import asdict, dataclass
from typing import Literal, Self

ELASTIC_VARIABLE = "HOROVOD_ELASTIC"
ADDRESS_VARIABLE = "TUTTI_ELASTIC_ADDRESS"  # host:port of the store
WORKER_VARIABLE = "TUTTI_ELASTIC_WORKER"  # the number of the worker

ASKS = "asks"  # the queue of all asks


def place_key(worker: int, ask: int) -> str:
    """Where the answer to an ask is put."""
    return f"place/{worker}/{ask}"


def news_key(worker: int) -> str:
    """The queue of what a worker is told without asking."""
    return f"news/{worker}"


class _Spoken:
    def encode(self) -> str:
        return json.dumps(asdict(self))  # pyright: ignore[reportArgumentType]

    @classmethod
    def decode(cls, content: bytes) -> Self:
        return cls(**json.loads(content))


@dataclass(frozen=True)
class Ask(_Spoken):
    """A worker is not in a job, and wants to be in the next generation."""

    worker: int
    number: int  # of this worker's asks
    has_state: bool = False  # it holds what the training has come to
    skip_sync: bool = False  # and all workers do, as far as it knows


@dataclass(frozen=True)
class Place(_Spoken):
    """The answer: a rank in a generation, or why there is none."""

    generation: int = -1
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    skip_sync: bool = False  # nobody is new, and all have the same state
    refusal: str = ""
    leave: bool = False  # with a refusal that is no failure: the worker's host is no longer in the job


@dataclass(frozen=True)
class News(_Spoken):
    """Something has happened to a generation: a worker of it was lost, hosts have come or gone; or nothing will."""

    kind: Literal["lost", "hosts", "end"]
    generation: int = -1
    text: str = ""
    skip_sync: bool = False  # hosts have only gone
