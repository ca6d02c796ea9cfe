"""Horovod's data loaders: batches in order, loaded in a thread or not, and errors where they belong."""

from collections.abc import Iterator
from typing import Any

import pytest

from tutti.horovod.data import AsyncDataLoaderMixin, BaseDataLoader


class Numbers(BaseDataLoader):
    """Counts, and fails at a number."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.count, self.fails_at = count, fails_at

    def __len__(self) -> int:
        return self.count

    def _iterate(self) -> Iterator[int]:
        for number in range(self.count):
            if number == self.fails_at:
                raise ValueError(f"no batch {number}")
            yield number

    def _process_batch(self, batch: Any) -> Any:
        return 10 * batch


class AsyncNumbers(AsyncDataLoaderMixin, Numbers):
    """The same in a thread."""


@pytest.mark.parametrize("queue_size", [0, 1, 5])
def test_every_epoch_has_all_batches_in_order(queue_size: int) -> None:
    loader = AsyncNumbers(queue_size, 3)
    assert [list(loader) for _ in range(4)] == [[0, 10, 20]] * 4 == [list(Numbers(3))] * 4
    assert len(loader) == 3
    loader.close_async_loader()


@pytest.mark.parametrize("queue_size", [0, 1, 5])
def test_an_error_comes_after_the_batches_before_it_and_again(queue_size: int) -> None:
    loader = AsyncNumbers(async_loader_queue_size=queue_size, count=4, fails_at=2)
    seen = []
    for _ in range(2):
        with pytest.raises(ValueError, match="no batch 2"):
            seen.extend(loader)
    assert seen[:2] == [0, 10]
    loader.close_async_loader()


def test_a_loader_that_is_closed_has_no_thread_and_no_batches() -> None:
    loader = AsyncNumbers(1, 1000)
    batches = iter(loader)
    assert [next(batches), next(batches)] == [0, 10]
    loader.close_async_loader()
    assert not loader.thread.is_alive()
    assert list(batches) == [] and list(loader) == []
    AsyncNumbers(1, 3).close_async_loader()  # that was not used


def test_the_base_leaves_batches_to_its_subclasses() -> None:
    for missing in (lambda: len(BaseDataLoader()), lambda: list(BaseDataLoader())):
        with pytest.raises(NotImplementedError):
            missing()
