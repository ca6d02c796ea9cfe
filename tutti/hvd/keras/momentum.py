"""Momentum when the rate changes: what has been gathered was gathered at the old rate."""

from collections.abc import Callable
from typing import Any


def correct(optimizer: Any, new_rate: float, old_rate: float) -> Callable[[], None] | None:
    """Scale momentum by the change of the rate for one batch; how to undo it after the batch, where that is needed."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    momentum = getattr(inner, "momentum", None)
    if momentum is None or not old_rate or new_rate == old_rate:
        return None
    factor = new_rate / old_rate
    if hasattr(inner, "_set_hyper"):  # of Keras 2, where it can be set
        kept = float(momentum)
        inner.momentum = kept * factor
        return lambda: setattr(inner, "momentum", kept)
    # It is part of the compiled step. What it is multiplied with is not, and stands for the same.
    gathered = getattr(inner, "momentums", None) or getattr(inner, "_momentums", ())
    for velocity in gathered if momentum else ():
        if velocity is not None:
            velocity.assign(velocity * factor)
    return None
