"""Properties of the learning rate over the steps, for any schedule that a recipe may ask for."""

import contextlib
import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_config import small_config

from tutti.config.layout import Layout
from tutti.config.plan import Plan
from tutti.config.run import RunConfig
from tutti.config.schedule import Schedule, make_schedule, scale_factor
from tutti.errors import ConfigError

STEPS_PER_EPOCH = 10
EPOCHS = 4
BATCHES = st.integers(1, 100_000)
RATES = st.floats(1e-6, 1e3)
SCALING = st.sampled_from(["none", "linear", "sqrt"])
ANY_POSITIVE = st.floats(0, exclude_min=True, allow_nan=False, allow_infinity=False)

repeatable = settings(max_examples=100, deadline=None, derandomize=True)


def plan(global_batch: int, max_steps: int | None = None) -> Plan:
    return Plan(Layout(1), global_batch, global_batch, global_batch, STEPS_PER_EPOCH * global_batch, EPOCHS, max_steps)


def config(lr: float, base_batch: int | None, **keys: Any) -> RunConfig:
    batch = small_config(EPOCHS).batch.model_copy(update={"base": base_batch})
    optim = small_config(EPOCHS).optim.model_copy(update={"lr": lr})
    return small_config(EPOCHS).model_copy(
        update={"batch": batch, "optim": optim, "schedule": type(small_config(EPOCHS).schedule).model_validate(keys)}
    )


@st.composite
def schedules(draw: st.DrawFn, decays: tuple[str, ...] = ("constant", "cosine", "linear", "step")) -> Schedule:
    """A schedule of a recipe with any scaling, warm-up and decay."""
    global_batch, base_batch, lr, rule = draw(BATCHES), draw(BATCHES), draw(RATES), draw(SCALING)
    peak = lr * scale_factor(rule, global_batch, base_batch)
    made = plan(global_batch, draw(st.none() | st.integers(1, EPOCHS * STEPS_PER_EPOCH)))
    keys: dict[str, Any] = {
        "scaling": rule,
        "warmup_steps": draw(st.integers(0, made.total_steps)),
        "warmup_from": draw(st.sampled_from(["unscaled", "zero"])),
        "decay": draw(st.sampled_from(decays)),
        "end_lr": peak * draw(st.floats(0, 1)),
    }
    if keys["decay"] == "step":
        keys["milestones"] = sorted(draw(st.lists(st.floats(0, EPOCHS + 1), min_size=1, max_size=4)))
        keys["factor"] = draw(st.floats(1e-3, 2))
    return make_schedule(config(lr, base_batch, **keys), made)


def rates(made: Schedule) -> list[float]:
    return [made.lr_at(step) for step in range(made.total_steps)]


@repeatable
@given(schedules())
def test_every_rate_is_finite_and_not_negative(made: Schedule) -> None:
    assert all(math.isfinite(rate) and rate >= 0 for rate in rates(made))


@repeatable
@given(schedules(), st.data())
def test_a_rate_depends_on_its_step_alone(made: Schedule, data: st.DataObject) -> None:
    found = rates(made)
    for step in data.draw(st.lists(st.integers(0, made.total_steps - 1), max_size=10)):
        assert made.lr_at(step) == found[step]


@repeatable
@given(schedules())
def test_a_warm_up_leads_in_one_direction_to_the_peak(made: Schedule) -> None:
    start = 0.0 if made.warmup_from_zero else made.unscaled_lr
    low, high = sorted((start, made.peak_lr))
    found = [made.lr_at(step) for step in range(made.warmup_steps)]
    assert all(low * (1 - 1e-12) <= rate <= high * (1 + 1e-12) for rate in found)
    assert found == pytest.approx(sorted(found, reverse=made.peak_lr < start), rel=1e-12)
    assert not found or made.warmup_from_zero or found[0] == made.unscaled_lr
    assert not found or not made.warmup_from_zero or found[0] > 0


@repeatable
@given(schedules(("constant", "cosine", "linear")))
def test_the_rate_does_not_jump_at_the_end_of_a_warm_up(made: Schedule) -> None:
    """The change to the first rate after a warm-up is not larger than those within it."""
    if not 0 < made.warmup_steps < made.total_steps - 1:
        return
    first = made.lr_at(made.warmup_steps)
    assert first == pytest.approx(made.peak_lr, rel=1e-12)
    start, steps = (0.0 if made.warmup_from_zero else made.unscaled_lr), made.warmup_steps
    slope = abs(made.peak_lr - start) / steps
    assert abs(first - made.lr_at(steps - 1)) <= slope + 1e-12 * max(made.peak_lr, start)


@repeatable
@given(schedules(("cosine", "linear")))
def test_a_decay_falls_from_the_peak_to_its_end_rate_at_the_last_step(made: Schedule) -> None:
    found = rates(made)[made.warmup_steps :]
    assert all(made.end_lr * (1 - 1e-12) <= rate <= made.peak_lr * (1 + 1e-12) for rate in found)
    assert found == pytest.approx(sorted(found, reverse=True), rel=1e-12)
    if found:
        assert found[-1] == made.end_lr
    if len(found) > 1:
        assert found[0] == pytest.approx(made.peak_lr, rel=1e-12)
    if len(found) % 2:  # half of the way is half of the decay, for a line and for a cosine
        middle = made.end_lr if len(found) == 1 else (made.peak_lr + made.end_lr) / 2
        assert found[len(found) // 2] == pytest.approx(middle, rel=1e-9)
    assert made.lr_at(made.total_steps + 5) == made.end_lr


@repeatable
@given(schedules(("constant",)))
def test_a_constant_rate_is_the_peak_after_the_warm_up(made: Schedule) -> None:
    assert set(rates(made)[made.warmup_steps :]) <= {made.peak_lr}


@repeatable
@given(schedules(("step",)))
def test_step_decay_multiplies_once_for_each_milestone_that_has_passed(made: Schedule) -> None:
    for step in range(made.warmup_steps, made.total_steps):
        passed = sum(milestone <= step for milestone in made.milestones)
        assert made.lr_at(step) == pytest.approx(made.peak_lr * made.factor**passed, rel=1e-12)


@repeatable
@given(BATCHES, BATCHES)
def test_the_linear_rule_is_the_ratio_of_the_batches_and_sqrt_its_root(global_batch: int, base_batch: int) -> None:
    ratio = Fraction(global_batch, base_batch)
    linear, root = (scale_factor(rule, global_batch, base_batch) for rule in ("linear", "sqrt"))
    assert linear == float(ratio)
    assert abs(Fraction(root) ** 2 / ratio - 1) < Fraction(1, 2**50)
    assert scale_factor("none", global_batch, base_batch) == 1.0
    assert scale_factor("linear", 7 * base_batch, base_batch) == 7.0
    assert scale_factor("sqrt", 49 * base_batch, base_batch) == 7.0


@repeatable
@given(BATCHES, BATCHES, RATES, SCALING)
def test_the_peak_is_the_scaled_rate(global_batch: int, base_batch: int, lr: float, rule: str) -> None:
    made = make_schedule(config(lr, base_batch, scaling=rule), plan(global_batch))
    assert made.unscaled_lr == lr
    assert made.peak_lr == lr * scale_factor(rule, global_batch, base_batch)


@repeatable
@given(
    lr=ANY_POSITIVE,
    base_batch=st.integers(1, 10**30),
    warmup=ANY_POSITIVE | st.floats(0, EPOCHS),
    milestones=st.lists(ANY_POSITIVE | st.floats(0, EPOCHS), min_size=1, max_size=4).map(sorted),
    factor=ANY_POSITIVE,
)
@example(lr=1e308, base_batch=1, warmup=0.0, milestones=[1.0], factor=1.0)
@example(lr=0.1, base_batch=8, warmup=1e308, milestones=[1.0], factor=0.1)
@example(lr=0.1, base_batch=8, warmup=0.0, milestones=[1e308], factor=0.1)
@example(lr=0.1, base_batch=8, warmup=0.0, milestones=[1.0, 2.0], factor=1e300)
@example(lr=1e-300, base_batch=8, warmup=0.0, milestones=[1.0, 2.0], factor=1e200)
def test_values_of_any_size_give_finite_rates_or_are_refused(
    lr: float, base_batch: int, warmup: float, milestones: list[float], factor: float
) -> None:
    keys = {"warmup_epochs": warmup, "decay": "step", "milestones": milestones, "factor": factor}
    with contextlib.suppress(ConfigError):
        made = make_schedule(config(lr, base_batch, scaling="linear", **keys), plan(80))
        assert all(math.isfinite(rate) and rate >= 0 for rate in rates(made))


def test_a_run_of_very_many_epochs_has_a_schedule() -> None:
    made = make_schedule(config(0.1, None, decay="constant"), Plan(Layout(1), 8, 8, 8, 80, 10**400))
    assert made.lr_at(0) == made.lr_at(10**12) == 0.1
