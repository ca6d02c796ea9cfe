"""The samples of an epoch, divided anew among the ranks that there are, without those that have been processed."""

import itertools
import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from tutti.hvd import basics


class ElasticSampler(Sampler[int]):
    """Call `record_batch` after each batch and `set_epoch` at the end of each epoch."""

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0  # over all ranks, the first ones of the epoch's order
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: nothing of it has been processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed a batch; it is not given out again after a reset."""
        self.processed_num += batch_size * self.num_replicas

    def reset(self) -> None:
        """Divide what is left of the epoch among the ranks."""
        self.num_replicas, self.rank = basics.size(), basics.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        # One sample a rank in turn: what all ranks have processed is always the beginning of the order.
        padded = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        return itertools.islice(padded, self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples
