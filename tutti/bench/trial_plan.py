"""How many trials, and steps of each phase in a trial, fit into a time; computed without torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

_LEAST_STEPS, _MOST_STEPS = 3, 2000  # of a phase in a trial
_WEIGHTS = {"whole": 2.0, "copy": 0.3, "double": 0.7, "exchange": 0.7}  # share of the time of a phase; 1 for others


@dataclass(frozen=True)
class PhaseCost:
    """The seconds of a phase in a trial: once, to begin and to end it, and for each step."""

    once: float
    step: float
    multiple: int = 1  # of which the steps are one: loader processes deliver as many batches at once as there are

    def seconds(self, steps: int) -> float:
        return self.once + steps * self.step

    def at_least(self, steps: int) -> int:
        """The next multiple."""
        return math.ceil(steps / self.multiple) * self.multiple


@dataclass(frozen=True)
class TrialPlan:
    """The trials of a measurement, and the steps of each phase in one of them."""

    trials: int
    steps: Mapping[str, int]


def plan_trials(costs: Mapping[str, PhaseCost], trials: int, least_trials: int, seconds: float) -> TrialPlan:
    """The plan for a time: first fewer steps, then fewer trials, where not all of them fit; none if no trial does."""
    for least in range(_LEAST_STEPS, 0, -1):
        if trials * _cost(costs, least) <= seconds:
            return TrialPlan(trials, _fill(costs, least, seconds / trials))
    if least_trials == trials:  # fewer steps would not make them fit either
        return TrialPlan(trials, _fill(costs, _LEAST_STEPS, 0.0))
    fitting = max(least_trials, int(max(0.0, seconds) / max(_cost(costs, 1), 1e-9)))
    return TrialPlan(min(fitting, trials), _fill(costs, 1, seconds / max(1, fitting)))


def _cost(costs: Mapping[str, PhaseCost], steps: int) -> float:
    """The seconds of a trial with some steps of every phase."""
    return sum(cost.seconds(cost.at_least(steps)) for cost in costs.values())


def _fill(costs: Mapping[str, PhaseCost], least: int, seconds: float) -> dict[str, int]:
    """The steps that use the time of a trial, divided among phases by their weights; at least some of each."""
    free = max(0.0, seconds - _cost(costs, least))
    weights = {phase: _WEIGHTS.get(phase, 1.0) for phase in costs}
    steps = {}
    for phase, cost in costs.items():
        more = int(free * weights[phase] / sum(weights.values()) / max(cost.step, 1e-9))
        fewest, most = cost.at_least(least), _MOST_STEPS // cost.multiple * cost.multiple
        steps[phase] = min(fewest + more // cost.multiple * cost.multiple, max(fewest, most))
    return steps
