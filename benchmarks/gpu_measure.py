"""Functions that the GPU benchmarks share: timed steps on a fixed batch, and tutti's training step on one."""

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tutti.config.load import resolve
from tutti.config.plan import make_plan
from tutti.config.schema import RuntimeConfig
from tutti.data.loader import RankBatch
from tutti.ranks.device import choose_device
from tutti.ranks.environments import discover
from tutti.ranks.group import Group, join
from tutti.train.torch import Objects, build_parts

Step = Callable[[], Any]


def find_gpu() -> torch.device:
    """Returns the GPU, or the CPU to try a program."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.backends.cudnn.benchmark = True
    return torch.device("cuda", 0)


def timed(step: Step, steps: int, device: torch.device) -> float:
    """Seconds per step, with the device synchronised before and after."""
    _wait(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    _wait(device)
    return (time.perf_counter() - began) / steps


def warmed(step: Step, device: torch.device, steps: int = 5) -> float:
    """Seconds of the first steps, which select kernels and compile."""
    return steps * timed(step, steps, device)


def memory_gib(device: torch.device) -> float:
    """Allocated memory of the device, after garbage collection."""
    gc.collect()
    if device.type != "cuda":
        return 0.0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device) / 2**30


def peak_memory_gib(step: Step, device: torch.device) -> float:
    """The peak memory of a step."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) / 2**30


def join_alone() -> Group:
    """Joins a process group as its only rank."""
    return join(discover({}), RuntimeConfig())


def trainer_step(
    recipe: str,
    overrides: list[str],
    inputs: torch.Tensor,
    targets: torch.Tensor,
    classes: int = 1000,
    group: Group | None = None,
) -> Step:
    """Returns tutti's training step of a recipe on one rank, for a batch on the device."""
    config = resolve(recipe, overrides).config
    placement = discover({})
    device = choose_device(config.runtime, placement)
    own = group or join_alone()
    objects = Objects(train_data=_Samples(inputs, targets, classes), valid_data=None)
    parts = build_parts(config, objects, placement, device)
    plan = make_plan(config, 1, len(inputs))
    learner = parts.make_learner(config, own, device)
    size = plan.micro_batch
    pairs = list(zip(inputs.split(size), targets.split(size), strict=True))
    batch = RankBatch(0, 0, np.arange(len(inputs)), pairs)
    learner.model.train()

    def step() -> torch.Tensor:
        loss = learner.forward_backward(batch, measure=False)
        learner.clip_gradients()
        learner.update_weights(config.optim.lr)
        return loss

    if group is None:
        torch.distributed.destroy_process_group()
    return step


class _Samples:
    """A batch as a dataset, for its length and shape."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor, classes: int) -> None:
        self._inputs, self._targets = inputs, targets
        self.input_shape = tuple(inputs.shape[1:])
        self.num_classes = None if targets.is_floating_point() else classes

    def __len__(self) -> int:
        return len(self._inputs)

    def batch(self, ids: torch.Tensor, draws: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inputs[: len(ids)], self._targets[: len(ids)]


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
