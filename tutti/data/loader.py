"""Batches of a rank: indexed from memory or collated from samples by workers, and prefetched."""

import itertools
import os
import queue
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tutti.config.plan import Plan
from tutti.data.dataset import (
    ArrayDataset,
    BatchDataset,
    BatchKey,
    LoadedBatch,
    Part,
    SampleDataset,
    check_batch,
    find_part,
    tensors_in,
)
from tutti.data.order import Draws, SampleOrder, evaluation_ids
from tutti.errors import ConfigError

_END_SECONDS = 30.0  # for the batch that the prefetch thread is making
_MOST_WORKERS = 64  # of a rank, or as many as the host has cores


def note_skipped(dataset: Any, names: tuple[str, ...]) -> None:
    """Adds files that a worker skipped to the dataset's `skipped` list of this process."""
    if names:
        dataset.skipped.extend(names)


def prefetched(items: Iterator[Any], depth: int) -> Generator[Any, None, None]:
    """Yields the same items, up to `depth` of them computed ahead by a thread."""
    if depth == 0:
        yield from items
        return
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()  # (item, None), or (None, exception that ended the thread)
    permits: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True for each item that may be computed, False to stop
    for _ in range(depth):
        permits.put(True)

    def work() -> None:
        end: BaseException = StopIteration()
        try:
            while permits.get():
                ready.put((next(items), None))
        except BaseException as error:  # raised again in the consumer
            end = error
        finally:
            if isinstance(items, Generator):
                items.close()  # in this thread, which started the workers
        ready.put((None, end))

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, end = ready.get()
            if isinstance(end, StopIteration):
                return
            if end is not None:
                raise end
            permits.put(True)
            yield item
    finally:
        permits.put(False)
        thread.join(_END_SECONDS)
        if thread.is_alive():  # in a dataset that does not return; as a daemon it ends with the process
            print(f"warning: the prefetch thread has not ended in {_END_SECONDS:g} s", file=sys.stderr)


def check_workers(workers: int) -> None:
    """Refuse more loader processes than a host can run."""
    cores = os.cpu_count() or 1
    most = max(_MOST_WORKERS, cores)
    if workers > most:
        raise ConfigError(
            f"data.workers={workers}: expected at most {most} loader processes on each rank; this host has {cores} "
            f"cores. Set data.workers={min(cores, most)} or less."
        )


Pair = tuple[Any, Any]
# Generators are closed, not left to their destructors, which would discard an interrupt that arrives meanwhile.
Source = Callable[[Iterable[BatchKey]], Generator[LoadedBatch, None, None]]


@dataclass(frozen=True)
class RankBatch:
    """One rank's part of a global batch, cut into micro-batches."""

    step: int
    epoch: int
    ids: np.ndarray
    micro_batches: list[Pair]
    skipped: tuple[str, ...] = ()  # corrupt files that the dataset left out
    ready: torch.Event | None = None  # if it was prepared on a CUDA stream of its own

    def wait_on_stream(self) -> None:
        """Makes the current CUDA stream wait until the batch is ready."""
        if self.ready is None:
            return
        stream = torch.cuda.current_stream()
        stream.wait_event(self.ready)
        for tensor in tensors_in(self.micro_batches):
            tensor.record_stream(stream)  # the allocator reuses the memory only after this stream


class Loader:
    """Yields the part of every global batch that belongs to this rank."""

    def __init__(
        self, dataset: Any, plan: Plan, order: SampleOrder, rank: int, device: torch.device, workers: int, prefetch: int
    ) -> None:
        self.dataset = dataset
        self._plan = plan
        self.order = order
        self._rank = rank
        self._device = device
        self._part = find_part(plan.layout, rank)
        # Samples made in this process seed its generators, which must not happen during a forward pass.
        self._prefetch = prefetch if workers or isinstance(dataset, BatchDataset) else 0
        self._source = _open(dataset, workers, order.seed, device, plan.per_rank_batch)

    def steps(self, first_step: int) -> Iterator[RankBatch]:
        """The batches from a step to the end of the run."""
        numbers = range(first_step, self._plan.total_steps)
        requested, kept = itertools.tee(self._keys(numbers))

        def batches() -> Iterator[RankBatch]:
            stream = self._own_stream()
            with closing(self._source(requested)) as source:
                for step, (epoch, ids), made in zip(numbers, kept, source, strict=True):
                    inputs, targets = _on_device(self.dataset, made.pair, self._device, self._part)
                    size = self._plan.micro_batch
                    micro_batches = list(zip(_split(inputs, size), _split(targets, size), strict=True))
                    event = stream.record_event() if stream else None
                    yield RankBatch(step, epoch, ids, micro_batches, made.skipped, event)

        with closing(prefetched(batches(), self._prefetch)) as ahead:
            for batch in ahead:
                batch.wait_on_stream()
                note_skipped(self.dataset, batch.skipped)  # only now: a prefetched batch may never be used
                yield batch

    def _keys(self, numbers: range) -> Iterator[BatchKey]:
        """The epoch and the sample ids of each step; a dataset that reads ahead is told of the blocks that follow."""
        read_ahead = getattr(self.dataset, "read_ahead", None)
        for step, blocks in zip(numbers, self.order.ahead(numbers.start), strict=True):
            if blocks and read_ahead:
                read_ahead(blocks)
            yield self.order.epoch_of(step), self.order.rank_ids(step, self._rank)

    def _own_stream(self) -> torch.cuda.Stream | None:
        """Sets a CUDA stream for the prefetch thread, so that copies and crops overlap with the step."""
        if self._device.type != "cuda":
            return None
        torch.cuda.set_device(self._device)  # the current device is a property of the thread
        if not self._prefetch:
            return None
        stream = torch.cuda.Stream(self._device)
        torch.cuda.set_stream(stream)
        return stream


def evaluation_batches(
    dataset: Any,
    rank: int,
    world_size: int,
    per_rank_batch: int,
    device: torch.device,
    workers: int,
    seed: int,
    part: Part | None = None,
) -> Iterator[Pair]:
    """Yields this rank's samples of a dataset without augmentation; all ranks together see every sample once."""
    ids = evaluation_ids(len(dataset), rank, world_size)
    keys = [(-1, ids[start : start + per_rank_batch]) for start in range(0, len(ids), per_rank_batch)]
    workers = min(workers, len(keys)) if len(keys) > 1 else 0  # a worker loads whole batches
    with closing(_open(dataset, workers, seed, device, per_rank_batch)(iter(keys))) as source:
        for made in source:
            note_skipped(dataset, made.skipped)
            if made.pair is not None:
                yield _on_device(dataset, made.pair, device, part)


def same_number(batches: Iterator[Pair], some_have: Callable[[bool], bool], spare: Pair) -> Iterator[tuple[Pair, bool]]:
    """Yields batches with whether they count, as many on each rank; a rank that has no more repeats one.

    `some_have` tells whether any rank has a batch left; every rank enters.
    """
    while True:
        batch = next(batches, None)
        if not some_have(batch is not None):
            return
        spare = batch or spare
        yield spare, batch is not None


def _open(dataset: Any, workers: int, seed: int, device: torch.device, per_rank_batch: int) -> Source:
    """Returns the function that turns (epoch, ids) into batches for this kind of dataset."""
    if isinstance(dataset, BatchDataset):
        return lambda keys: _whole_batches(dataset, keys, seed)
    if isinstance(dataset, SampleDataset):
        from tutti.data.workers import collated_samples

        return lambda keys: collated_samples(dataset, keys, workers, seed, device, per_rank_batch)
    raise ConfigError(
        f"the dataset {type(dataset).__name__} has neither batch(ids, draws) nor __getitem__(index), with __len__: "
        "expected one of the two. See docs/own-model.md."
    )


def _whole_batches(dataset: BatchDataset, keys: Iterable[BatchKey], seed: int) -> Generator[LoadedBatch, None, None]:
    for epoch, ids in keys:
        chosen = torch.from_numpy(ids)
        made = dataset.batch(chosen, Draws(seed, epoch, chosen) if epoch >= 0 else None)
        if not isinstance(dataset, ArrayDataset):  # its labels were checked when it was created
            check_batch(dataset, made, ids.tolist())
        yield LoadedBatch(made)


def _on_device(dataset: Any, pair: Any, device: torch.device, part: Part | None = None) -> Pair:
    """Returns inputs and targets on the device, after the dataset's `finish` if it has one.

    Of a dataset that does not give parts of samples itself, the part of this rank is cut.
    """
    inputs, targets = to_device(pair[0], device), to_device(pair[1], device)
    inputs = dataset.finish(inputs) if hasattr(dataset, "finish") else inputs
    if part is None or getattr(dataset, "part", None) is not None:
        return inputs, targets
    return part.cut_batch(inputs, targets)


def to_device(batch: Any, device: torch.device) -> Any:
    """Copies every tensor of a batch to a device; copies to a GPU are asynchronous, from pinned memory."""
    if isinstance(batch, torch.Tensor):
        if device.type == "cuda" and batch.device.type == "cpu":
            pinned = batch if batch.is_pinned() else batch.pin_memory()
            return pinned.to(device, non_blocking=True)
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return _like(batch, [to_device(value, device) for value in batch])
    return batch


def _split(batch: Any, size: int) -> list[Any]:
    """Splits a batch into micro-batches along its first dimension."""
    if isinstance(batch, torch.Tensor):
        return list(batch.split(size)) if len(batch) != size else [batch]
    if isinstance(batch, dict):
        parts = {key: _split(value, size) for key, value in batch.items()}
        return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
    if isinstance(batch, tuple | list):
        return [_like(batch, values) for values in zip(*(_split(value, size) for value in batch), strict=True)]
    raise ConfigError(f"a batch holds a {type(batch).__name__}: expected tensors, or tuples, lists and dicts of them.")


def _like(batch: Any, values: Iterable[Any]) -> Any:
    """Returns values in a sequence of the same type as `batch`, including named tuples."""
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def peek(batches: Iterator[RankBatch]) -> tuple[RankBatch | None, Iterator[RankBatch]]:
    """The first batch, and all batches with that one among them."""
    first = next(batches, None)
    return first, batches if first is None else itertools.chain(
        iter((first,)), batches
    )  # a bare tuple would stay in memory
