"""What the measured levels of a curve leave open: a posterior on a grid of laws, and what it predicts.

The level of the curve is integrated by Laplace's method in every cell of the grid, the rest by sums. Noise has the
tails of Student's t with 4 degrees of freedom, so that one measurement that disagrees with all others is passed over.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tutti.forecast.laws import Array, axis_weights, exchange_growth, log_normal_density, log_step_time
from tutti.forecast.population import Fabric, Population

DEGREES = 4.0
# The evidence for a structure counts by this power: levels differ by more than noise, since each number of nodes has a
# placement and routes of its own.
TRUST = 0.5
_FRICTIONS = np.array([-0.08, -0.05, -0.03, -0.01, 0.01, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.3])
_TWO_NODES = np.array([-0.3, 0.0, 0.25, 0.5, 0.75, 1.1])
_FIXED_SHARES = np.array([0.0, 0.02, 0.05, 0.1, 0.18, 0.3, 0.45])
_FIXED_SHARE_MEAN = 0.1  # of an exponential prior
_JUMPS = (5e-4, 3e-3, 8e-3, 0.015, 0.03, 0.05, 0.08, 0.12, 0.18, 0.25, 0.35, 0.5, 0.7, 0.95, 1.25, 1.6, 2.0, 2.5)
_NEAR = np.array([-1.5, -0.5, 0.5, 1.5])  # steps of the grid near what the levels imply, in units of the noise
_STEP = 0.006  # of the axis of log time on which predictions are added up
_REACH = 1.6  # how far that axis goes beyond the outermost cell
_KERNEL = np.arange(-round(_REACH / _STEP), round(_REACH / _STEP) + 1) * _STEP


@dataclass(frozen=True)
class Level:
    """The step time on a number of nodes that are used in full."""

    nodes: int
    log_time: float
    deviation: float = 0.0  # what is uncertain about it besides the noise of a measurement
    batch_ratio: float = 1.0  # its per-rank batch over that of the first level


@dataclass(frozen=True)
class ParameterGrid:
    """The values of the parameters."""

    members_per_node: int  # of a collective
    jumps: Array
    frictions: Array
    two_nodes: Array
    fixed_shares: Array

    def log_times(self, nodes: float, batch_ratio: float, measured_nodes: float) -> Array:
        """The log of the step time relative to compute, in every cell."""
        axes = (self.jumps, self.frictions, self.two_nodes, self.fixed_shares)
        return log_step_time(nodes, batch_ratio, measured_nodes, self.members_per_node, *axes)

    def log_prior(self, population: Population) -> Array:
        """The log of the prior weight of every cell."""
        first, friction, two = population.first_jump, population.friction, population.two_nodes
        logs = np.log(self.jumps)
        jumps = log_normal_density(logs, first.mean, first.deviation) - logs
        parts = (
            np.log(population.structures),
            jumps + np.log(axis_weights(self.jumps)),
            log_normal_density(self.frictions, friction.mean, friction.deviation)
            + np.log(axis_weights(self.frictions)),
            log_normal_density(self.two_nodes, two.mean, two.deviation) + np.log(axis_weights(self.two_nodes)),
            -self.fixed_shares / _FIXED_SHARE_MEAN + np.log(axis_weights(self.fixed_shares)),
        )
        total = np.zeros(())
        for part in parts:
            total = total[..., None] + part
        return total


@dataclass(frozen=True)
class Likelihood:
    """How well every cell of a grid describes the levels of a curve, and the level of the curve in it."""

    grid: ParameterGrid
    log_likelihood: Array
    level: Array
    level_variance: Array
    last_nodes: int
    noise: float

    def log_times(self, nodes: float, batch_ratio: float) -> Array:
        """The log of the step time in every cell."""
        return self.level + self.grid.log_times(nodes, batch_ratio, self.last_nodes)

    def posterior(self, population: Population) -> tuple[Array, float]:
        """The weight of every cell, and the log of the evidence."""
        logs = self.log_likelihood + self.grid.log_prior(population)
        most = float(logs.max())
        weights = np.exp(logs - most)
        by_structure = weights.sum(axis=(1, 2, 3, 4))
        prior = np.array(population.structures)
        tempered = prior * (by_structure / prior) ** TRUST
        weights *= (tempered / tempered.sum() / by_structure).reshape(-1, 1, 1, 1, 1)
        return weights, most + math.log(float(by_structure.sum()))


@dataclass(frozen=True)
class Predictive:
    """The distribution of a log time."""

    axis: Array
    density: Array  # sums to 1

    def quantile(self, probability: float) -> float:
        """The log time below which this share of the distribution lies."""
        return float(np.interp(probability, np.cumsum(self.density), self.axis + _STEP / 2))

    def below(self, log_time: float) -> float:
        """The probability of a smaller time."""
        return float(np.interp(log_time, self.axis + _STEP / 2, np.cumsum(self.density), left=0.0, right=1.0))

    def with_width(self, factor: float) -> "Predictive":
        """The same around its median, wider or narrower by a factor."""
        middle = self.quantile(0.5) - _STEP / 2  # of the axis, whose cells end half a step further
        return Predictive(middle + factor * (self.axis - middle), self.density)

    def density_at(self, log_time: float) -> float:
        """The density at a log time."""
        return float(np.interp(log_time, self.axis, self.density, left=0.0, right=0.0)) / _STEP


def likelihood(levels: Sequence[Level], fabric: Fabric, noise: float, ranks_per_node: int) -> Likelihood:
    """Compare the levels of a curve, one for each number of nodes, with every cell of the grid."""
    grid = _grid(levels, fabric, noise, ranks_per_node)
    last = max(level.nodes for level in levels)
    offsets = np.stack([level.log_time - grid.log_times(level.nodes, level.batch_ratio, last) for level in levels])
    deviations = np.array([math.hypot(noise, level.deviation) for level in levels])
    scale = deviations.reshape(-1, *[1] * (offsets.ndim - 1))
    middle = np.median(offsets, axis=0) if len(levels) > 2 else np.average(offsets, axis=0, weights=deviations**-2)
    weights = _t_weights(offsets - middle, scale)
    for _ in range(3):
        middle = (weights * offsets).sum(0) / weights.sum(0)
        weights = _t_weights(offsets - middle, scale)
    variance = 1 / weights.sum(0)
    logs = log_t(offsets - middle, scale).sum(0) + 0.5 * np.log(2 * math.pi * variance)
    return Likelihood(grid, logs, middle, variance, last, noise)


def predict(
    found: Likelihood, weights: Array, population: Population, nodes: int, batch_ratio: float = 1.0, spread: float = 0.0
) -> Predictive:
    """The distribution of the log time that a run on a number of nodes would measure."""
    means = found.log_times(nodes, batch_ratio).ravel()
    kept = weights.ravel() > 1e-7
    means, kept_weights = means[kept], weights.ravel()[kept]
    doublings = max(math.log2(nodes / found.last_nodes), 0.0)
    level_variance = float(np.average(found.level_variance.ravel()[kept], weights=kept_weights))
    scale = math.sqrt(found.noise**2 + level_variance + (population.discrepancy * doublings) ** 2 + spread**2)
    return smoothed(means, kept_weights, scale)


def mix(parts: Sequence[tuple[float, Predictive]]) -> Predictive:
    """The mean of distributions with weights."""
    low = min(part.axis[0] for _, part in parts)
    high = max(part.axis[-1] for _, part in parts)
    axis = low + _STEP * np.arange(round((high - low) / _STEP) + 2)
    density = sum(weight * np.interp(axis, part.axis, part.density, left=0, right=0) for weight, part in parts)
    return Predictive(axis, np.asarray(density) / np.sum(density))


def around(log_time: float, deviation: float) -> Predictive:
    """The distribution around one value."""
    return smoothed(np.array([log_time]), np.ones(1), deviation)


def smoothed(means: Array, weights: Array, scale: float) -> Predictive:
    """The distribution of log times with weights, each of them spread by noise."""
    low = float(means.min()) - _REACH
    size = int((float(means.max()) + _REACH - low) / _STEP) + 1
    sums = np.bincount(np.round((means - low) / _STEP).astype(int), weights, minlength=size)
    kernel = np.exp(log_t(_KERNEL, np.array(scale)))
    half = len(_KERNEL) // 2
    density = np.convolve(sums, kernel)[half : half + len(sums)]
    return Predictive(low + _STEP * np.arange(len(sums)), density / density.sum())


def _grid(levels: Sequence[Level], fabric: Fabric, noise: float, ranks_per_node: int) -> ParameterGrid:
    """Coarse everywhere, and fine where the levels place the exchange."""
    members = ranks_per_node if fabric is Fabric.TCP else 1
    ones = [level.log_time for level in levels if level.nodes == 1]
    base = max(ones) if ones else min(level.log_time for level in levels) - 0.3
    jumps = list(_JUMPS)
    for level in levels:
        if level.nodes > 1:
            exchange = max(math.expm1(level.log_time - base), 2e-3)
            for growth in exchange_growth(level.nodes, members):
                jumps += list(math.log1p(exchange / growth) + noise * _NEAR)
    axis = np.unique(np.clip(jumps, _JUMPS[0], None))
    axis = axis[np.append(True, np.diff(axis) > 0.15 * noise)]
    strong = len({round(level.batch_ratio, 9) for level in levels}) > 1
    return ParameterGrid(
        members,
        axis,
        _FRICTIONS,
        _TWO_NODES if fabric is Fabric.TCP else np.zeros(1),
        _FIXED_SHARES if strong else np.zeros(1),
    )


def _t_weights(offsets: Array, scale: Array) -> Array:
    return (DEGREES + 1) / (DEGREES + (offsets / scale) ** 2) / scale**2


def log_t(offsets: Array, scale: Array) -> Array:
    """The log of the density of Student's t."""
    constant = math.lgamma((DEGREES + 1) / 2) - math.lgamma(DEGREES / 2) - 0.5 * math.log(DEGREES * math.pi)
    return constant - np.log(scale) - (DEGREES + 1) / 2 * np.log1p((offsets / scale) ** 2 / DEGREES)
