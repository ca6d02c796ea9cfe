"""Batches collated from single samples by the worker processes of a DataLoader."""

import atexit
import functools
import multiprocessing
import random
import signal
import sys
from collections.abc import Generator, Iterable, Iterator
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any, NamedTuple

import numpy as np
import torch

from tutti.data.dataset import BatchKey, LoadedBatch, SampleDataset, check_batch
from tutti.errors import TuttiError
from tutti.ranks.device import mix
from tutti.ranks.group import release_tensors
from tutti.ranks.process import end_with_parent

_AHEAD = 2  # batches that each worker may make ahead


def collated_samples(
    dataset: SampleDataset, keys: Iterable[BatchKey], workers: int, seed: int, device: torch.device, per_rank_batch: int
) -> Generator[LoadedBatch, None, None]:
    """Yields batches collated by a DataLoader; its workers end with the last batch, an error or a closed generator.

    A batch of a dataset with `allocate_slots` lies in memory that is used again: it is valid until the next one.
    """
    slots = None
    if workers and sys.platform == "linux" and hasattr(dataset, "allocate_slots"):
        # The batches that workers may make ahead, the one that is in use, and the one that is asked for.
        slots = dataset.allocate_slots(per_rank_batch, _AHEAD * workers + 2)  # pyright: ignore
    loader = torch.utils.data.DataLoader(
        _SeededSamples(dataset, seed, slots),  # pyright: ignore[reportArgumentType]
        batch_sampler=_BatchSampler(keys, slots.count if slots else 1),
        num_workers=workers,
        prefetch_factor=_AHEAD if workers else None,
        collate_fn=_identity,
        worker_init_fn=_start_worker,
        pin_memory=device.type == "cuda",
        # Forked workers share the memory of the dataset and start quickly.
        multiprocessing_context=_WorkerContext() if workers and sys.platform == "linux" else None,
    )
    if workers:
        release_tensors()  # a Gloo thread that waits for the GIL during a fork can deadlock a worker
        _kill_at_exit()
    batches = iter(loader)
    try:
        for made in batches:
            if made.error is not None:
                raise made.error
            yield made._replace(pair=slots.take(made.pair)) if slots and made.pair else made
    finally:
        if workers:  # torch ends them when the iterator is garbage-collected, which a traceback can delay
            batches._shutdown_workers()  # pyright: ignore[reportAttributeAccessIssue]


class _Request(NamedTuple):
    slot: int
    epoch: int
    ids: np.ndarray


class _BatchSampler:
    """Batch sampler of a DataLoader: the epoch and the samples of every batch."""

    def __init__(self, keys: Iterable[BatchKey], slots: int) -> None:
        self._keys, self._slots = keys, slots

    def __iter__(self) -> Iterator[Any]:
        for number, (epoch, ids) in enumerate(self._keys):
            yield _Request(number % self._slots, epoch, ids)


class _SeededSamples:
    """Seeds the random generators by (seed, epoch, sample) before each sample, so that workers do not matter."""

    def __init__(self, dataset: Any, seed: int, slots: Any = None) -> None:
        self._dataset = dataset
        self._seed = seed
        self._slots = slots
        self._collate = getattr(dataset, "collate", torch.utils.data.default_collate)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, request: _Request) -> LoadedBatch:
        """Returns a whole batch; errors are returned, not raised, because torch would wrap them in a traceback."""
        noted = len(getattr(self._dataset, "skipped", None) or ())
        try:
            batch = self._fill(self._slots, request) if self._slots else self._collated(request)
        except TuttiError as error:
            return LoadedBatch(None, error=error)
        return LoadedBatch(batch, _take_skipped(self._dataset, noted))

    def _collated(self, request: _Request) -> Any:
        samples, ids = [], request.ids.tolist()
        for sample in ids:
            self._seed_generators(request.epoch, sample)
            samples.append(self._dataset[sample])
        if request.epoch < 0:  # validation may leave samples out, a training step may not
            samples = [sample for sample in samples if sample is not None]
        batch = self._collate(samples) if samples else None
        check_batch(self._dataset, batch, ids)
        return batch

    def _fill(self, slots: Any, request: _Request) -> Any:
        """Has the dataset write samples into a slot; such a dataset draws from Python's generator alone."""
        labels: list[int] = []
        for sample in request.ids.tolist():
            random.seed(mix(self._seed, request.epoch + 1, sample))
            label = self._dataset.read_into(sample, slots.place(request.slot, len(labels)))
            if label is not None:
                labels.append(label)
        return slots.fill(request.slot, labels) if labels else None

    def _seed_generators(self, epoch: int, sample: int) -> None:
        value = mix(self._seed, epoch + 1, sample)
        random.seed(value)
        np.random.seed(value % (1 << 32))
        torch.default_generator.manual_seed(value)


class _Worker(ForkProcess):
    """A worker process. It ignores SIGTERM, by which torch and Python end those that they could not ask to end."""


class _WorkerContext(ForkContext):
    Process = _Worker


@functools.cache
def _kill_at_exit() -> None:
    """Has this process kill the workers that are left at its exit, before Python waits for them."""
    atexit.register(_kill_workers)


def _kill_workers() -> None:
    """Kills the workers of a loader that was interrupted while it began or ended."""
    for process in multiprocessing.active_children():
        if isinstance(process, _Worker):
            process.kill()


def _start_worker(_: int) -> None:
    """Has the kernel end this worker when the thread that started it ends; signals to all processes are left to that.

    The rank may need batches until it has saved.
    """
    end_with_parent()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    sys.excepthook = _report_error


def _report_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Prints an error of a worker; Python's thread that hands over tensors also reports that the rank has closed."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)


def _identity(made: Any) -> Any:
    return made


def _take_skipped(dataset: Any, noted: int) -> tuple[str, ...]:
    """Removes and returns the entries of the dataset's `skipped` list after the first `noted`."""
    names = getattr(dataset, "skipped", None) or []
    taken = tuple(names[noted:])
    del names[noted:]
    return taken
