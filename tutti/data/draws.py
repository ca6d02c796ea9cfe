"""Random numbers that belong to samples: functions of (seed, epoch, sample, draw), the same on any rank and device."""

import torch

from tutti.runtime.seeds import mix


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


class Draws:
    """The random numbers of one batch; each call takes the next draw of every sample in it."""

    def __init__(self, seed: int, epoch: int, ids: torch.Tensor) -> None:
        self._key = mix(seed, epoch)
        self._ids = ids
        self._count = 0

    def uniform(self) -> torch.Tensor:
        """One number in [0, 1) for each sample."""
        return (self._words() >> 11 & (1 << 53) - 1).double() * 2.0**-53

    def integers(self, low: int, high: int) -> torch.Tensor:
        """One whole number from low to high, both included, for each sample."""
        return low + (self._words() >> 33 & 0x7FFFFFFF) % (high - low + 1)

    def _words(self) -> torch.Tensor:
        """64 random bits a sample by splitmix64; int64 arithmetic wraps, and masks make the shifts logical."""
        self._count += 1
        state = self._ids * _GOLDEN + _signed(mix(self._key, self._count))
        state = (state ^ (state >> 30 & (1 << 34) - 1)) * _FIRST
        state = (state ^ (state >> 27 & (1 << 37) - 1)) * _SECOND
        return state ^ (state >> 31 & (1 << 33) - 1)
