"""Which number of ranks is advised, and what is to be measured next."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from study_folders import Made, sweep_study

from tutti.errors import Cause, TuttiError
from tutti.forecast.advice import (
    CHEAPEST,
    FASTEST,
    KNEE,
    Learning,
    Limits,
    RankOption,
    advise,
    interval,
    learn,
    numbers_of_ranks,
)
from tutti.forecast.batches import (
    BaseRate,
    MeasuredSweep,
    StudiedRecipe,
    SweptBatch,
    choose_rate,
    rate_factor,
    read_sweep,
)
from tutti.forecast.curve import MeasuredRun, make_curve
from tutti.forecast.epochs import believe
from tutti.forecast.forecast import FittedCurve, fit_curve
from tutti.forecast.link import given_link
from tutti.forecast.measuring import measure_next
from tutti.forecast.population import Fabric
from tutti.study.definition import Goal, Mode, Point, PointState

NOISE, FIRST = 4096.0, 30.0
RATE = BaseRate(256, 0.1, "sgd", 0.0)
RECIPE = StudiedRecipe("digits", (), RATE, 256, 40, 1_000_000, 64)


def ideal(per_node: int = 4, mode: Mode = "weak", most: int = 4) -> FittedCurve:
    """Ranks that hardly slow each other down, on an HPC fabric."""
    nodes = [each for each in (1, 2, 4, 8) if each <= most]
    runs = [
        MeasuredRun(each * per_node, each, 1000.0 * each * per_node * 0.995 ** math.log2(each), 64) for each in nodes
    ]
    return fit_curve(make_curve(runs, mode), Fabric.HPC, alone=True)


def swept(batches: tuple[int, ...] = (256, 1024, 4096, 16384), lr: float | None = None) -> MeasuredSweep:
    """A sweep that follows the law."""

    def one(batch: int) -> SweptBatch:
        epochs = FIRST * (1 + batch / NOISE)
        return SweptBatch(batch, (epochs, epochs * 1.01), 2 * epochs, 2, 0, lr and lr * batch / 256)

    return MeasuredSweep(Path("sweep"), "digits", "valid_accuracy", 0.95, tuple(map(one, batches)))


def hours(option: RankOption) -> float:
    return interval(option.hours)[0]


def cost(option: RankOption) -> float:
    return interval(option.cost("node-hours"))[0]


def test_the_knee_is_at_the_critical_batch_where_hardware_scales() -> None:
    made = advise(ideal(), RECIPE, learn(RECIPE, swept(), None), Limits())
    knee = made.choice(KNEE).option
    assert knee.global_batch == pytest.approx(NOISE, rel=0.55)  # numbers of nodes are a factor of 1.5 apart
    assert knee.global_batch == knee.ranks * 64
    cheap, fast = made.choice(CHEAPEST).option, made.choice(FASTEST).option
    assert cheap.nodes == 1
    assert cheap.ranks <= knee.ranks <= fast.ranks
    assert fast.global_batch <= 2.3 * NOISE
    assert "times the critical batch" in (made.stopped or "")


def test_slow_hardware_moves_the_knee_to_fewer_ranks() -> None:
    runs = [MeasuredRun(4 * each, each, 4000.0 * each * 0.75 ** math.log2(each), 64) for each in (1, 2, 4)]
    slow = fit_curve(make_curve(runs, "weak"), Fabric.TCP)
    learning = learn(RECIPE, swept(), None)
    made = advise(slow, RECIPE, learning, Limits())
    assert made.choice(KNEE).option.ranks < advise(ideal(), RECIPE, learning, Limits()).choice(KNEE).option.ranks
    strict = advise(slow, RECIPE, learning, Limits(efficiency=0.7))
    assert strict.choice(FASTEST).option.nodes <= 2
    assert "below 70%" in (strict.stopped or "")


def test_intervals_contain_the_truth() -> None:
    made = advise(ideal(), RECIPE, learn(RECIPE, swept(), None), Limits())
    for each in made.options:
        epochs = FIRST * (1 + each.global_batch / NOISE)
        truth = epochs * 1e6 / (1000.0 * each.ranks * 0.995 ** math.log2(each.nodes)) / 3600
        middle, low, high = interval(each.hours)
        assert low < truth < high
        assert middle == pytest.approx(truth, rel=0.15)


@settings(max_examples=20, deadline=None)
@given(st.floats(1.0, 400.0), st.floats(0.05, 40.0))
def test_limits_are_kept_or_the_closest_choice_is_named(budget: float, deadline: float) -> None:
    limits = Limits(budget=budget, deadline_hours=deadline)
    made = advise(FITTED, RECIPE, LEARNING, limits)
    kept = [each for each in made.options if cost(each) <= budget and hours(each) <= deadline]
    if kept:
        assert made.unmet is None
        for choice in made.choices:
            assert choice.option in kept
        assert cost(made.choice(CHEAPEST).option) <= 1.02 * min(map(cost, kept))
        assert hours(made.choice(FASTEST).option) <= 1.02 * min(map(hours, kept))
    else:
        assert made.unmet is not None
        assert made.unmet.startswith("Nothing keeps these limits. The closest is ")
        over = min(max(cost(each) / budget, hours(each) / deadline) for each in made.options)
        closest = next(each for each in made.options if max(cost(each) / budget, hours(each) / deadline) == over)
        assert f"{closest.ranks} ranks on {closest.nodes} node" in made.unmet


def test_a_budget_that_cuts_off_faster_choices_is_said() -> None:
    free = advise(FITTED, RECIPE, LEARNING, Limits())
    budget = 1.2 * cost(free.choice(CHEAPEST).option)
    made = advise(FITTED, RECIPE, LEARNING, Limits(budget=budget))
    assert made.choice(FASTEST).option.ranks < free.choice(FASTEST).option.ranks
    assert "above the budget of" in (made.stopped or "")
    assert any("within the budget with a probability of" in each for each in made.choice(FASTEST).reasons)


def test_without_a_sweep_or_a_noise_scale_no_batch_beyond_the_study_is_advised() -> None:
    made = advise(ideal(), RECIPE, learn(RECIPE, None, None), Limits())
    assert max(each.ranks for each in made.options) == 16
    assert "larger than any in the study" in (made.stopped or "")
    assert all(choice.epochs == 40 for choice in made.choices)
    assert all(np.ptp(each.epochs) == 0 for each in made.options)


def test_a_strong_study_keeps_the_global_batch_and_goes_beyond_the_measured_ranks() -> None:
    recipe = replace(RECIPE, fixed_batch=256)
    runs = [MeasuredRun(4 * each, each, 4000.0 * each * 0.95 ** math.log2(each), 64 / each) for each in (1, 2, 4)]
    made = advise(fit_curve(make_curve(runs, "strong"), Fabric.HPC), recipe, learn(recipe, None, None), Limits())
    assert {each.global_batch for each in made.options} == {256}
    assert made.choice(FASTEST).option.nodes > 4


def test_the_global_batch_of_a_strong_study_splits_over_the_ranks() -> None:
    recipe = replace(RECIPE, fixed_batch=256, micro_batch=8)
    runs = [MeasuredRun(4 * each, each, 4000.0 * each, 64 / each) for each in (1, 2, 4)]
    found = numbers_of_ranks(fit_curve(make_curve(runs, "strong"), Fabric.HPC), recipe)
    assert found == [4, 8, 16, 32]


def test_fewer_nodes_than_any_measured_are_refused() -> None:
    runs = [MeasuredRun(4 * each, each, 4000.0 * each, 64) for each in (2, 4)]
    fitted = fit_curve(make_curve(runs, "weak"), Fabric.HPC)
    with pytest.raises(TuttiError, match="--most-nodes 1: expected 2 nodes or more"):
        numbers_of_ranks(fitted, RECIPE, 1)
    assert numbers_of_ranks(fitted, RECIPE, 3) == [8, 12]


def test_one_node_is_not_left() -> None:
    runs = [MeasuredRun(each, 1, 1000.0 * each * 0.95 ** math.log2(each), 64) for each in (1, 2, 4)]
    made = advise(fit_curve(make_curve(runs, "weak"), None, alone=True), RECIPE, learn(RECIPE, swept(), None), Limits())
    assert {each.nodes for each in made.options} == {1}
    assert [each.ranks for each in made.options] == [1, 2, 4]
    assert "everything was measured on one" in (made.stopped or "")


def test_a_known_link_leads_beyond_one_node() -> None:
    runs = [MeasuredRun(each, 1, 1000.0 * each, 64) for each in (1, 2, 4)]
    curve = make_curve(runs, "weak")
    link = given_link(curve, "200Gbit,3us", 1e8)
    fitted = fit_curve(curve, Fabric.HPC, link)
    made = advise(fitted, RECIPE, learn(RECIPE, swept(), None), Limits())
    assert made.choice(KNEE).option.nodes > 1
    found = measure_next(fitted, Fabric.HPC, RECIPE, learn(RECIPE, swept(), None), made.choice(KNEE).option, link)
    assert "120 steps on 2 nodes" in [each.action for each in found]


def test_a_batch_at_which_all_runs_collapse_is_not_advised() -> None:
    sweep = swept((256, 512, 1024))
    collapsed = SweptBatch(2048, (), 40, 4, 4)
    made = advise(ideal(), RECIPE, learn(RECIPE, replace(sweep, batches=(*sweep.batches, collapsed)), None), Limits())
    assert max(each.global_batch for each in made.options) < 2048
    assert "collapses at a global batch of 2,048" in (made.stopped or "")


def test_a_batch_larger_than_the_dataset_is_not_advised() -> None:
    recipe = replace(RECIPE, train_samples=1500)
    made = advise(ideal(), recipe, learn(recipe, swept(), None), Limits())
    assert max(each.global_batch for each in made.options) <= 1500
    assert "training samples" in (made.stopped or "")


def test_one_rank_is_advised_the_batch_that_its_sweep_shows_to_be_best() -> None:
    """On one device a larger batch gives more samples per second, and needs more epochs."""
    fitted = fit_curve(make_curve([MeasuredRun(1, 1, 1000.0, 64)], "weak"), None, alone=True)
    speeds = {64: 1000.0, 1024: 4000.0, 4096: 5000.0, 65536: 5200.0}
    sweep = swept(tuple(speeds))
    batches = tuple(replace(each, ranks=1, samples_per_second=speeds[each.global_batch]) for each in sweep.batches)
    made = advise(fitted, RECIPE, learn(RECIPE, replace(sweep, batches=batches), None), Limits())
    best = min(speeds, key=lambda batch: (1 + batch / NOISE) / speeds[batch])
    assert {each.option.global_batch for each in made.choices} == {best} == {1024}
    assert all("4,000 samples/s, measured by the sweep" in " ".join(each.reasons) for each in made.choices)


def test_rates_by_rule() -> None:
    assert rate_factor(1024, 256, "sgd", None) == 4
    assert rate_factor(1024, 256, "adamw", None) == 2
    far = [rate_factor(batch, 256, "sgd", NOISE) for batch in (512, 4096, 2**20)]
    assert far[0] == pytest.approx(1.89, abs=0.01)  # linear far below the critical batch
    assert far == sorted(far)
    assert far[-1] < 1 + NOISE / 256  # saturates
    chosen = choose_rate(1024, 40, RATE, None, None)
    assert (chosen.lr, chosen.warmup_epochs, chosen.is_measured) == (pytest.approx(0.4), 0.0, False)
    assert chosen.band == (pytest.approx(0.2), pytest.approx(0.8))
    assert "linear rule from 0.1 at 256" in chosen.reason


def test_a_rate_that_is_multiplied_by_more_than_four_is_warmed_up() -> None:
    assert choose_rate(8192, 40, RATE, None, None).warmup_epochs == 2
    assert choose_rate(8192, 5, RATE, None, None).warmup_epochs == 1
    assert choose_rate(8192, 40, replace(RATE, warmup_epochs=5), None, None).warmup_epochs == 5


def test_a_measured_rate_comes_before_the_rule() -> None:
    sweep = swept(lr=0.03)  # a third of what the rule gives
    same = choose_rate(1024, 40, RATE, NOISE, sweep)
    assert (same.lr, same.is_measured) == (pytest.approx(0.12), True)
    between = choose_rate(2048, 40, RATE, NOISE, sweep)
    assert between.lr == pytest.approx(0.24, rel=0.01)
    assert between.is_measured
    beyond = choose_rate(65536, 40, RATE, None, sweep)
    assert beyond.lr == pytest.approx(0.03 * 256)
    assert not beyond.is_measured
    assert "the nearest of the sweep" in beyond.reason
    assert choose_rate(1024, 40, RATE, NOISE, swept()).lr == pytest.approx(0.1 * 17 / 5)  # a sweep without rates


def test_the_optimizer_for_large_batches_is_named_where_it_is_needed() -> None:
    sweep = replace(swept((256, 512)), batches=(*swept((256, 512)).batches, SweptBatch(1024, (), 40, 4, 4)))
    assert "try LARS" in choose_rate(512, 40, RATE, NOISE, sweep).notes[0]
    resnet = replace(RATE, model="resnet50", optimizer="adamw")
    assert "need LAMB" in choose_rate(16384, 40, resnet, None, None).notes[0]
    assert choose_rate(1024, 40, resnet, None, None).notes == ()


def test_more_nodes_are_measured_next_where_hardware_is_open() -> None:
    two = ideal(most=2)
    learning = learn(RECIPE, swept(), None)
    option = advise(two, RECIPE, learning, Limits()).choice(KNEE).option
    found = measure_next(two, Fabric.HPC, RECIPE, learning, option)
    nodes = next(each for each in found if "steps on" in each.action)
    assert nodes.action == "120 steps on 4 nodes"
    assert 1 < nodes.after < nodes.before
    assert nodes.before == pytest.approx(np.divide(*np.quantile(option.hours, (0.95, 0.05))))
    assert nodes.node_minutes == pytest.approx(4 * 120 * 64 * 16 / (16_000 * 0.99) / 60, rel=0.05)


def test_the_noise_scale_is_measured_next_where_epochs_are_open() -> None:
    fitted, learning = ideal(), learn(RECIPE, None, None)
    option = advise(fitted, RECIPE, learning, Limits()).choice(KNEE).option
    found = measure_next(fitted, Fabric.HPC, RECIPE, learning, option)
    assert found[0].action == "the noise scale in 1 epoch"
    assert found[0].ranks == 4 * 16  # of a batch beyond those of the study
    assert found[0].after < found[0].before
    known = learn(RECIPE, None, believe(NOISE, 0.8 * NOISE, 1.25 * NOISE))
    actions = [each.action for each in measure_next(fitted, Fabric.HPC, RECIPE, known, option)]
    assert not any("noise scale" in action for action in actions)


def test_a_sweep_at_the_batch_itself_narrows_most() -> None:
    fitted = ideal(most=8)
    learning = learn(RECIPE, None, believe(NOISE, 0.8 * NOISE, 1.25 * NOISE))
    option = advise(fitted, RECIPE, learning, Limits()).choice(KNEE).option
    sweep = next(each for each in measure_next(fitted, Fabric.HPC, RECIPE, learning, option) if "runs" in each.action)
    assert f"global batch of {option.global_batch:,}" in sweep.action
    assert f"batch.global=256,{option.global_batch}" in sweep.command
    assert sweep.after < 0.7 * sweep.before


def test_what_has_been_measured_is_not_proposed_again() -> None:
    fitted = ideal(most=8)
    option = advise(fitted, RECIPE, learn(RECIPE, swept(), None), Limits(most_nodes=8)).choice(FASTEST).option
    assert option.nodes == 8
    learning = learn(RECIPE, swept((256, 512, option.global_batch)), None)
    assert [each for each in measure_next(fitted, Fabric.HPC, RECIPE, learning, option) if "runs" in each.action] == []


FITTED = ideal()
LEARNING: Learning = learn(RECIPE, swept(), None)


def make_sweep(path: Path, made: Callable[[Point], Made], axes: dict[str, list[Any]]) -> Path:
    """A sweep to a validation accuracy of 0.95, over two ranks and two seeds."""
    goal = Goal("full", metric="valid_accuracy", target=0.95)
    return sweep_study(path, made, axes, goal=goal).path


def reaching(batch: int, epoch: int, of: int = 30) -> Made:
    """A run that is at its target from an epoch on, of one step each."""
    epochs = [{"train_loss": 1.0, "valid_accuracy": 0.96 if each >= epoch else 0.5} for each in range(1, of + 1)]
    return Made(per_rank_batch=batch // 2, epochs=epochs, windows=of, every_steps=1)


def test_the_best_setting_of_each_batch_counts(tmp_path: Path) -> None:
    def made(point: Point) -> Made:
        slow = 3 if point.values["optim.lr"] == 0.1 else 0
        return reaching(point.values["batch.global"], 5 + slow + point.repeat)

    path = make_sweep(tmp_path / "sweep", made, {"batch.global": [64, 256], "optim.lr": [0.1, 0.2]})
    for config in path.glob("points/*/config.yaml"):
        config.write_text("optim: {name: lars}\nschedule: {warmup_epochs: 2}\n")
    found = read_sweep(path)
    assert [each.global_batch for each in found.batches] == [64, 256]
    for each in found.batches:
        assert each.epochs == (6, 7)
        assert (each.peak_lr, each.warmup_epochs, each.optimizer) == (0.1, 2, "lars")
        assert (each.runs, each.collapsed) == (4, 0)
    assert len(found.points()) == 4


def test_epochs_count_the_samples_that_they_have(tmp_path: Path) -> None:
    """An epoch of 100 samples has one batch of 64, and 36 samples that fill no batch."""
    path = make_sweep(
        tmp_path / "sweep", lambda point: reaching(point.values["batch.global"], 10), {"batch.global": [64, 96]}
    )
    for record in path.glob("points/*/record.json"):
        content = json.loads(record.read_text())
        content["plan"]["train_samples"] = 100
        record.write_text(json.dumps(content))
    assert [each.median_epochs for each in read_sweep(path).batches] == pytest.approx([6.4, 9.6])


def test_batches_that_miss_the_target_or_collapse_are_told_apart(tmp_path: Path) -> None:
    def made(point: Point) -> Made:
        batch = point.values["batch.global"]
        if batch == 1024:
            failed = PointState("failed", reason="the loss is not finite", attempts=1)
            return replace(reaching(batch, 1), state=failed, cause=Cause.DIVERGED)
        return reaching(batch, 99 if batch == 512 else 10)

    found = read_sweep(make_sweep(tmp_path / "sweep", made, {"batch.global": [64, 256, 512, 1024]}))
    assert [each.is_reached for each in found.batches] == [True, True, False, False]
    assert found.first_collapsed == 1024
    assert found.largest_reached.global_batch == 256
    missed = [each for each in found.points() if not each.is_reached]
    assert [(each.global_batch, each.epochs) for each in missed] == [(512, 30)]


@pytest.mark.parametrize(
    "other",
    [{"overrides": ("model.width=8",)}, {"at_once": 4}, {"recipe": "mnist"}],
)
def test_the_speed_of_another_workload_is_not_that_of_the_study(other: dict[str, Any]) -> None:
    fitted = fit_curve(make_curve([MeasuredRun(1, 1, 1000.0, 64)], "weak"), None, alone=True)
    sweep = swept((64, 1024))
    batches = tuple(replace(each, ranks=1, samples_per_second=9000.0) for each in sweep.batches)
    same, changed = (replace(sweep, batches=batches, **values) for values in ({}, other))
    assert advise(fitted, RECIPE, learn(RECIPE, same, None), Limits()).choice(KNEE).option.is_swept
    assert not advise(fitted, RECIPE, learn(RECIPE, changed, None), Limits()).choice(KNEE).option.is_swept
