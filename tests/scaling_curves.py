"""Curves that follow known laws exactly."""

import math
from collections.abc import Callable, Sequence

from tutti.forecast.curve import MeasuredRun, ScalingCurve, make_curve


def weak_curve(
    step: Callable[[int], float], nodes: Sequence[int] = (1, 2, 4), per_node: int = 4, batch: float | None = 32.0
) -> ScalingCurve:
    """Weak scaling on full nodes, where a step on k nodes takes step(k) seconds."""
    size = batch or 1.0
    return make_curve([MeasuredRun(k * per_node, k, k * per_node * size / step(k), batch) for k in nodes], "weak")


def ring(share: float) -> Callable[[int], float]:
    """A step of one second of compute and a ring between nodes."""
    return lambda nodes: 1 + share * 2 * (nodes - 1) / nodes


def logarithmic(share: float) -> Callable[[int], float]:
    return lambda nodes: 1 + share * math.log2(nodes)


def flat(share: float) -> Callable[[int], float]:
    return lambda nodes: 1 + (share if nodes > 1 else 0.0)
