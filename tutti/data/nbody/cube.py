"""What is made: the periodic cube of a universe, walked plane by plane."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from tutti.data.nbody.cosmology import Cosmology
from tutti.data.nbody.grid_fft import Space

UNIVERSE, REDSHIFT = Cosmology(), 3.0

Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Box:
    """What is made: a periodic cube of a universe, and where its fields live while it is made."""

    space: Space
    cell: float  # comoving Mpc/h
    seed: int
    report: Report
    universe: Cosmology = UNIVERSE
    z: float = REDSHIFT

    @property
    def side(self) -> float:
        return self.space.box * self.cell

    def table(self, function: Callable[[np.ndarray], np.ndarray]) -> torch.Tensor:
        """A function of k in h/Mpc over squared wave numbers; 0 at k = 0."""
        k = 2 * np.pi / self.side * np.sqrt(np.arange(1, self.space.num_squares()))
        return torch.from_numpy(np.append(0.0, function(k)).astype(np.float32)).to(self.space.device)

    def planes(self, stage: str) -> Iterator[int]:
        """The planes of the box in order, reported as a stage."""
        for x in range(self.space.box):
            yield x
            self.report(stage, x + 1, self.space.box)
