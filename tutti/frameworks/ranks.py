"""The ranks of a run in Keras or TensorFlow: a Horovod job, whose engine carries everything that they exchange."""

import os
from typing import Any

import torch

from tutti.config.schema import RuntimeConfig
from tutti.horovod import basics
from tutti.horovod.torch import ops
from tutti.horovod.torch.collectives import Sum, allreduce_
from tutti.horovod.torch.functions import allgather_object, broadcast_object
from tutti.ranks.group import Group
from tutti.ranks.placement import Placement


class EngineGroup(Group):
    """A group whose exchanges are matched by name with those of all ranks, beside gradients that are under way."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.rank = placement.rank
        self.world_size = placement.world_size
        self.store, self.hosts = basics.joined().store, basics.joined().hosts

    def barrier(self, what: str, timeout_seconds: float | None = None) -> None:
        ops.barrier()

    def gather(self, item: Any) -> list[Any]:
        return allgather_object(item, name="run.gather")

    def from_first(self, item: Any) -> Any:
        return broadcast_object(item, 0, name="run.from_first")

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        total = values.detach().to("cpu", torch.float64)
        return allreduce_(total, name="run.sum", op=Sum) if self.world_size > 1 else total

    def leave(self) -> None:
        self.barrier("the end of the run")
        basics.shutdown()


def join(placement: Placement, config: RuntimeConfig) -> EngineGroup:
    """Meet the other ranks, or name those that are missing at the deadline."""
    os.environ.setdefault("HOROVOD_START_TIMEOUT", str(config.start_timeout_seconds))
    basics.init()
    return EngineGroup(placement)
