"""Work divided among processes of this host, with results in the order of its parts."""

import multiprocessing
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, TypeVar

from tutti.ranks.process import end_with_parent

Shared = TypeVar("Shared")
Item = TypeVar("Item")
Result = TypeVar("Result")
_AHEAD = 3  # parts that each process may have waiting
_shared: Any = None  # of a worker process, set when it starts


def in_order(
    work: Callable[[Shared, Item], Result], shared: Shared, items: Iterable[Item], workers: int
) -> Generator[Result, None, None]:
    """Yields `work(shared, item)` in the order of items, by worker processes if there are several.

    The processes end with the last item, an error or a closed generator. `shared` is inherited, not sent.
    """
    if workers <= 1:
        yield from (work(shared, item) for item in items)
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    pool = ProcessPoolExecutor(workers, context, _start, (shared,))
    try:
        waiting: deque[Future[Result]] = deque()
        for item in items:
            waiting.append(pool.submit(_call, work, item))
            if len(waiting) >= _AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _start(shared: Any) -> None:
    global _shared
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    _shared = shared


def _call(work: Callable[[Any, Any], Any], item: Any) -> Any:
    return work(_shared, item)
