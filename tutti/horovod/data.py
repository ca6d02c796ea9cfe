"""Data loaders of `horovod.data`: a base class, and a mixin that loads batches in a thread."""

import threading
from collections.abc import Iterator
from queue import Full, Queue
from typing import Any

_POLL_SECONDS = 0.1  # between two looks at whether the loader was closed, while the queue is full
_END = object()  # after the last batch of an epoch


class BaseDataLoader:
    """Yields the batches of `_iterate`, each changed by `_process_batch`."""

    def __len__(self) -> int:
        """Return the number of batches."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """Yield the batches of one epoch; a subclass implements it."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """Change a batch before it is returned, for example its shape."""
        return batch


class AsyncDataLoaderMixin:
    """Loads batches in a thread, also those of the next epoch; it precedes a BaseDataLoader in a class's bases.

    With `async_loader_queue_size` 0, batches are loaded in the caller's thread.
    """

    def __init__(self, async_loader_queue_size: int = 5, *args: Any, **kwargs: Any) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        super().__init__(*args, **kwargs)
        self.started = False
        self._error: Exception | None = None  # that ended the thread
        if async_loader_queue_size > 0:
            self.finished_event = threading.Event()
            self.queue: Queue[Any] = Queue(async_loader_queue_size)
            self.thread = threading.Thread(target=self._async_worker, name="hvd_data_loader", daemon=True)

    def close_async_loader(self) -> None:
        """End the thread; the batches that it has loaded are dropped, and a loop over them ends."""
        if self.async_loader_queue_size > 0 and self.started:
            self.finished_event.set()
            self.thread.join()
            while not self.queue.empty():
                self.queue.get_nowait()
            self.queue.put(_END)

    def _async_worker(self) -> None:
        try:
            while not self.finished_event.is_set():
                for batch in self._iterate():  # pyright: ignore[reportAttributeAccessIssue]
                    if not self._put(batch):
                        return
                self._put(_END)
        except Exception as error:  # it is raised in the caller's thread, after the batches that came before it
            self._error = error
            self._put(_END)

    def _put(self, item: Any) -> bool:
        """Put an item into the queue, and return whether that was possible before the loader was closed."""
        while not self.finished_event.is_set():
            try:
                self.queue.put(item, timeout=_POLL_SECONDS)
                return True
            except Full:
                continue
        return False

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # pyright: ignore[reportAttributeAccessIssue]
            return
        if not self.started:
            self.started = True
            self.thread.start()
        while not self._has_ended() and (batch := self.queue.get()) is not _END:
            yield self._process_batch(batch)  # pyright: ignore[reportAttributeAccessIssue]
        if self._error is not None and self._has_ended():
            raise self._error

    def _has_ended(self) -> bool:
        return self.queue.empty() and (self.finished_event.is_set() or self._error is not None)
