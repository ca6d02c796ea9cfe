"""What published scaling curves say about a curve that has not been measured to its end, for each kind of fabric.

`population.json` is written by `benchmarks/forecast_population.py`.
"""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("population.json")


class Fabric(StrEnum):
    """The kind of network between nodes."""

    HPC = "hpc"  # InfiniBand, Slingshot, Aries, Omni-Path: messages bypass the operating system
    TCP = "tcp"  # Ethernet and TCP, as in most clouds


@dataclass(frozen=True)
class Normal:
    """A normal distribution."""

    mean: float
    deviation: float


@dataclass(frozen=True)
class Population:
    """The prior of one kind of fabric; all times are in log units."""

    structures: tuple[float, ...]  # the weight of each structure of exchange
    first_jump: Normal  # log of the log of two nodes over one
    friction: Normal  # for each doubling of nodes
    two_nodes: Normal  # log of the factor of exchange that holds on two nodes alone
    within_node: Normal  # for each doubling of the ranks of a node
    noise: float  # scale of one measurement
    discrepancy: float  # scale of what no structure describes, for each doubling of nodes beyond the measured ones
    width: float = 1.0  # of intervals, as a multiple of the posterior's, by what published curves turned out to need

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def from_json(values: dict[str, Any]) -> Population:
    """The population of one fabric from its part of the file."""
    return Population(
        structures=tuple(values["structures"]),
        first_jump=Normal(**values["first_jump"]),
        friction=Normal(**values["friction"]),
        two_nodes=Normal(**values["two_nodes"]),
        within_node=Normal(**values["within_node"]),
        noise=values["noise"],
        discrepancy=values["discrepancy"],
        width=values["width"],
    )


@cache
def shipped() -> dict[Fabric, Population]:
    """The populations that come with the package."""
    stored = json.loads(TABLE.read_text())
    return {fabric: from_json(stored["fabrics"][fabric]) for fabric in Fabric}
