"""Sample order and random numbers of samples, as pure functions of (seed, epoch, sample)."""

import numpy as np
import torch

from tutti.config.plan import Plan
from tutti.ranks.device import GOLDEN_GAMMA, mix, splitmix64

_LARGEST_WORD = 2**32 - 1  # NumPy seeds generators with words of 32 bits, and appends zeros


class SampleOrder:
    """The sample ids of every step and rank."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self._plan = plan
        self.seed = seed
        self._epoch = -1
        self._permutation = np.empty(0, np.int64)

    def epoch_of(self, step: int) -> int:
        return step // self._plan.steps_per_epoch

    def global_ids(self, step: int) -> np.ndarray:
        """Returns the sample ids of a step over all ranks, in order."""
        epoch, index = divmod(step, self._plan.steps_per_epoch)
        if epoch != self._epoch:
            self._permutation = permutation(self._plan.train_samples, self.seed, epoch)
            self._epoch = epoch
        return self._permutation[index * self._plan.global_batch : (index + 1) * self._plan.global_batch]

    def rank_ids(self, step: int, rank: int) -> np.ndarray:
        """Returns the sample ids of a step for one rank; ranks that share samples have the same."""
        size, share = self._plan.per_rank_batch, self._plan.layout.data_rank(rank)
        return self.global_ids(step)[share * size : (share + 1) * size]


def permutation(samples: int, seed: int, epoch: int) -> np.ndarray:
    """Returns all sample ids in the order of an epoch."""
    words = [seed, epoch]
    if seed > _LARGEST_WORD:  # NumPy would take its upper half for the epoch of a smaller seed
        words = [seed & _LARGEST_WORD, seed >> 32, epoch, 1]
    return np.random.Generator(np.random.PCG64(words)).permutation(samples)


def evaluation_ids(samples: int, rank: int, world_size: int) -> np.ndarray:
    """Returns the sample ids that one rank evaluates; every sample is on exactly one rank."""
    return np.arange(samples * rank // world_size, samples * (rank + 1) // world_size)


class Draws:
    """Random numbers for the samples of a batch; each call returns the next draw of every sample."""

    def __init__(self, seed: int, epoch: int, ids: torch.Tensor) -> None:
        self._seed, self._epoch = seed, epoch
        self._key = mix(seed, epoch)
        self._ids = ids.numpy().view(np.uint64) * np.uint64(GOLDEN_GAMMA)
        self._count = 0

    def uniform(self) -> torch.Tensor:
        """Returns a number in [0, 1) for each sample."""
        return torch.from_numpy((self._words() >> 11) * 2.0**-53)

    def integers(self, low: int, high: int) -> torch.Tensor:
        """Returns an integer from low to high, both included, for each sample."""
        return torch.from_numpy((self._words() >> 33).view(np.int64) % (high - low + 1) + low)

    def alternating(self) -> torch.Tensor:
        """Returns a boolean for each sample: drawn once for all epochs, and inverted in every second epoch."""
        words = self._hashed(mix(self._seed, -1))
        return torch.from_numpy(((words >> 33).view(np.int64) + self._epoch) % 2 == 1)

    def _words(self) -> np.ndarray:
        """Returns 64 random bits for each sample, different in every call."""
        self._count += 1
        return self._hashed(mix(self._key, self._count))

    def _hashed(self, key: int) -> np.ndarray:
        """Hashes each id to 64 bits; in NumPy, because torch takes three times as long."""
        return splitmix64(self._ids + np.uint64(key))
