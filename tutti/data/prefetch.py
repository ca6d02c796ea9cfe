"""Items made ahead of their use by a thread."""

import queue
import threading
from collections.abc import Generator, Iterator
from typing import Any


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
