"""Seeds as pure functions of what they belong to."""

from typing import TypeVar

import numpy as np
import torch

GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # the increment of splitmix64
_MASK = (1 << 64) - 1
_Words = TypeVar("_Words", int, np.ndarray)


def splitmix64(state: _Words) -> _Words:
    """Return 64 random bits for each state: an integer below 2^64, or an array of uint64."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def mix(*words: int) -> int:
    """Return one 63-bit seed from several integers."""
    state = 0
    for word in words:
        state = splitmix64((state + word + GOLDEN_GAMMA) & _MASK)
    return state >> 1


def seed_pass(device: torch.device, seed: int, step: int, micro_batch: int) -> None:
    """Seed the random numbers of a forward pass, such as dropout, by its step and its position in the global batch."""
    value = mix(seed, step, micro_batch)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(value)
