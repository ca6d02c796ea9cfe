"""What a distributed optimizer knows about ranks: how gradients are reduced, and those that wait for more passes."""

import itertools
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tutti.horovod.basics import global_process_set
from tutti.horovod.engine.messages import AVERAGE, SUM
from tutti.horovod.keras.backends import Backend
from tutti.horovod.keras.compression import Compression
from tutti.horovod.process_sets import ProcessSet
from tutti.horovod.variables import check_groups, identity

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Options:
    """What the user has asked for."""

    compression: Any = Compression.none
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    op: int = AVERAGE
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False
    num_groups: int = 0
    groups: Any = None  # a word on what travels together; all gradients of a step do
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True

    def __post_init__(self) -> None:
        if self.op not in (AVERAGE, SUM):
            raise ValueError(f"op={self.op} is not supported with Keras: expected hvd.Average or hvd.Sum.")
        if self.gradient_predivide_factor != 1.0 and self.op != AVERAGE:
            raise ValueError(
                f"gradient_predivide_factor={self.gradient_predivide_factor} not supported with op != Average. "
                "Leave it out, or use op=hvd.Average."
            )
        if self.backward_passes_per_step <= 0:
            raise ValueError(f"backward_passes_per_step={self.backward_passes_per_step} must be > 0")
        if self.num_groups != 0:
            warnings.warn(
                "Parameter `num_groups` has been replaced by `groups` and will be removed",
                DeprecationWarning,
                stacklevel=4,
            )
        check_groups(self.groups if self.groups is not None else self.num_groups or None)

    @property
    def is_active(self) -> bool:
        """Whether this rank has others to reduce with, or may have them after a reset."""
        alone = self.process_set.size() == 1 and os.environ.get("HOROVOD_ELASTIC") != "1"
        return self.process_set.included() and not alone

    @property
    def local_factor(self) -> float:
        """By which a gradient that is this rank's own counts."""
        return 1.0 / self.process_set.size() if self.scale_local_gradients and self.is_active else 1.0


class Distribution:
    """The state of one distributed optimizer; `counter` is how many passes wait for a step."""

    def __init__(self, options: Options, backend: Backend) -> None:
        self.options, self.backend = options, backend
        self.local_variables: set[int] = set()
        self.counter: Any = 0
        self.sums: list[Any] = []  # of the gradients that wait
        self.buffers: list[Any] = []  # in which they travel
        self.passes_on = False  # while the optimizer's own class works on gradients that are reduced already

    @cached_property
    def name(self) -> str:
        """Given when it reduces for the first time: an optimizer that one rank has for itself must not count."""
        return f"DistributedOptimizer_{next(_numbers)}"

    def exchange(self, gradients: Sequence[Any], variables: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Whether a step is due, and the gradients for it; every rank of the set must enter."""
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        are_local = [identity(variables[place]) in self.local_variables for place in places]
        due, found = self.backend.exchange(self, [gradients[place] for place in places], are_local)
        reduced: list[Any] = [None] * len(gradients)
        for place, gradient in zip(places, found, strict=True):
            reduced[place] = gradient
        return due, reduced

    @property
    def accumulates(self) -> bool:
        return self.options.backward_passes_per_step > 1
