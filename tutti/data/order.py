"""Sample order and random numbers of samples, as pure functions of (seed, epoch, sample)."""

import functools
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tutti.config.plan import Plan
from tutti.config.run import RunConfig
from tutti.errors import ConfigError, DataError, TrainingError
from tutti.ranks.device import GOLDEN_GAMMA, mix, splitmix64

STORED_BELOW = 1 << 24  # samples, or blocks: 128 MiB as numbers of 64 bits
_DRAWN_BELOW = 1 << 16  # ids that are permuted at once: 512 KiB; rounds on so few numbers are not uniform
_ROUNDS = 8
_LARGEST_WORD = 2**32 - 1  # NumPy seeds generators with words of 32 bits, and appends zeros
_ORDER = 0x6F72646572  # keeps the keys of orders apart from those of draws

Take = Callable[[int, int], np.ndarray]  # (first position, number of positions) -> ids


@dataclass(frozen=True)
class Shuffle:
    """How the samples of an epoch are ordered; checkpoints keep the name."""

    name: str
    begin: Callable[[int, int, int], Take]  # (samples, seed, epoch) -> the order of that epoch


class SampleOrder:
    """The sample ids of every step and rank."""

    def __init__(self, plan: Plan, seed: int, shuffle: Shuffle | None = None) -> None:
        self._plan = plan
        self.seed = seed
        self._shuffle = shuffle or choose_shuffle(plan.train_samples)
        self._begun: tuple[int, Take] | None = None  # replaced as a whole: another thread may ask for another epoch

    def copy(self) -> "SampleOrder":
        """Returns the same order, which may be in another epoch."""
        return SampleOrder(self._plan, self.seed, self._shuffle)

    @property
    def name(self) -> str:
        """What distinguishes this order from others of the same seed, batch and number of samples."""
        return self._shuffle.name

    def epoch_of(self, step: int) -> int:
        return step // self._plan.steps_per_epoch

    def global_ids(self, step: int) -> np.ndarray:
        """Returns the sample ids of a step over all ranks, in order."""
        return self._take(step, 0, self._plan.global_batch)

    def rank_ids(self, step: int, rank: int) -> np.ndarray:
        """Returns the sample ids of a step for one rank; ranks that share samples have the same."""
        size, share = self._plan.per_rank_batch, self._plan.layout.data_rank(rank)
        return self._take(step, share * size, size)

    def ahead(self, first_step: int) -> Iterator[list[tuple[int, int]]]:
        """Yields, for each step to the end of the run, the blocks whose samples are used soon, as ranges of samples.

        Each block comes once an epoch, one window of blocks ahead. An order without blocks yields empty lists.
        """
        plan, told = self._plan, -1  # windows are counted over all epochs
        for step in range(first_step, plan.total_steps):
            epoch, index = divmod(step, plan.steps_per_epoch)
            take, start = self._in_epoch(epoch), index * plan.global_batch
            blocks: list[tuple[int, int]] = []
            if isinstance(take, BlockPermutation):
                here, last = (take.window_of(position) for position in (start, start + plan.global_batch - 1))
                end = min(epoch * take.windows + last + 2, plan.epochs * take.windows)
                for number in range(max(told + 1, epoch * take.windows + here), end):
                    blocks += self._window(*divmod(number, take.windows))
                    told = number
            yield blocks

    def _window(self, epoch: int, number: int) -> list[tuple[int, int]]:
        """Returns the blocks of a window, without leaving the epoch of this order."""
        take = self._begun[1] if self._begun and self._begun[0] == epoch else self.copy()._in_epoch(epoch)
        return take.ranges(number) if isinstance(take, BlockPermutation) else []

    def _take(self, step: int, first: int, count: int) -> np.ndarray:
        epoch, index = divmod(step, self._plan.steps_per_epoch)
        return self._in_epoch(epoch)(index * self._plan.global_batch + first, count)

    def _in_epoch(self, epoch: int) -> Take:
        begun = self._begun
        if begun is None or begun[0] != epoch:
            begun = self._begun = epoch, self._shuffle.begin(self._plan.train_samples, self.seed, epoch)
        return begun[1]


def make_order(config: RunConfig, plan: Plan, dataset: Any, made_with: str | None = None) -> SampleOrder:
    """Returns the order that a recipe names, or, where it leaves that open, the order of the checkpoint `made_with`.

    A dataset in shards may have an attribute `blocks`: the first sample of each shard, ascending from 0.
    """
    data, samples = config.data, plan.train_samples
    if data.shuffle != "blocks":
        known = made_with if data.shuffle == "auto" else data.shuffle
        return SampleOrder(plan, config.seed, _SHUFFLES.get(known or "") or choose_shuffle(samples))
    if data.shuffle_block is not None:
        least = -(-samples // STORED_BELOW)
        if data.shuffle_block < least:
            raise ConfigError(
                f"data.shuffle_block={data.shuffle_block} cuts {samples:,} samples into more than {STORED_BELOW:,} "
                f"blocks: expected {least} samples or more in a block. Set data.shuffle_block={least}."
            )
        firsts = np.arange(0, samples, data.shuffle_block)
        name = f"blocks of {data.shuffle_block}"
    elif (own := getattr(dataset, "blocks", None)) is not None:
        firsts = _check_blocks(own, samples, dataset)
        name = f"{len(firsts)} blocks with sum {zlib.crc32(firsts.astype('<i8').tobytes()):08x}"
    else:
        raise ConfigError(
            f"data.shuffle=blocks: the dataset {data.name!r} has no shards, so that the size of a block is not known. "
            "Set data.shuffle_block, for example to 1024 samples."
        )
    begin = functools.partial(_begin_blocks, np.append(firsts, samples), data.shuffle_window)
    return SampleOrder(plan, config.seed, Shuffle(f"{name} in windows of {data.shuffle_window}", begin))


def choose_shuffle(samples: int) -> Shuffle:
    """Returns the shuffle for a recipe that names none: the stored permutation where it takes less than 128 MiB."""
    return _SHUFFLES["stored" if samples < STORED_BELOW else "keyed"]


def permutation(samples: int, seed: int, epoch: int) -> np.ndarray:
    """Returns all sample ids in the order of an epoch."""
    words = [seed, epoch]
    if seed > _LARGEST_WORD:  # NumPy would take its upper half for the epoch of a smaller seed
        words = [seed & _LARGEST_WORD, seed >> 32, epoch, 1]
    return np.random.Generator(np.random.PCG64(words)).permutation(samples)


def stored_permutation(samples: int, seed: int, epoch: int) -> Take:
    """Returns the order of an epoch as a function of the position, with all sample ids in memory."""
    whole = permutation(samples, seed, epoch)
    return lambda first, count: whole[first : first + count]


def keyed_permutation(samples: int, key: int) -> Take:
    """Returns a permutation as a function of the position, in memory that does not grow with the samples.

    A position is a cell of a nearly square grid. Each round moves its row, or its column, cyclically by a hash of the
    other one, which can be undone: a Feistel network for any number of samples. Cells behind the last sample, fewer
    than a row, are permuted again until they are samples.
    """
    if samples < _DRAWN_BELOW:
        return stored_permutation(samples, key, 0)
    columns = math.isqrt(samples - 1) + 1
    rows = -(-samples // columns)
    keys = [splitmix64((key + (number + 1) * GOLDEN_GAMMA) % 2**64) for number in range(_ROUNDS)]

    def permuted(positions: np.ndarray) -> np.ndarray:
        row, column = positions // columns, positions % columns
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            row = (row + (splitmix64(column + even) >> 1)) % rows
            column = (column + (splitmix64(row + odd) >> 1)) % columns
        ids = row * columns + column
        behind = np.flatnonzero(ids >= samples)
        if len(behind):
            ids[behind] = permuted(ids[behind])
        return ids

    return lambda first, count: permuted(np.arange(first, first + count, dtype=np.uint64)).view(np.int64)


class BlockPermutation:
    """A permutation of blocks, and of the samples within each window of so many blocks.

    Block i holds the samples from boundaries[i] to boundaries[i + 1]. Memory grows with the number of blocks.
    """

    def __init__(self, boundaries: np.ndarray, window: int, key: int) -> None:
        self._boundaries, self._window, self._key = boundaries, window, key
        self._order = permutation(len(boundaries) - 1, key, 0)
        sizes = np.diff(boundaries)[self._order]
        self._starts = np.concatenate(([0], np.cumsum(sizes)))  # positions of the blocks, in their order
        self._edges = np.append(self._starts[:-1:window], self._starts[-1])  # of the windows
        self.windows = len(self._edges) - 1
        self._entered: tuple[int, Take] | None = None  # the window of the last call

    def __call__(self, first: int, count: int) -> np.ndarray:
        """Returns the ids at these positions."""
        parts = [np.empty(0, np.int64)]
        number = self.window_of(first)
        while count:
            begin, end = int(self._edges[number]), int(self._edges[number + 1])
            size = min(count, end - first)
            positions = begin + self._within(number)(first - begin, size)
            place = np.searchsorted(self._starts, positions, side="right") - 1
            parts.append(self._boundaries[self._order[place]] + positions - self._starts[place])
            first, count, number = first + size, count - size, number + 1
        return np.concatenate(parts)

    def window_of(self, position: int) -> int:
        """Returns the number of the window that holds a position."""
        return int(np.searchsorted(self._edges, position, side="right")) - 1

    def ranges(self, number: int) -> list[tuple[int, int]]:
        """Returns the samples of each block of a window: the first, and the first that is not in it."""
        chosen = self._order[number * self._window : (number + 1) * self._window]
        return [(int(self._boundaries[block]), int(self._boundaries[block + 1])) for block in chosen]

    def _within(self, number: int) -> Take:
        entered = self._entered
        if entered is None or entered[0] != number:
            size = int(self._edges[number + 1] - self._edges[number])
            entered = self._entered = number, keyed_permutation(size, mix(self._key, number))
        return entered[1]


def _begin_keyed(samples: int, seed: int, epoch: int) -> Take:
    return keyed_permutation(samples, mix(_ORDER, seed, epoch))


def _begin_blocks(boundaries: np.ndarray, window: int, samples: int, seed: int, epoch: int) -> Take:
    assert boundaries[-1] == samples
    return BlockPermutation(boundaries, window, mix(_ORDER, seed, epoch))


_SHUFFLES = {"stored": Shuffle("stored", stored_permutation), "keyed": Shuffle("keyed", _begin_keyed)}


def _check_blocks(own: Any, samples: int, dataset: Any) -> np.ndarray:
    """Returns the first sample of each block of a dataset; raises DataError if they are not ascending from 0."""
    try:
        firsts = np.asarray(own, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        firsts = np.empty(0, np.int64)
    edges = np.append(firsts, samples)
    if firsts.ndim != 1 or len(firsts) == 0 or firsts[0] != 0 or (np.diff(edges) <= 0).any():
        raise DataError(
            f"the dataset {type(dataset).__name__} has blocks={own!r:.60} with {samples:,} samples: expected the first "
            "sample of each block, ascending from 0 and below the number of samples."
        )
    return firsts


def evaluation_ids(samples: int, rank: int, world_size: int) -> np.ndarray:
    """Returns the sample ids that one rank evaluates; every sample is on exactly one rank."""
    return np.arange(samples * rank // world_size, samples * (rank + 1) // world_size)


def same_number_size(samples: int, world_size: int, size: int) -> int:
    """Returns the smallest size of batches, from `size` on, of which all ranks evaluate the same number."""
    fewest, most = samples // world_size, -(-samples // world_size)
    if not fewest:
        raise TrainingError(
            f"validation on {samples} samples with {world_size} ranks that share the weights: expected a sample for "
            f"each rank. Give {world_size} samples or more, or start {samples} ranks."
        )
    return next(each for each in range(min(size, most), most + 1) if -(-most // each) == -(-fewest // each))


class Draws:
    """Random numbers for the samples of a batch; each call returns the next draw of every sample."""

    def __init__(self, seed: int, epoch: int, ids: torch.Tensor) -> None:
        self._seed, self._epoch = seed, epoch
        self._key = mix(seed, epoch)
        self._ids = ids.numpy().view(np.uint64) * np.uint64(GOLDEN_GAMMA)
        self._count = 0

    def uniform(self) -> torch.Tensor:
        """Returns a number in [0, 1) for each sample."""
        return torch.from_numpy((self._words() >> 11) * 2.0**-53)

    def integers(self, low: int, high: int) -> torch.Tensor:
        """Returns an integer from low to high, both included, for each sample."""
        return torch.from_numpy((self._words() >> 33).view(np.int64) % (high - low + 1) + low)

    def alternating(self) -> torch.Tensor:
        """Returns a boolean for each sample: drawn once for all epochs, and inverted in every second epoch."""
        words = self._hashed(mix(self._seed, -1))
        return torch.from_numpy(((words >> 33).view(np.int64) + self._epoch) % 2 == 1)

    def _words(self) -> np.ndarray:
        """Returns 64 random bits for each sample, different in every call."""
        self._count += 1
        return self._hashed(mix(self._key, self._count))

    def _hashed(self, key: int) -> np.ndarray:
        """Hashes each id to 64 bits; in NumPy, because torch takes three times as long."""
        return splitmix64(self._ids + np.uint64(key))
