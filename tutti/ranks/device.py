"""The device, threads and determinism of a rank, and seeds as pure functions of what they belong to."""

import contextlib
import os
import resource
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from tutti.config.schema import RuntimeConfig, Where
from tutti.errors import LaunchError
from tutti.ranks.cores import Binding, bind, threads_per_rank
from tutti.ranks.placement import Placement

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # by the precision of a recipe


def choose_device(config: RuntimeConfig, placement: Placement) -> torch.device:
    """Select the GPU of this rank, or the CPU if there is none or the recipe asks for it."""
    if not uses_gpus(config):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    index = placement.local_rank
    if count == 1 and placement.launcher != "torchrun":  # the launcher makes one GPU visible to each rank
        index = 0
    else:
        check_gpus(config, placement.local_size)
    torch.cuda.set_device(index)
    torch.backends.cudnn.benchmark = not config.deterministic
    return torch.device("cuda", index)


def check_gpus(config: RuntimeConfig, local_size: int) -> None:
    """Refuse more ranks on this host than it has GPUs."""
    if uses_gpus(config) and (count := torch.cuda.device_count()) < local_size:
        raise LaunchError(
            f"{local_size} ranks on this host, but {count} visible GPU(s): each rank needs its own. "
            f"Start {count} rank(s), or set runtime.device=cpu."
        )


def uses_gpus(config: RuntimeConfig) -> bool:
    """Return whether ranks use GPUs on this host."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise LaunchError("runtime.device='cuda', but torch sees no GPU here. Set runtime.device=cpu.")
    return config.device != "cpu" and torch.cuda.is_available()


def applies(where: Where, device: torch.device) -> bool:
    """Return whether an option of the recipe applies to this device."""
    return device.type == "cuda" if where == "gpu" else where


def set_determinism(config: RuntimeConfig) -> None:
    """Use deterministic kernels if the recipe asks for it."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def bind_rank(config: RuntimeConfig, placement: Placement) -> Binding:
    """Bind this rank to cores of its host as the recipe says; call it before threads are started."""
    return bind(
        config.binding, placement.local_rank, placement.local_size, shared=placement.launcher in ("none", "torchrun")
    )


def set_threads(config: RuntimeConfig, placement: Placement) -> int:
    """Limit the threads of this rank to its share of the cores."""
    threads = threads_per_rank(placement.local_size, os.environ, config.threads)
    torch.set_num_threads(threads)
    return threads


def peak_memory(device: torch.device) -> int:
    """The most bytes that this rank has used: of tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


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
