"""Seeds as pure functions of what they belong to."""

import torch

_MASK = (1 << 64) - 1


def mix(*words: int) -> int:
    """One well-spread 63-bit seed from several numbers (splitmix64, word by word)."""
    state = 0
    for word in words:
        state = (state + word + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_pass(device: torch.device, seed: int, step: int, micro_batch: int) -> None:
    """Seed what a forward pass draws, dropout for one, by its step and its place in the global batch."""
    value = mix(seed, step, micro_batch)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(value)
