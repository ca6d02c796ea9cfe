"""The measurements of one scaling curve, and the levels that the model sees of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tutti.forecast.population import Normal
from tutti.forecast.posterior import Level
from tutti.study.definition import Mode

EXPOSED_DEVIATION = 0.1  # of compute that is a step without its exposed communication


@dataclass(frozen=True)
class MeasuredRun:
    """The throughput of one run."""

    ranks: int
    nodes: int
    samples_per_second: float
    per_rank_batch: float | None = None
    exposed_seconds: float | None = None  # communication of a step that nothing overlaps
    reading_seconds: float | None = None  # waiting for the samples of a step
    waits_steadily: bool = False  # the others wait equally long in every window: for one slow rank, not by chance

    @property
    def per_node(self) -> int:
        """Ranks of a full node."""
        return math.ceil(self.ranks / self.nodes)


@dataclass(frozen=True)
class ScalingCurve:
    """Measurements of one workload on one machine, with the way in which ranks were added."""

    measurements: tuple[MeasuredRun, ...]
    mode: Mode  # the per-rank batch stays the same when ranks are added (weak), or the global batch (strong)
    ranks_per_node: int

    @property
    def first(self) -> MeasuredRun:
        """The measurement that efficiency refers to: that of the fewest ranks."""
        return min(self.measurements, key=lambda each: (each.ranks, each.nodes))

    @property
    def most_nodes(self) -> int:
        return max(each.nodes for each in self.measurements)

    def nodes_for(self, ranks: int) -> int:
        """The nodes that a number of ranks fills."""
        return math.ceil(ranks / self.ranks_per_node)

    def time_of(self, ranks: float, samples_per_second: float) -> float:
        """The step time in units of the time for one per-rank batch (weak) or one global batch (strong)."""
        return (ranks if self.mode == "weak" else 1.0) / samples_per_second

    def throughput(self, ranks: float, log_time: float) -> float:
        """Samples per second at a log step time."""
        return (ranks if self.mode == "weak" else 1.0) / math.exp(log_time)

    def batch_ratio(self, ranks: float) -> float:
        """The per-rank batch on a number of ranks over that of the first measurement."""
        return 1.0 if self.mode == "weak" else self.first.ranks / ranks

    def efficiency(self, ranks: float, samples_per_second: float) -> float:
        """Throughput of a rank over that of the first measurement."""
        return samples_per_second / ranks / (self.first.samples_per_second / self.first.ranks)


def make_curve(measurements: Sequence[MeasuredRun], mode: Mode, ranks_per_node: int | None = None) -> ScalingCurve:
    """A curve with its measurements in order; the ranks of a node are the most that were measured, or given."""
    ordered = tuple(sorted(measurements, key=lambda each: (each.ranks, each.nodes)))
    return ScalingCurve(ordered, mode, ranks_per_node or max(each.per_node for each in ordered))


def levels_of(curve: ScalingCurve, within_node: Normal) -> list[Level]:
    """One level for each number of nodes, from the run that filled them best.

    Runs on nodes that were not full say how the ranks of a node slow each other down; they are used where no full node
    was measured, with what is uncertain about that. Where one node was not measured but the exposed communication was,
    the rest of that step stands for one node.
    """
    fullest: dict[int, MeasuredRun] = {}
    for each in curve.measurements:
        if each.nodes not in fullest or _gap(curve, each) < _gap(curve, fullest[each.nodes]):
            fullest[each.nodes] = each
    levels = [_level(curve, fullest[nodes], within_node) for nodes in sorted(fullest)]
    share = exposed_share(fullest[levels[0].nodes])
    if levels[0].nodes > 1 and share:
        compute = levels[0].log_time + math.log1p(-share)
        levels.insert(0, replace(levels[0], nodes=1, log_time=compute, deviation=EXPOSED_DEVIATION))
    return levels


def _gap(curve: ScalingCurve, each: MeasuredRun) -> float:
    """Doublings of ranks between this measurement's nodes and full ones."""
    return abs(math.log2(curve.ranks_per_node / each.per_node))


def _level(curve: ScalingCurve, each: MeasuredRun, within_node: Normal) -> Level:
    doublings = math.log2(curve.ranks_per_node / each.per_node)
    log_time = math.log(curve.time_of(each.ranks, each.samples_per_second))
    return Level(
        each.nodes,
        log_time + within_node.mean * doublings,
        within_node.deviation * abs(doublings),
        curve.batch_ratio(each.ranks),
    )


def exposed_share(each: MeasuredRun) -> float:
    """The share of a step that is exposed communication; 0 where it is not known."""
    if each.exposed_seconds is None or each.per_rank_batch is None:
        return 0.0
    step = each.per_rank_batch * each.ranks / each.samples_per_second
    return float(np.clip(each.exposed_seconds / step, 0.0, 0.9))
