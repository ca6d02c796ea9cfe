"""The measurement of a recipe: seconds per step by phase, rank and trial, with its conditions; read without torch."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti.errors import ConfigError
from tutti.runs.files import list_in, read_json, to_dataclass, write_durably
from tutti.runs.step_parts import TIMED, StepPart

# Measured one after another in every trial, `read` and `whole` last, as they use the same loader.
PHASES = {
    "read": "data loading alone",
    "copy": "a batch copied from the host to the GPU",
    "compute": "forward, backward and optimizer on a batch in memory, without communication",
    "double": "the same with a batch twice as large",
    "exchange": "the gradients averaged over ranks, without compute",
    "communicate": "compute with gradients averaged over ranks",
    "whole": "a step as in training",
}
PARTS = (*TIMED, StepPart.OTHER)  # of a step of `whole`; together they are all of it

Times = Mapping[str, tuple[tuple[float, ...], ...]]  # by phase or part: [rank][trial], seconds a step


@dataclass(frozen=True)
class Work:
    """The work of a step on one rank, counted in a few additional steps."""

    flops: float  # of matrix products and convolutions
    bytes_moved: float  # read and written by operators that do not fit into the cache, if nothing were fused
    least_bytes: float  # weights, gradients, optimizer state and batch, each as often as necessary
    operators: int
    synchronisations: int  # .item() and the like, where the host waits for the device
    synchronises_at: tuple[str, ...] = ()  # "model.py:12, 3 a step"
    host_share: float | None = None  # share of the compute time in which the device is idle; None if unknown


@dataclass(frozen=True)
class Ceilings:
    """The measured peaks of a rank's device, while the other ranks measure theirs."""

    flops_per_second: float  # of large matrix products in the recipe's precision
    bytes_per_second: float  # of copies far larger than the caches, reads and writes added


@dataclass(frozen=True)
class Measurement:
    """The measurement of a recipe or of a variant of it."""

    name: str
    overrides: tuple[str, ...]
    settings: Mapping[str, Any]  # the whole configuration, in the words of a recipe
    ranks: int
    hosts: tuple[str, ...]  # of all ranks, in their order
    cores: int  # of rank 0's host that its process may use
    local_ranks: int  # on rank 0's host
    device: str  # cpu or cuda
    device_name: str
    threads: int  # of each rank
    per_rank_batch: int
    global_batch: int
    parameters: int
    gradient_bytes: int
    steps: Mapping[str, int]  # by phase, in one trial
    seconds: Times  # by phase; phases that do not exist here (copy on a CPU, exchange on one rank) are left out
    parts: Times
    peak_bytes: tuple[int, ...]  # by rank: of the GPU's memory, or of the process
    batches_are_samples: bool = False  # the dataset returns single samples, which loader processes can load in parallel
    sources: tuple[str, ...] = ()  # values of data.source that the dataset has and this device can use
    work: Work | None = None
    ceilings: tuple[Ceilings, ...] = ()  # by rank
    notes: tuple[str, ...] = field(default=())
    stages: tuple[str, ...] = ()  # the layers of each stage, if the model is in stages; ranks have them in turn
    passes: int = 1  # micro-batches of a rank in a step

    @property
    def trials(self) -> int:
        return len(self.seconds["whole"][0])


def write_measurements(path: Path, found: Sequence[Measurement], more: Mapping[str, Any]) -> None:
    """Write measurements and the conclusions from them as JSON."""
    content = {"format": 1, "measurements": [dataclasses.asdict(each) for each in found], **more}
    write_durably(path, json.dumps(content, indent=1) + "\n")


def read_measurements(path: Path) -> list[Measurement]:
    """The measurements in a file."""
    try:
        found = [to_dataclass(each, Measurement) for each in list_in(read_json(path), "measurements")]
        if not all(each.seconds.get("whole") and all(each.seconds["whole"]) for each in found):
            raise ValueError("seconds.whole: expected the seconds of every rank and trial")
        return found
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} holds no measurements: {error}. Expected a bench.json of tutti bench.") from error
