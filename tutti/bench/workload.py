"""A recipe prepared for measurement on one rank: its learner and loader, and the step that each phase repeats."""

import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tutti.bench.session import Session
from tutti.config.plan import Plan
from tutti.config.run import RunConfig
from tutti.data.dataset import BatchDataset
from tutti.data.loader import Loader, RankBatch, to_device
from tutti.data.order import make_order
from tutti.parallel.ddp import HostMemory, share_memory
from tutti.ranks.device import applies, set_threads
from tutti.runs.step_parts import StepPart
from tutti.train.build import agreed, choose_prefetch
from tutti.train.torch import Objects, TorchParts, build_parts

_ENDLESS = 1_000_000  # epochs
_SETTLE_SECONDS = 0.1
_MEGABYTE = 1 << 20
_BUCKET_MB, _FIRST_BUCKET_MB = 25, 1  # torch's own

Step = Callable[[], None]


class Workload:
    """A recipe prepared for measurement; its steps change no weight, since the learning rate is 0."""

    READING = ("read", "whole")  # the phases that need the loader

    def __init__(self, session: Session, config: RunConfig, parts: TorchParts, clock: Callable[[], float]) -> None:
        self.config, self.group, self.device = config, session.group, session.device
        self.on_gpu = session.device.type == "cuda"
        self.plan: Plan = dataclasses.replace(parts.plan, epochs=_ENDLESS)
        self.data = parts.train_data
        self.learner = parts.make_learner(config, self.group, self.device)
        self.learner.model.train()
        self._prefetch = choose_prefetch(config, self.device)
        self._clock = clock
        self._memory: HostMemory | None = None
        self._batches: Iterator[RankBatch] | None = None  # of the phase read, for the phase whole after it
        try:
            self.cached: RankBatch = next(self._open_reader())
        finally:
            self._close_reader()
        self._host_batch = _map_tensors(self.cached.micro_batches, lambda tensor: tensor.cpu())
        self._buckets = self._make_buckets()

    # The phases: each is a context manager that yields the step to repeat.

    def phases(self) -> dict[str, Callable[[], Any]]:
        """The phases that exist on this device and number of ranks, by name."""
        found: dict[str, Callable[[], Any]] = {"copy": self.copying} if self.on_gpu else {}
        last: dict[str, Callable[[], Any]] = {"read": self.reading, "whole": self.training}  # with the same loader
        if not self.plan.layout.is_data_parallel:  # ranks compute together: nothing of a step can be repeated alone
            return found | last
        several = self.group.world_size > 1 and self.config.ddp.communicate
        found["compute"] = self.computing
        # Another batch size would be compiled again, and on a GPU its kernels selected again, which takes a minute.
        if not self.on_gpu and not applies(self.config.speed.compile, self.device):
            found["double"] = self.doubling
        if several:
            found |= {"exchange": self.exchanging, "communicate": self.communicating}
        return found | last

    def multiple(self, phase: str) -> int:
        """A number of which the steps of a phase are a multiple, so that every loader process has made as many."""
        return max(1, self._workers) if phase in self.READING else 1

    @contextmanager
    def reading(self) -> Iterator[Step]:
        """The loader alone, which stays open for a phase of whole steps after this one."""
        batches = self._open_reader()
        yield lambda: void(next(batches))

    def settle(self, phase: str) -> None:
        """Consume the batches that the loader has made while ranks waited for each other to begin."""
        if phase != "read" or self._batches is None:
            return
        end = self._clock() + _SETTLE_SECONDS
        for _ in range(self._made_ahead):
            next(self._batches)
            if self._clock() > end:
                break  # a loader that takes so long had none ready

    @contextmanager
    def copying(self) -> Iterator[Step]:
        """A batch from pinned memory to the GPU."""
        pinned = _map_tensors(self._host_batch, lambda tensor: tensor.pin_memory())
        yield lambda: void(to_device(pinned, self.device))

    @contextmanager
    def computing(self) -> Iterator[Step]:
        """Forward, backward and update on a batch in memory, without communication."""
        with self.learner.silent():
            yield lambda: self._step(self.cached)

    @contextmanager
    def doubling(self) -> Iterator[Step]:
        """The same with a batch twice as large."""
        pairs = [
            _map_tensors(pair, lambda tensor: torch.cat([tensor, tensor]) if tensor.ndim else tensor)
            for pair in self.cached.micro_batches
        ]
        double = dataclasses.replace(self.cached, micro_batches=pairs)
        with self.learner.silent():
            yield lambda: self._step(double)

    @contextmanager
    def exchanging(self) -> Iterator[Step]:
        """The all-reduce of the gradient buckets of a step, and nothing else."""
        yield self._exchange

    @contextmanager
    def communicating(self) -> Iterator[Step]:
        """Forward, backward and update on a batch in memory, with gradients averaged over ranks."""
        yield lambda: self._step(self.cached)

    @contextmanager
    def training(self) -> Iterator[Step]:
        """A step as in training: its batch, gradients, update."""
        timer = self.learner.timer
        batches = self._batches or self._open_reader()

        def step() -> None:
            timer.begin()
            batch = next(batches)
            timer.ended(StepPart.DATA)
            self._step(batch)

        try:
            yield step
        finally:
            self._close_reader()

    @property
    def stages(self) -> tuple[str, ...]:
        """The layers of each stage; none where the model is not in stages."""
        return self.learner.stages

    @property
    def gradient_bytes(self) -> int:
        return sum(bucket.nbytes for bucket in self._buckets)

    @property
    def batches_are_samples(self) -> bool:
        return not isinstance(self.data, BatchDataset)

    def synchronise(self) -> None:
        """Wait until the device has finished all submitted work."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def one_step(self) -> None:
        """One step without communication, to count its operations."""
        with self.learner.silent():
            self._step(self.cached)

    def _step(self, batch: RankBatch) -> None:
        self.learner.forward_backward(batch, measure=False)
        self.learner.clip_gradients()
        self.learner.update_weights(0.0)

    def _open_reader(self) -> Iterator[RankBatch]:
        """Batches from the first on."""
        self._close_reader()
        order = make_order(self.config, self.plan, self.data)
        rank, workers = self.group.rank, self.config.data.workers
        self._batches = Loader(self.data, self.plan, order, rank, self.device, workers, self._prefetch).steps(0)
        return self._batches

    def _close_reader(self) -> None:
        """End the processes and the thread of the loader."""
        if self._batches is not None:
            self._batches.close()  # pyright: ignore[reportAttributeAccessIssue]
        self._batches = None

    @property
    def _workers(self) -> int:
        return self.config.data.workers if self.batches_are_samples else 0

    @property
    def _made_ahead(self) -> int:
        """The most batches that are ready at any time."""
        prefetch = self._prefetch if self._workers or not self.batches_are_samples else 0
        return 2 * self._workers + prefetch  # torch's loader prefetches two batches for each worker

    def _make_buckets(self) -> list[torch.Tensor]:
        """Tensors with the sizes of DDP's gradient buckets, in the order in which they are reduced."""
        most = (self.config.ddp.bucket_mb or _BUCKET_MB) * _MEGABYTE
        limit = most if self.config.ddp.bucket_mb else _FIRST_BUCKET_MB * _MEGABYTE
        sizes, size = [], 0
        parameters = [each for each in self.learner.model.parameters() if each.requires_grad]
        for parameter in reversed(parameters):
            size += parameter.numel()
            if size * parameter.element_size() >= limit:
                sizes.append(size)
                size, limit = 0, most
        sizes += [size] if size else []
        return [torch.zeros(size, dtype=parameters[0].dtype, device=self.device) for size in sizes]

    def _exchange(self) -> None:
        buckets = self._buckets
        direct = self._shared_memory()
        waits = [dist.all_reduce(bucket, async_op=True) for bucket in (buckets[:-1] if direct else buckets)]
        if direct:
            direct.average(buckets[-1])
        for wait in waits:
            assert wait is not None
            wait.wait()

    def _shared_memory(self) -> HostMemory | None:
        """The shared memory in which the last bucket is averaged, if it is, as in a training step."""
        if self.on_gpu or not self.config.ddp.direct:
            return None
        if self._buckets[-1].nbytes * self.group.world_size > _MEGABYTE:
            return None
        if self._memory is None:
            self._memory = share_memory(self.group, _MEGABYTE)
        return self._memory

    def close(self) -> None:
        """Release memory for the next workload."""
        self._close_reader()
        if self._memory:
            self._memory.close()
        self.__dict__.clear()
        gc.collect()
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@contextmanager
def open_workload(session: Session, config: RunConfig, clock: Callable[[], float]) -> Iterator[Workload]:
    """Prepare a recipe on every rank, or raise the same error on all; every rank must call this."""
    group = session.group
    set_threads(config.runtime, session.placement)
    agreed(group, config.data.prepare if group.is_first else lambda: None)
    parts = agreed(group, functools.partial(build_parts, config, Objects(), session.placement, session.device))
    workload = agreed(group, functools.partial(Workload, session, config, parts, clock))
    del parts  # which the workload releases when it is closed
    try:
        yield workload
    finally:
        workload.close()


def void(_: Any) -> None:
    """Discard a value."""


def _map_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A batch with a function applied to every tensor."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {key: _map_tensors(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [_map_tensors(value, change) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch
