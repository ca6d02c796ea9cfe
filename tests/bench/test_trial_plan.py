"""Trials and steps that fit into a time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.bench.trial_plan import PhaseCost, TrialPlan, plan_trials

FAST = {"read": PhaseCost(0.0, 1e-3), "compute": PhaseCost(0.0, 1e-2), "whole": PhaseCost(0.0, 1e-2)}


def seconds_of(plan: TrialPlan, costs: dict[str, PhaseCost]) -> float:
    return plan.trials * sum(cost.seconds(plan.steps[phase]) for phase, cost in costs.items())


def test_fast_steps_fill_the_time_and_whole_steps_get_twice_as_much() -> None:
    plan = plan_trials(FAST, 5, 1, 20.0)
    assert plan.trials == 5
    assert seconds_of(plan, FAST) == pytest.approx(20.0, rel=0.05)
    assert plan.steps["whole"] == pytest.approx(2 * plan.steps["compute"], rel=0.05)


def test_a_phase_has_at_most_2000_steps() -> None:
    assert plan_trials({"whole": PhaseCost(0.0, 1e-6)}, 5, 1, 20.0).steps == {"whole": 2000}


@pytest.mark.parametrize(("step", "trials", "steps"), [(0.5, 5, 3), (0.6, 5, 2), (2.0, 3, 1), (30.0, 0, 1)])
def test_slow_steps_leave_fewer_steps_and_then_fewer_trials(step: float, trials: int, steps: int) -> None:
    costs = {"read": PhaseCost(0.1, step), "whole": PhaseCost(0.1, step)}
    assert plan_trials(costs, 5, 0, 16.5) == TrialPlan(trials, {"read": steps, "whole": steps})


def test_what_a_phase_costs_once_counts() -> None:
    costs = {"read": PhaseCost(3.0, 0.01), "whole": PhaseCost(1.0, 0.01)}
    assert plan_trials(costs, 5, 1, 13.0).trials == 3


def test_all_trials_are_made_where_all_are_wanted() -> None:
    assert plan_trials({"whole": PhaseCost(0.0, 9.0)}, 5, 5, 1.0) == TrialPlan(5, {"whole": 3})


def test_every_loader_process_makes_as_many_batches() -> None:
    costs = {"read": PhaseCost(0.0, 0.05, 15), "whole": PhaseCost(0.0, 0.05, 15)}
    assert plan_trials(costs, 3, 1, 10.0).steps == {"read": 15, "whole": 30}
    assert plan_trials(costs, 3, 1, 0.1) == TrialPlan(1, {"read": 15, "whole": 15})


@settings(derandomize=True, deadline=None)
@given(
    costs=st.dictionaries(
        st.sampled_from(["read", "copy", "compute", "double", "whole"]),
        st.builds(PhaseCost, st.floats(0, 5), st.floats(0, 5), st.integers(1, 16)),
        min_size=1,
    ),
    trials=st.integers(2, 9),
    seconds=st.floats(0.1, 100),
)
def test_no_plan_takes_longer_than_its_time(costs: dict[str, PhaseCost], trials: int, seconds: float) -> None:
    plan = plan_trials(costs, trials, 0, seconds)
    assert 0 <= plan.trials <= trials
    assert all(plan.steps[phase] % cost.multiple == 0 and plan.steps[phase] for phase, cost in costs.items())
    assert seconds_of(plan, costs) <= seconds * (1 + 1e-9)
