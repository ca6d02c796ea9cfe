"""Which faults there are, where and when each may happen, and how a campaign is drawn from a seed."""

import dataclasses
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

LOCAL, NAMESPACES, SLURM = "local", "namespaces", "slurm"
PLACES = (LOCAL, NAMESPACES, SLURM)
RANKS = {LOCAL: 2, NAMESPACES: 2, SLURM: 3}
STEPS = 40  # of a run: four epochs of ten
ALL = ("start", "step", "validation", "checkpoint", "end")
COMPUTING = ("start", "step", "validation")


@dataclass(frozen=True)
class Kind:
    """A kind of fault: the places and moments in which it may happen, and the ways in which it may."""

    name: str
    places: tuple[str, ...]
    moments: tuple[str, ...] = ALL
    ways: tuple[str, ...] = ("",)
    ranks: str = "any"  # which rank it happens to: any, first, or others than the first


KINDS = (
    Kind("kill rank", PLACES, ranks="others"),
    Kind("kill rank 0", PLACES, ranks="first"),
    Kind("kill launcher", (LOCAL,)),
    Kind("kill fork server", (LOCAL,)),
    Kind("lose node", (NAMESPACES, SLURM), ("step", "validation", "checkpoint"), ("all", "slurmd")),
    Kind("stop rank", PLACES, ("start", "step", "validation", "checkpoint")),
    Kind("cut link", (NAMESPACES,), ("start", "step", "validation", "checkpoint"), ("down", "drop", "for 3 s")),
    Kind("slow link", (NAMESPACES,), ("start", "step", "validation", "checkpoint")),
    Kind("lossy link", (NAMESPACES,), ("start", "step", "validation", "checkpoint")),
    Kind("full disk", (LOCAL,), ALL, ("for good", "for 1 s"), ranks="first"),
    Kind("read-only folder", (LOCAL,), ALL, ranks="first"),
    Kind("deleted folder", (LOCAL,), ALL, ranks="first"),
    Kind("truncated shard", (LOCAL,), ("step",)),
    Kind("flipped shard", (LOCAL,), ("step",)),
    Kind("torn metrics.jsonl", (LOCAL,), ("step", "validation", "checkpoint"), ("cut", "garbage")),
    Kind("end of wall time", (LOCAL,), ALL, ("clock", "USR1 to launcher", "TERM to launcher", "TERM to group")),
    Kind("end of wall time", (LOCAL,), ALL, ("USR1 to rank", "TERM to rank", "TERM to all", "clock")),
    Kind("end of wall time", (SLURM,), ALL, ("USR1", "TERM and KILL")),
    Kind("taken port", (NAMESPACES,), ("start",), ("silent", "talking")),
    Kind("clock jump", PLACES, COMPUTING, ("+1 hour", "-1 hour", "+1 day")),
    Kind("out of memory", PLACES, COMPUTING),
    Kind("NaN loss", PLACES, ("step",)),
    Kind("code skew", (NAMESPACES, SLURM), ("start",), ranks="others"),
    Kind("two resumes", (LOCAL,), ("step", "validation", "checkpoint")),
    Kind("SIGINT twice", (LOCAL,), ALL, ("at once", "after 0.3 s")),
)

# Ranks other than the first make little durable: one file of each checkpoint.
_MOST_WRITES = {"start": 1, "validation": 3, "checkpoint": 4, "end": 1}
_BY_CLOCK = ("kill launcher", "SIGINT twice", "end of wall time")


@dataclass(frozen=True)
class Fault:
    """One fault of a campaign, with all that was drawn for it."""

    index: int
    seed: int
    kind: str
    place: str
    moment: str
    at: int  # of several such moments: which one
    rank: int
    way: str
    delay_seconds: float  # for moments that only a clock can tell

    @property
    def by_clock(self) -> bool:
        """Whether it happens a while after the start, before there are ranks that could tell the moment."""
        return self.place == LOCAL and self.kind in _BY_CLOCK and self.moment == "start" and self.rank == 0

    def line(self) -> str:
        """Return the fault in one line of a table."""
        way = f" ({self.way})" if self.way else ""
        return f"{self.index:4d}  {self.place:10s}  {self.kind}{way}, {self.moment} {self.at}, rank {self.rank}"

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def draw_campaign(
    seed: int, count: int, places: Sequence[str] = PLACES, kinds: Sequence[str] | None = None
) -> list[Fault]:
    """Draw the faults of a campaign: every kind in every place comes once before any comes again."""
    chance = random.Random(f"campaign {seed}")
    possible = [(kind, place) for kind in KINDS for place in kind.places if place in places]
    if kinds is not None:
        possible = [(kind, place) for kind, place in possible if kind.name in kinds]
    if not possible:
        return []
    found: list[Fault] = []
    for kind, place in _rounds(possible, chance):
        if len(found) == count:
            return found
        found.append(draw_fault(len(found), chance.randrange(2**32), kind, place))
    return found


def draw_fault(index: int, seed: int, kind: Kind, place: str) -> Fault:
    """Draw the moment, the rank and the way of one fault from its own seed."""
    chance = random.Random(seed)
    moment = chance.choice(kind.moments)
    first = {"first": 0, "others": 1, "any": 0}[kind.ranks]
    last = {"first": 0, "others": RANKS[place] - 1, "any": RANKS[place] - 1}[kind.ranks]
    ways = [way for way in kind.ways if way != "slurmd" or place == SLURM]
    rank = chance.randint(first, last)
    return Fault(
        index=index,
        seed=seed,
        kind=kind.name,
        place=place,
        moment=moment,
        at=_draw_number(chance, kind, moment, rank),
        rank=rank,
        way=chance.choice(ways),
        delay_seconds=round(chance.uniform(0.0, 4.0), 2),
    )


def _draw_number(chance: random.Random, kind: Kind, moment: str, rank: int) -> int:
    """Return which of several moments: of a step its number, of a checkpoint how many writes were made durable."""
    if moment == "step":
        late = kind.name.endswith(("shard", "metrics.jsonl"))  # there are two checkpoints by then
        return chance.randint(18 if late else 1, STEPS - 2)
    most = {"start": 2, "validation": 3, "checkpoint": 16, "end": 8} if rank == 0 else _MOST_WRITES
    return chance.randint(1, most[moment])


def _rounds(possible: Sequence[tuple[Kind, str]], chance: random.Random) -> Iterator[tuple[Kind, str]]:
    while True:
        yield from chance.sample(possible, len(possible))
