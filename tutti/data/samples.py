"""Batches made sample by sample, in this process or in workers, with random choices that are the sample's own."""

import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from tutti.data.dataset import SampleDataset, check_batch
from tutti.errors import TuttiError
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
