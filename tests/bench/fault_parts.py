"""Datasets, models and losses with a deliberate fault, which a bench should find.

Work is measured in matrix products of one size, wherever that is possible, so that its share does not depend on the
machine: a dataset that makes as many products as a step is half of it anywhere.
"""

import itertools
import os
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional

SAMPLES = 4096
CLASSES = 10


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


class Numbers:
    """Samples of random numbers, gathered whole from memory; reading costs nothing worth mentioning."""

    num_classes = CLASSES

    def __init__(self, split: str, features: int = 64, samples: int = SAMPLES) -> None:
        drawn = torch.Generator().manual_seed(1)
        self.input_shape = (features,)
        self._inputs = torch.randn(256, features, generator=drawn)
        self._targets = torch.randint(0, CLASSES, (256,), generator=drawn)
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def batch(self, ids: torch.Tensor, draws: object) -> tuple[torch.Tensor, torch.Tensor]:
        rows = ids % len(self._inputs)
        return self._inputs[rows], self._targets[rows]


class Sleeping(Numbers):
    """Every batch comes from a disk that takes its time; on all ranks, or on one."""

    def __init__(self, split: str, seconds: float, on_rank: int | None = None, **more: int) -> None:
        super().__init__(split, **more)
        self._seconds = seconds if on_rank in (None, _rank()) else 0.0

    def batch(self, ids: torch.Tensor, draws: object) -> tuple[torch.Tensor, torch.Tensor]:
        if self._seconds:
            time.sleep(self._seconds)
        return super().batch(ids, draws)


class SlowByClock(Numbers):
    """Every batch takes half a second by a clock of its own, on which nobody waits."""

    batches = 0

    def batch(self, ids: torch.Tensor, draws: object) -> tuple[torch.Tensor, torch.Tensor]:
        SlowByClock.batches += 1
        return super().batch(ids, draws)

    @staticmethod
    def clock() -> float:
        return time.perf_counter() + 0.5 * SlowByClock.batches


class Decoding(Numbers):
    """Every batch costs as much arithmetic as some steps of `Layers` with the same width and batch; on all ranks, or
    on one."""

    def __init__(
        self, split: str, width: int, steps: float, depth: int = 1, on_rank: int | None = None, **more: int
    ) -> None:
        super().__init__(split, **more)
        products = 3 * depth * steps
        self._products = round(products) if on_rank in (None, _rank()) else 0
        self._matrix = torch.randn(width, width)
        self._width = width

    def batch(self, ids: torch.Tensor, draws: object) -> tuple[torch.Tensor, torch.Tensor]:
        multiply(torch.ones(len(ids), self._width), self._matrix, self._products)
        return super().batch(ids, draws)


class SleepingSamples:
    """Every sample is a file of its own on a slow disk; reading only waits, so that more loader processes help."""

    num_classes = CLASSES

    def __init__(self, split: str, seconds: float, features: int = 64, samples: int = SAMPLES) -> None:
        self.input_shape = (features,)
        self._seconds = seconds
        self._samples = samples
        self._input = torch.ones(features)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self._seconds)
        return self._input, index % CLASSES


class DecodingSamples(SleepingSamples):
    """Every sample costs arithmetic, and a batch as much as some steps of `Layers` with the same width and batch."""

    def __init__(self, split: str, width: int, depth: int, steps: float, per_rank: int, **more: int) -> None:
        super().__init__(split, 0.0, **more)
        self._products = round(3 * depth * steps / per_rank)
        self._left, self._right = torch.ones(per_rank, width), torch.randn(width, width)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        multiply(self._left, self._right, self._products)
        return super().__getitem__(index)


class Fickle(Numbers):
    """A disk whose speed is another every time that reading begins anew: one, sixty-four and eight times in turn."""

    def __init__(self, split: str, seconds: float, **more: int) -> None:
        super().__init__(split, **more)
        self._times = itertools.cycle((seconds, 64 * seconds, 8 * seconds))
        self._first: list[int] | None = None
        self._seconds = seconds

    def batch(self, ids: torch.Tensor, draws: object) -> tuple[torch.Tensor, torch.Tensor]:
        self._first = self._first or ids.tolist()
        if ids.tolist() == self._first:
            self._seconds = next(self._times)
        time.sleep(self._seconds)
        return super().batch(ids, draws)


class Layers(nn.Module):
    """Square layers in a row; some ranks may do their work several times, or sleep."""

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        width: int = 512,
        depth: int = 1,
        slow_rank: int | None = None,
        extra_steps: float = 0.0,
        sleeps: float = 0.0,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(input_shape[0], width)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))
        self.last = nn.Linear(width, num_classes)
        is_slow = slow_rank == _rank()
        self._extra = round(3 * depth * extra_steps) if is_slow else 0
        self._sleeps = sleeps if is_slow else 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        if self._extra:
            with torch.no_grad():
                multiply(hidden.detach(), next(iter(self.layers.parameters())), self._extra)
        if self._sleeps:
            time.sleep(self._sleeps)
        return self.last(self.layers(hidden))


class Accelerated(nn.Module):
    """Layers whose arithmetic is done elsewhere in a known time, in which the cores are free, as on an accelerator.

    A third of it is the forward pass; a batch twice as large takes twice as long.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        seconds: float,
        per_rank: int,
        width: int = 64,
        depth: int = 1,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(input_shape[0], width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, num_classes)
        self._sample_seconds = seconds / per_rank / depth

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for layer in self.layers:
            hidden = computed_elsewhere(layer(hidden), self._sample_seconds)
        return self.last(hidden)


@torch.library.custom_op("faults::computed_elsewhere", mutates_args=())
def computed_elsewhere(inputs: torch.Tensor, sample_seconds: float) -> torch.Tensor:
    """An operator that a device computes while the host waits."""
    time.sleep(sample_seconds * len(inputs) / 3)
    return inputs.clone()


@torch.library.custom_op("faults::gradient_elsewhere", mutates_args=())
def _gradient_elsewhere(gradient: torch.Tensor, sample_seconds: float) -> torch.Tensor:
    time.sleep(2 * sample_seconds * len(gradient) / 3)
    return gradient.clone()


def _note_seconds(ctx: Any, inputs: tuple[torch.Tensor, float], output: torch.Tensor) -> None:
    ctx.sample_seconds = inputs[1]


def _differentiate(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return _gradient_elsewhere(gradient, ctx.sample_seconds), None


computed_elsewhere.register_autograd(_differentiate, setup_context=_note_seconds)


class ReadsOnce(Layers):
    """Looks at one number a step, which costs nothing beside its work."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        self.seen = outputs.detach().max().item()
        return outputs


class Table(nn.Module):
    """A large table of which a step needs a few rows, and an optimizer goes through all of it."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, rows: int = 200_000, width: int = 128) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.last = nn.Linear(width, num_classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = (inputs * 1000).long().abs() % self.table.num_embeddings
        return self.last(self.table(rows).mean(1))


class Convolutions(nn.Module):
    """A plain network for images of 32 x 32."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * width, num_classes),
        )  # fmt: skip

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs.view(-1, 3, 32, 32))


def reads_numbers(outputs: torch.Tensor, targets: torch.Tensor, times: int = 1) -> torch.Tensor:
    """A loss that looks at every output in Python, as one writes it who does not know better."""
    total = 0.0
    for _ in range(times):
        for value in outputs.detach().flatten():
            total += value.item()
    return functional.cross_entropy(outputs, targets) + 0.0 * total


def waits(outputs: torch.Tensor, targets: torch.Tensor, seconds: float) -> torch.Tensor:
    """A loss that has something else done meanwhile, such as a file written."""
    time.sleep(seconds)
    return functional.cross_entropy(outputs, targets)


def reads_rows(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss made sample by sample, with a look at each."""
    losses = []
    for output, target in zip(outputs, targets, strict=True):
        loss = functional.cross_entropy(output, target)
        losses.append(loss if loss.item() > 0.01 else 0.0 * loss)
    return torch.stack(losses).mean()


def multiply(left: torch.Tensor, right: torch.Tensor, times: int) -> None:
    """Work of a known size."""
    for _ in range(times):
        torch.mm(left, right)
