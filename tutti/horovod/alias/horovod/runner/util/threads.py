"""Work in a thread."""

import threading
from collections.abc import Callable, Sequence
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """A thread that has begun to call a function; with `silent`, nothing is said of what it raises."""
    if not isinstance(args, tuple | list):
        raise ValueError(f"args={args!r}: expected a tuple of arguments.")

    def work() -> None:
        try:
            target(*args)
        except Exception:
            if not silent:
                raise

    thread = threading.Thread(target=work, name=name, daemon=daemon)
    thread.start()
    return thread
