"""Batches for a rank: gathered whole from memory or collated sample by sample, prepared ahead of the step."""

import itertools
import queue
import random
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from tutti.config.plan import Plan
from tutti.data.dataset import ArrayDataset, BatchDataset, SampleDataset, check_batch
from tutti.data.order import Draws, SampleOrder, evaluation_ids
from tutti.errors import ConfigError, TuttiError
from tutti.ranks.group import release_tensors
from tutti.ranks.process import end_with_parent
from tutti.ranks.seeds import mix

Share = tuple[int, np.ndarray]  # epoch (-1: no augmentation) and sample ids


class Made(NamedTuple):
    """A batch on its way from the process that made it."""

    pair: Any  # None where every sample was passed over
    skipped: tuple[str, ...] = ()
    error: TuttiError | None = None


def collated_samples(
    dataset: SampleDataset, shares: Iterable[Share], workers: int, seed: int, device: torch.device
) -> Iterator[Made]:
    """Batches put together from samples; workers end with the last batch, an error or a loop that breaks."""
    loader = torch.utils.data.DataLoader(
        _SeededSamples(dataset, seed),  # pyright: ignore[reportArgumentType]
        batch_sampler=_Keys(shares),
        num_workers=workers,
        collate_fn=_as_it_is,
        worker_init_fn=_start_worker,
        pin_memory=device.type == "cuda",
        # Forked workers share the dataset with this process, and start at once.
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
    )
    if workers:
        release_tensors()  # a thread of Gloo that wants Python's lock while this process is forked can stop a worker
    batches = iter(loader)
    try:
        for made in batches:
            if made.error is not None:
                raise made.error
            yield made
    finally:
        if workers:  # torch ends them when the iterator is collected, which an error can put off for long
            batches._shutdown_workers()  # pyright: ignore[reportAttributeAccessIssue]


class _Keys:
    """The (epoch, sample) keys of every batch, for a DataLoader's batch sampler."""

    def __init__(self, shares: Iterable[Share]) -> None:
        self._shares = shares

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for epoch, ids in self._shares:
            yield [(epoch, int(sample)) for sample in ids]


class _SeededSamples:
    """Batches of samples whose random choices depend on (seed, epoch, sample), whichever process makes them."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._collate = getattr(dataset, "collate", torch.utils.data.default_collate)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, keys: list[tuple[int, int]]) -> Made:
        """A whole batch; an error meant for the user travels as it is, since torch would wrap it in a traceback."""
        noted = len(getattr(self._dataset, "skipped", None) or ())
        try:
            samples = [self._sample(*key) for key in keys]
        except TuttiError as error:
            return Made(None, error=error)
        if keys[0][0] < 0:  # an evaluation may have fewer samples; a step may not
            samples = [sample for sample in samples if sample is not None]
        batch = self._collate(samples) if samples else None
        try:
            check_batch(self._dataset, batch, [sample for _, sample in keys])
        except TuttiError as error:
            return Made(None, error=error)
        return Made(batch, _take_skipped(self._dataset, noted))

    def _sample(self, epoch: int, sample: int) -> Any:
        value = mix(self._seed, epoch + 1, sample)
        random.seed(value)
        np.random.seed(value % (1 << 32))
        torch.default_generator.manual_seed(value)
        return self._dataset[sample]


def _start_worker(_: int) -> None:
    """A worker ends with the thread that started it, however that ends; torch sets it to one thread."""
    end_with_parent()


def _as_it_is(made: Any) -> Any:
    return made


def _take_skipped(dataset: Any, noted: int) -> tuple[str, ...]:
    """The files that a dataset has put on its list of those it passed over, beyond what was noted, taken off it."""
    names = getattr(dataset, "skipped", None) or []
    taken = tuple(names[noted:])
    del names[noted:]
    return taken


def note_skipped(dataset: Any, names: tuple[str, ...]) -> None:
    """Put files that were passed over, here or in a worker, on the list for whoever reports them."""
    if names:
        dataset.skipped.extend(names)


def prefetched(items: Iterator[Any], depth: int) -> Iterator[Any]:
    """The same items, up to `depth` of them made ahead by a thread."""
    if depth == 0:
        yield from items
        return
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()  # (item, None), or (None, what ended the thread)
    room: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True for each item that may be made, False to stop
    for _ in range(depth):
        room.put(True)

    def work() -> None:
        end: BaseException = StopIteration()
        try:
            while room.get():
                ready.put((next(items), None))
        except BaseException as error:  # raised again where the item is taken
            end = error
        finally:
            if isinstance(items, Generator):
                items.close()  # in this thread, which has started what the items come from
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
            room.put(True)
            yield item
    finally:
        room.put(False)
        thread.join()


Pair = tuple[Any, Any]
Source = Callable[[Iterable[Share]], Iterator[Made]]


@dataclass(frozen=True)
class RankBatch:
    """One rank's part of a global batch, cut into micro-batches."""

    step: int
    epoch: int
    ids: np.ndarray
    micro_batches: list[Pair]
    skipped: tuple[str, ...] = ()  # files that the dataset passed over
    made: torch.Event | None = None  # where it was made on a stream of its own

    def arrive(self) -> None:
        """Have what follows on the GPU wait until the batch is there."""
        if self.made is None:
            return
        stream = torch.cuda.current_stream()
        stream.wait_event(self.made)
        for tensor in tensors_in(self.micro_batches):
            tensor.record_stream(stream)  # its memory is free when this stream is done with it


class Loader:
    """Gives a rank its part of every global batch, and its part of the validation samples."""

    def __init__(
        self, dataset: Any, plan: Plan, order: SampleOrder, rank: int, device: torch.device, workers: int, prefetch: int
    ) -> None:
        self.dataset = dataset
        self._plan = plan
        self._order = order
        self._rank = rank
        self._device = device
        # Samples made in this process seed its generators, which must not happen beside a forward pass.
        self._prefetch = prefetch if workers or isinstance(dataset, BatchDataset) else 0
        self._source = _open(dataset, workers, order.seed, device)

    def steps(self, first_step: int) -> Iterator[RankBatch]:
        """The batches from a step to the end of the run."""
        numbers = range(first_step, self._plan.total_steps)
        shares = ((self._order.epoch_of(step), self._order.rank_ids(step, self._rank)) for step in numbers)
        asked, kept = itertools.tee(shares)

        def batches() -> Iterator[RankBatch]:
            stream = self._own_stream()
            for step, (epoch, ids), made in zip(numbers, kept, self._source(asked), strict=True):
                inputs, targets = _finished(self.dataset, made.pair, self._device)
                size = self._plan.micro_batch
                micro_batches = list(zip(_split(inputs, size), _split(targets, size), strict=True))
                event = stream.record_event() if stream else None
                yield RankBatch(step, epoch, ids, micro_batches, made.skipped, event)

        for batch in prefetched(batches(), self._prefetch):
            batch.arrive()
            note_skipped(self.dataset, batch.skipped)  # when it is taken: what is made ahead may never be used
            yield batch

    def _own_stream(self) -> torch.cuda.Stream | None:
        """In the thread that makes batches ahead on a GPU, a stream on which copies and crops run beside the step."""
        if self._device.type != "cuda":
            return None
        torch.cuda.set_device(self._device)  # each thread has a device of its own choice
        if not self._prefetch:
            return None
        stream = torch.cuda.Stream(self._device)
        torch.cuda.set_stream(stream)
        return stream


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts, such as a batch."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict | list | tuple):
        for value in values.values() if isinstance(values, dict) else values:
            yield from tensors_in(value)


def evaluation_batches(
    dataset: Any, rank: int, world_size: int, per_rank_batch: int, device: torch.device, workers: int, seed: int
) -> Iterator[Pair]:
    """One rank's part of an evaluation, without augmentation; together the ranks see every sample once."""
    ids = evaluation_ids(len(dataset), rank, world_size)
    shares = [(-1, ids[start : start + per_rank_batch]) for start in range(0, len(ids), per_rank_batch)]
    workers = min(workers, len(shares)) if len(shares) > 1 else 0  # a worker makes whole batches
    for made in _open(dataset, workers, seed, device)(iter(shares)):
        note_skipped(dataset, made.skipped)
        if made.pair is not None:
            yield _finished(dataset, made.pair, device)


def _open(dataset: Any, workers: int, seed: int, device: torch.device) -> Source:
    """Something that turns epochs and ids into batches."""
    if isinstance(dataset, BatchDataset):
        return lambda shares: _whole_batches(dataset, shares, seed)
    if isinstance(dataset, SampleDataset):
        return lambda shares: collated_samples(dataset, shares, workers, seed, device)
    raise ConfigError(
        f"the dataset {type(dataset).__name__} has neither batch(ids, draws) nor __getitem__(index), with __len__: "
        "expected one of the two. See docs/own-model.md."
    )


def _whole_batches(dataset: BatchDataset, shares: Iterable[Share], seed: int) -> Iterator[Made]:
    for epoch, ids in shares:
        chosen = torch.from_numpy(ids)
        made = dataset.batch(chosen, Draws(seed, epoch, chosen) if epoch >= 0 else None)
        if not isinstance(dataset, ArrayDataset):  # whose labels were looked at when it was made
            check_batch(dataset, made, ids.tolist())
        yield Made(made)


def _finished(dataset: Any, pair: Any, device: torch.device) -> Pair:
    """Inputs and targets on the device; the dataset may have a last touch to give to the inputs there."""
    inputs, targets = to_device(pair[0], device), to_device(pair[1], device)
    return (dataset.finish(inputs) if hasattr(dataset, "finish") else inputs), targets


def to_device(batch: Any, device: torch.device) -> Any:
    """Every tensor of a batch on a device; from pinned memory the copy runs beside the step."""
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
    """A batch cut into micro-batches along its first dimension."""
    if isinstance(batch, torch.Tensor):
        return list(batch.split(size)) if len(batch) != size else [batch]
    if isinstance(batch, dict):
        parts = {key: _split(value, size) for key, value in batch.items()}
        return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
    if isinstance(batch, tuple | list):
        return [_like(batch, values) for values in zip(*(_split(value, size) for value in batch), strict=True)]
    raise ConfigError(f"a batch holds a {type(batch).__name__}: expected tensors, or tuples, lists and dicts of them.")


def _like(batch: Any, values: Iterable[Any]) -> Any:
    """Values in the same kind of sequence, named tuples included."""
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
