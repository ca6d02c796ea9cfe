"""The learning rate of every step: scaled with the batch, warmed up, decayed to its end."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from tutti.config.load import load, resolve_values
from tutti.config.plan import MANY_SAMPLES, make_plan
from tutti.config.schedule import Schedule, make_schedule, scale_factor
from tutti.errors import ConfigError


def schedule(
    *, ranks: int = 1, samples: int = 80, epochs: int = 4, lr: float = 0.1, batch: Any = None, **keys: Any
) -> Schedule:
    """A schedule of a recipe; by default 4 epochs of 10 steps with a batch of 8."""
    config = resolve_values(
        {
            "data": {"name": "synthetic"},
            "model": {"name": "mlp"},
            "optim": {"name": "sgd", "lr": lr},
            "batch": batch or {"global": 8},
            "schedule": keys,
            "epochs": epochs,
        }
    )
    return make_schedule(config, make_plan(config, ranks, samples))


def rates(made: Schedule) -> list[float]:
    return [made.lr_at(step) for step in range(made.total_steps)]


@pytest.mark.parametrize(
    ("rule", "global_batch", "base", "factor"),
    [
        ("none", 512, 64, 1.0),
        ("linear", 512, 64, 8.0),
        ("linear", 32, 64, 0.5),
        ("sqrt", 576, 64, 3.0),
        ("sqrt", 16, 64, 0.5),
        ("linear", 64, 64, 1.0),
    ],
)
def test_a_rule_scales_the_rate_with_the_batch(rule: str, global_batch: int, base: int, factor: float) -> None:
    assert scale_factor(rule, global_batch, base) == pytest.approx(factor, rel=1e-15)


@pytest.mark.parametrize(("ranks", "peak"), [(1, 0.1), (2, 0.2), (4, 0.4), (8, 0.8)])
def test_a_batch_on_each_rank_scales_the_rate_with_the_ranks(ranks: int, peak: float) -> None:
    made = schedule(ranks=ranks, batch={"per_rank": 8, "base": 8}, scaling="linear")
    assert (made.unscaled_lr, made.peak_lr) == (0.1, pytest.approx(peak))
    assert set(rates(made)) == {made.peak_lr}


def test_a_global_batch_has_one_rate_on_any_number_of_ranks() -> None:
    keys = {"batch": {"global": 16, "base": 4}, "scaling": "sqrt", "warmup_epochs": 1, "decay": "cosine"}
    assert schedule(ranks=1, **keys) == schedule(ranks=2, **keys) == schedule(ranks=16, **keys)
    assert schedule(**keys).peak_lr == pytest.approx(0.2)


@pytest.mark.parametrize("keys", [{"warmup_steps": 15}, {"warmup_epochs": 1.5}])
def test_a_warm_up_rises_in_equal_steps_from_the_unscaled_rate(keys: dict[str, Any]) -> None:
    made = schedule(batch={"global": 8, "base": 2}, scaling="linear", **keys)
    warmup = rates(made)[:16]
    assert warmup[0] == 0.1
    assert warmup[15] == made.peak_lr == pytest.approx(0.4)
    assert [after - before for before, after in itertools.pairwise(warmup)] == pytest.approx([0.02] * 15)


@pytest.mark.parametrize("keys", [{"warmup_steps": 5}, {"warmup_epochs": 0.5}, {"warmup_epochs": 0.46}])
def test_a_warm_up_from_zero_starts_above_it_and_reaches_the_peak(keys: dict[str, Any]) -> None:
    made = schedule(warmup_from="zero", **keys)
    assert rates(made)[:7] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1, 0.1, 0.1])


@pytest.mark.parametrize("keys", [{}, {"warmup_steps": 0}, {"warmup_epochs": 0.0}, {"warmup_epochs": 0.04}])
def test_no_warm_up_starts_at_the_peak(keys: dict[str, Any]) -> None:
    assert rates(schedule(warmup_from="zero", **keys)) == [0.1] * 40


@pytest.mark.parametrize("start", ["unscaled", "zero"])
def test_a_warm_up_may_take_the_whole_run(start: str) -> None:
    found = rates(schedule(warmup_steps=40, warmup_from=start, batch={"global": 8, "base": 2}, scaling="linear"))
    assert found == sorted(found)
    assert len(set(found)) == 40


@pytest.mark.parametrize("decay", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", [0, 1, 7, 38, 39])
@pytest.mark.parametrize("end", [0.0, 1e-3, 0.03, 0.1])
def test_a_decay_falls_from_the_peak_and_ends_exactly_at_its_end_rate(decay: str, warmup: int, end: float) -> None:
    made = schedule(warmup_steps=warmup, decay=decay, end_lr=end)
    found = rates(made)[warmup:]
    assert found[-1] == end
    assert made.lr_at(made.total_steps) == made.lr_at(made.total_steps + 9) == end
    assert len(found) == 1 or found[0] == pytest.approx(0.1, rel=1e-15)
    assert all(end <= rate <= 0.1 * (1 + 1e-15) for rate in found)
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize(("warmup", "end"), [(0, 0.0), (3, 0.0), (10, 0.02)])
def test_the_cosine_is_the_one_of_the_textbook(warmup: int, end: float) -> None:
    made = schedule(warmup_steps=warmup, decay="cosine", end_lr=end)
    for step in range(warmup, 40):
        angle = 90.0 * (step - warmup) / (39 - warmup)
        share = math.cos(math.radians(angle)) ** 2
        assert made.lr_at(step) == pytest.approx(0.1 * share + end * (1 - share), rel=1e-12, abs=1e-15)


def test_the_line_is_straight() -> None:
    made = schedule(warmup_steps=9, decay="linear", end_lr=0.01)
    assert [made.lr_at(step) for step in (9, 19, 24, 29, 39)] == pytest.approx([0.1, 0.07, 0.055, 0.04, 0.01])


@pytest.mark.parametrize("keys", [{"decay": "constant"}, {"decay": "step", "milestones": [5]}])
def test_a_constant_rate_has_no_end_rate(keys: dict[str, Any]) -> None:
    assert rates(schedule(end_lr=0.05, **keys)) == [0.1] * 40


def test_a_run_of_one_step_takes_it_at_the_end_rate() -> None:
    assert rates(schedule(samples=8, epochs=1, decay="cosine", end_lr=0.02)) == [0.02]


def test_step_decay_multiplies_at_each_milestone() -> None:
    found = rates(schedule(decay="step", milestones=[1, 2.5, 2.5, 3.86], factor=0.5, warmup_steps=2))
    expected = [0.1] * 10 + [0.05] * 15 + [0.0125] * 14 + [0.00625]
    assert found == pytest.approx(expected)


def test_a_milestone_within_the_warm_up_counts_after_it() -> None:
    found = rates(schedule(decay="step", milestones=[0.2], factor=0.1, warmup_steps=4, warmup_from="zero"))
    assert found[:5] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.01])


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
def test_scaling_without_a_base_is_refused_and_either_fix_works(rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        schedule(scaling=rule)
    assert str(caught.value) == (
        f"schedule.scaling={rule!r} needs batch.base, the global batch that optim.lr was chosen for. "
        "Set batch.base=..., or schedule.scaling=none."
    )
    assert schedule(scaling=rule, batch={"global": 8, "base": 8}).peak_lr == 0.1
    assert schedule(scaling="none").peak_lr == 0.1


@pytest.mark.parametrize("keys", [{"warmup_steps": 41}, {"warmup_epochs": 4.1}])
def test_a_warm_up_longer_than_the_run_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        schedule(**keys)
    assert str(caught.value) == (
        "a warm-up of 41 steps is longer than the whole run of 40 steps (4 epochs of 10). "
        "Shorten schedule.warmup_*, or raise epochs."
    )
    assert schedule(epochs=5, **keys).warmup_steps == 41


def test_a_held_warm_up_keeps_the_unscaled_rate_and_jumps() -> None:
    made = schedule(warmup_epochs=2, warmup="hold", batch={"global": 8, "base": 2}, scaling="linear")
    assert rates(made) == [0.1] * 20 + [pytest.approx(0.4)] * 20
    with pytest.raises(ConfigError, match=r"warmup_from=unscaled with schedule\.warmup=hold"):
        schedule(warmup_epochs=2, warmup="hold", warmup_from="zero")


@pytest.mark.parametrize("given", ["epochs=1", "max_steps=100"])
def test_a_warm_up_is_shortened_where_only_the_run_was(given: str) -> None:
    config = load("cifar10/resnet_small", given)
    plan = make_plan(config, 1, 50_000)
    made = make_schedule(config, plan)
    assert made.warmup_steps == plan.total_steps
    assert made.notes == (
        f"warm-up shortened to the {plan.total_steps} steps of this run: the recipe has 3,905 steps, for more epochs",
    )
    config = load("cifar10/resnet_small", given, "schedule.warmup_epochs=3")
    with pytest.raises(ConfigError, match="is longer than the whole run"):
        make_schedule(config, plan)
    config = load("cifar10/resnet_small", "epochs=20")
    assert make_schedule(config, make_plan(config, 1, 50_000)).notes == ()


def test_a_warm_up_is_shortened_where_a_recipe_in_another_file_sets_the_length(tmp_path: Path) -> None:
    def shortens(text: str, *overrides: str) -> bool:
        path = tmp_path / "mine.yaml"
        path.write_text(f"extends: cifar10/resnet_small\n{text}")
        return load(str(path), *overrides).schedule.shorten_warmup

    assert shortens("epochs: 1\n")
    assert not shortens("epochs: 1\nschedule: {warmup_epochs: 3}\n")
    assert not shortens("schedule: {warmup_epochs: 40}\n")
    assert not shortens("epochs: 1\n", "schedule.warmup_epochs=3")
    assert shortens("schedule: {warmup_epochs: 3}\n", "max_steps=5")
    assert not load("cifar10/resnet_small").schedule.shorten_warmup


def test_before_samples_are_counted_a_warm_up_is_compared_in_its_own_unit() -> None:
    def made(*overrides: str) -> Schedule:
        config = load("cifar10/resnet_small", *overrides)
        return make_schedule(config, make_plan(config, 1, MANY_SAMPLES))

    assert made("epochs=1").notes == (
        "warm-up shortened to the 1 epoch of this run: the recipe has 5 epochs, for more epochs",
    )
    assert made("max_steps=100").notes == made("max_steps=100", "schedule.warmup_epochs=5").notes == ()
    with pytest.raises(ConfigError, match=r"a warm-up of 5 epochs is longer than the whole run of 1 epoch\. Shorten"):
        made("epochs=1", "schedule.warmup_epochs=5")
    with pytest.raises(ConfigError, match=r"a warm-up of 200 steps is longer than the whole run of 100 steps\."):
        made("max_steps=100", "schedule.warmup_steps=200")


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_an_end_above_the_peak_is_refused(decay: str) -> None:
    with pytest.raises(ConfigError) as caught:
        schedule(decay=decay, end_lr=0.1, batch={"global": 8, "base": 16}, scaling="linear")
    assert str(caught.value) == (
        "schedule.end_lr=0.1 is above the rate of 0.05 that the decay starts from. Set schedule.end_lr to less than "
        "0.05."
    )
    assert rates(schedule(decay=decay, end_lr=0.049, batch={"global": 8, "base": 16}, scaling="linear"))[-1] == 0.049
