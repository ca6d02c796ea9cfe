"""The global sample order: a pure function of (seed, epoch), cut into global batches, shared out by rank."""

import numpy as np

from tutti.config.plan import Plan


class SampleOrder:
    """Which samples belong to which step, and which of those to which rank."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self._plan = plan
        self.seed = seed
        self._epoch = -1
        self._permutation = np.empty(0, np.int64)

    def epoch_of(self, step: int) -> int:
        return step // self._plan.steps_per_epoch

    def global_ids(self, step: int) -> np.ndarray:
        """The samples of a step over all ranks, in order."""
        epoch, index = divmod(step, self._plan.steps_per_epoch)
        if epoch != self._epoch:
            self._permutation = permutation(self._plan.train_samples, self.seed, epoch)
            self._epoch = epoch
        return self._permutation[index * self._plan.global_batch : (index + 1) * self._plan.global_batch]

    def rank_ids(self, step: int, rank: int) -> np.ndarray:
        """The part of a step's samples that one rank takes."""
        size = self._plan.per_rank_batch
        return self.global_ids(step)[rank * size : (rank + 1) * size]


def permutation(samples: int, seed: int, epoch: int) -> np.ndarray:
    """All samples in the order of one epoch."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(samples)


def evaluation_ids(samples: int, rank: int, world_size: int) -> np.ndarray:
    """One rank's part of an evaluation: every sample on exactly one rank, whatever their numbers."""
    return np.arange(samples * rank // world_size, samples * (rank + 1) // world_size)
