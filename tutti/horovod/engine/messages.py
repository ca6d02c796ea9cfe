"""What ranks and their coordinator say to each other before data moves."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal[
    "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join", "add_set", "remove_set"
]
Key = tuple[int, str]  # process set, and the name with its kind in front

AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)
OP_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
GLOBAL_SET = 0
SET_CHANGES = ("add_set", "remove_set")  # one at a time, whatever it is: they share a key
UNNAMED = "noname."  # and a number, for what the user gave no name: it never comes again


class Request(NamedTuple):
    """One rank's wish to take part in an operation; all that must agree over ranks is in it."""

    kind: Kind
    name: str
    process_set: int = GLOBAL_SET
    dtype: str = ""
    shape: tuple[int, ...] = ()
    device: str = "cpu"
    op: int = SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    splits: tuple[int, ...] = ()  # alltoall: rows for each rank
    group: str = ""  # grouped operations: ready together or not at all
    group_size: int = 1
    parts: tuple[tuple[int, ...], ...] = ()  # shapes of tensors that lie side by side in this one
    members: tuple[int, ...] = ()  # of a process set that is to be added or removed

    @property
    def key(self) -> Key:
        return self.process_set, f"{'process_set' if self.kind in SET_CHANGES else self.kind}.{self.name}"


@dataclass(frozen=True)
class Message:
    """What a rank tells the coordinator: new wishes, in full or by the number of one that was granted before."""

    rank: int
    requests: tuple[Request, ...] = ()
    known: tuple[int, ...] = ()
    waits: bool = False  # somebody on this rank waits for a result
    lost: str = ""  # an operation broke off here, perhaps because a rank is gone
    leaves: bool = False  # this rank shuts down


@dataclass(frozen=True)
class Response:
    """What the coordinator tells the members of a process set: do this now, all of you, in the order of responses."""

    kind: Kind | Literal["hurry", "shutdown"]  # hurry: somebody waits for what this rank has not told yet
    process_set: int = GLOBAL_SET
    requests: tuple[Request, ...] = ()  # one, or several that are done as one; rank 0's or the first that came
    numbers: tuple[int, ...] = ()  # under which ranks may name them from now on, or none
    error: str = ""
    sizes: tuple[tuple[int, ...], ...] = ()  # allgather: first dimensions; alltoall: splits; rank by rank of the set
    joined: tuple[int, ...] = ()  # ranks that have no more data and take part with zeros
    last_joined: int = -1
    set_number: int = -1  # of the process set that was added or removed
