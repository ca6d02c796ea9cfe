"""The global sample order and random numbers of samples: pure functions of (seed, epoch, sample)."""

import numpy as np
import torch

from tutti.config.plan import Plan
from tutti.ranks.seeds import GOLDEN_GAMMA, mix, splitmix64


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


class Draws:
    """The random numbers of one batch; each call takes the next draw of every sample in it."""

    def __init__(self, seed: int, epoch: int, ids: torch.Tensor) -> None:
        self._seed, self._epoch = seed, epoch
        self._key = mix(seed, epoch)
        self._ids = ids.numpy().view(np.uint64) * np.uint64(GOLDEN_GAMMA)
        self._count = 0

    def uniform(self) -> torch.Tensor:
        """One number in [0, 1) for each sample."""
        return torch.from_numpy((self._words() >> 11) * 2.0**-53)

    def integers(self, low: int, high: int) -> torch.Tensor:
        """One whole number from low to high, both included, for each sample."""
        return torch.from_numpy((self._words() >> 33).view(np.int64) % (high - low + 1) + low)

    def alternating(self) -> torch.Tensor:
        """Yes or no for each sample: drawn once for all epochs, and the other answer in every other epoch."""
        words = self._hashed(mix(self._seed, -1))
        return torch.from_numpy(((words >> 33).view(np.int64) + self._epoch) % 2 == 1)

    def _words(self) -> np.ndarray:
        """64 random bits a sample, others in every call."""
        self._count += 1
        return self._hashed(mix(self._key, self._count))

    def _hashed(self, key: int) -> np.ndarray:
        """64 bits for each id; in NumPy, because torch takes three times as long."""
        return splitmix64(self._ids + np.uint64(key))
