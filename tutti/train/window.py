"""A log window: the steps between two lines of the log."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tutti.ranks.group import Group
from tutti.runs.step_parts import TIMED, StepPart


@dataclass(frozen=True)
class ClosedWindow:
    """Steps that were made, and that a GPU may still be computing: their results are read when somebody asks."""

    step: int  # the last one
    epoch: int
    losses: Sequence[Any]  # of the steps
    totals: Callable[[], torch.Tensor]  # waits for a GPU
    phases: Callable[[], Mapping[StepPart, float]]  # to be read after the totals

    def read(self, rank: int, world_size: int) -> list[torch.Tensor]:
        """The totals, and the seconds by phase at this rank's place in a row of zeros; empty if none are measured."""
        totals = self.totals()  # first: a GPU has then done the work that the phases are of
        own = list(self.phases().values())
        row = [0.0] * (len(own) * world_size)
        row[rank * len(own) : (rank + 1) * len(own)] = own
        return [totals, torch.tensor(row, dtype=torch.float64)]


class Sums(Protocol):
    """Sums of values over steps."""

    def totals(self) -> torch.Tensor: ...

    def clear(self) -> None: ...


def taken(sums: Sums) -> Callable[[], torch.Tensor]:
    """Set sums to zero; returns a function that gives what they were."""
    found = sums.totals()
    sums.clear()
    return lambda: found


def phases_by_rank(phases: Sequence[float]) -> list[dict[StepPart, float]]:
    """The seconds by phase of every rank, from the sum of their rows."""
    cuts = range(0, len(phases), len(TIMED))
    return [dict(zip(TIMED, phases[cut : cut + len(TIMED)], strict=True)) for cut in cuts]


def find_first_bad(losses: Sequence[Any], last_step: int, group: Group) -> tuple[int, int]:
    """The first step up to `last_step`, counted from 0, whose loss is not finite, and its rank; every rank enters."""
    first = last_step - len(losses)
    own = next((first + i for i, value in enumerate(losses) if not math.isfinite(float(value))), None)
    found = [(step, rank) for rank, step in enumerate(group.gather(own)) if step is not None]
    return min(found, default=(last_step - 1, group.rank))
