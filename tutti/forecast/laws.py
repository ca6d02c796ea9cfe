"""How the time of a step depends on the number of nodes: compute, exposed exchange, friction.

The time is relative to the compute of one full node:

    step(k) = [compute + exchange * growth(k)] * exp(friction * log2(k / 2))     on k >= 2 nodes
    step(1) = compute

The exposed exchange grows with the members of the collective by one of three structures, each 1 on two nodes. On HPC
fabrics the members are the nodes, whose ranks reduce among themselves first. Over TCP they are all ranks, so that full
nodes of many ranks come close to the limit of a ring with few nodes.

On Ethernet, two nodes are a case of their own: their exchange is multiplied by a factor that does not hold on three or
more. In strong mode the compute of a step has a part that does not shrink with the per-rank batch.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]

STRUCTURES = ("flat", "ring", "log")


def exchange_growth(nodes: float, members_per_node: int) -> Array:
    """The exposed exchange on a number of nodes for each structure, as a multiple of that on two nodes."""
    if nodes < 2:
        return np.zeros(len(STRUCTURES))
    members, fewest = nodes * members_per_node, 2 * members_per_node
    return np.array([1.0, (1 - 1 / members) / (1 - 1 / fewest), math.log2(members) / math.log2(fewest)])


def compute_share(batch_ratio: float, fixed_share: Array) -> Array:
    """Compute of a step at a per-rank batch, relative to the reference batch; a share of it does not shrink."""
    return fixed_share + (1 - fixed_share) * batch_ratio


def log_step_time(
    nodes: float,
    batch_ratio: float,
    measured_nodes: float,
    members_per_node: int,
    first_jump: Array,
    friction: Array,
    two_nodes: Array,
    fixed_share: Array,
) -> Array:
    """The log of the step time on a number of nodes for every combination of the parameters.

    The axes of the result: structure, jump from one node to two (in log), friction for a doubling of nodes, log of the
    factor of two nodes, fixed share of compute. A friction below zero describes the noise of measurements: beyond the
    measured nodes it counts as none.
    """
    compute = compute_share(batch_ratio, fixed_share)
    exchange = exchange_growth(nodes, members_per_node)[:, None] * np.expm1(first_jump)
    factor = np.exp(two_nodes) if nodes == 2 else np.ones_like(two_nodes)
    step = np.log(compute + (exchange[:, :, None] * factor)[..., None])
    inside = math.log2(max(min(nodes, measured_nodes), 2) / 2)
    beyond = math.log2(max(nodes, 2) / 2) - inside
    added = friction * inside + np.maximum(friction, 0) * beyond
    return step[:, :, None] + added[:, None, None]


def axis_weights(values: Array) -> Array:
    """The weight of each value of an irregular axis in an integral by the trapezoidal rule."""
    if len(values) == 1:
        return np.ones(1)
    gaps = np.diff(values)
    return np.concatenate([gaps[:1], gaps[1:] + gaps[:-1], gaps[-1:]]) / 2


def log_normal_density(values: Array, mean: float, deviation: float) -> Array:
    """The log of the normal density; a deviation of 0 holds all at the mean."""
    if deviation == 0:
        return np.zeros_like(values)
    return -0.5 * ((values - mean) / deviation) ** 2 - math.log(deviation * math.sqrt(2 * math.pi))
