"""Random numbers that belong to samples: functions of (seed, epoch, sample, draw), the same on any rank."""

import numpy as np
import torch

from tutti.runtime.seeds import mix

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_11, _27, _30, _31, _33 = (np.uint64(bits) for bits in (11, 27, 30, 31, 33))


class Draws:
    """The random numbers of one batch; each call takes the next draw of every sample in it."""

    def __init__(self, seed: int, epoch: int, ids: torch.Tensor) -> None:
        self._seed, self._epoch = seed, epoch
        self._key = mix(seed, epoch)
        self._ids = ids.numpy().view(np.uint64) * _GOLDEN
        self._count = 0

    def uniform(self) -> torch.Tensor:
        """One number in [0, 1) for each sample."""
        return torch.from_numpy((self._words() >> _11) * 2.0**-53)

    def integers(self, low: int, high: int) -> torch.Tensor:
        """One whole number from low to high, both included, for each sample."""
        return torch.from_numpy((self._words() >> _33).view(np.int64) % (high - low + 1) + low)

    def alternating(self) -> torch.Tensor:
        """Yes or no for each sample: drawn once for all epochs, and the other answer in every other epoch."""
        words = self._hashed(mix(self._seed, -1))
        return torch.from_numpy(((words >> _33).view(np.int64) + self._epoch) % 2 == 1)

    def _words(self) -> np.ndarray:
        """64 random bits a sample, others in every call."""
        self._count += 1
        return self._hashed(mix(self._key, self._count))

    def _hashed(self, key: int) -> np.ndarray:
        """splitmix64 of the ids; unsigned arithmetic wraps. Torch takes three times as long."""
        state = self._ids + np.uint64(key)
        state = (state ^ (state >> _30)) * _FIRST
        state = (state ^ (state >> _27)) * _SECOND
        return state ^ (state >> _31)
