"""The analysis of studies, on folders with known results."""

from pathlib import Path

import pytest
from study_folders import Made, scale_study, sweep_study

from tutti.runs.step_parts import SHARES
from tutti.study.analysis import Analysis, analyse
from tutti.study.definition import Goal, Point, PointState, StudyFolder, read_definition
from tutti.study.outcome import read_outcomes
from tutti.study.sweep_results import axis_of, describe, find_series, value_words


def analysis_of(folder: StudyFolder) -> Analysis:
    definition = read_definition(folder)
    return analyse(definition, read_outcomes(folder, definition))


def test_speed_up_and_efficiency_are_against_the_smallest_number_of_ranks(tmp_path: Path) -> None:
    speeds = {2: 2000.0, 4: 3600.0, 8: 6000.0}
    folder = scale_study(tmp_path / "s", lambda p: Made(speeds[p.ranks], noise=0.01), ranks=(8, 2, 4), repeats=3)
    scaling = analysis_of(folder).scaling
    assert scaling is not None
    assert [point.ranks for point in scaling.points] == [2, 4, 8]
    assert [point.speedup.value for point in scaling.points] == pytest.approx([1, 1.8, 3.0], rel=0.02)
    assert [point.efficiency.value for point in scaling.points] == pytest.approx([1, 0.9, 0.75], rel=0.02)
    assert all(point.efficiency.low <= point.efficiency.value <= point.efficiency.high for point in scaling.points)
    assert [(point.runs, point.windows) for point in scaling.points] == [(3, 30)] * 3
    base = scaling.points[0].efficiency
    assert (base.low, base.high) == (1, 1)


def test_the_slow_warm_up_is_not_counted(tmp_path: Path) -> None:
    folder = scale_study(tmp_path / "s", lambda _: Made(1000), ranks=(1,))
    scaling = analysis_of(folder).scaling
    assert scaling is not None
    assert scaling.points[0].speed.low == scaling.points[0].speed.high == 1000


@pytest.mark.parametrize(("mode", "law"), [("strong", "Amdahl"), ("weak", "Gustafson")])
def test_the_law_goes_with_the_mode(tmp_path: Path, mode, law: str) -> None:
    def made(point: Point) -> Made:
        n = point.ranks
        return Made(500 / (0.1 + 0.9 / n) if mode == "strong" else 500 * (0.1 + 0.9 * n))

    scaling = analysis_of(scale_study(tmp_path / "s", made, mode=mode)).scaling
    assert scaling is not None
    assert scaling.serial is not None
    assert scaling.serial.law == law
    assert scaling.serial.fraction.value == pytest.approx(0.1)


def test_shares_are_all_of_a_step(tmp_path: Path) -> None:
    def made(point: Point) -> Made:  # 32 samples a rank compute in 10 ms
        exposed = 0.001 + 0.002 * 2 * (point.ranks - 1) / point.ranks if point.ranks > 1 else 0.0
        return Made(32 * point.ranks / (0.01 + exposed), exposed / (0.01 + exposed))

    scaling = analysis_of(scale_study(tmp_path / "s", made)).scaling
    assert scaling is not None
    for point in scaling.points:
        assert set(point.shares) == set(SHARES)
        assert sum(point.shares.values()) == pytest.approx(1)
    four = scaling.at(4)
    assert four is not None
    assert four.shares["communication"] == pytest.approx(0.004 / 0.014)


def test_points_that_failed_or_wait_are_kept_without_figures(tmp_path: Path) -> None:
    def made(point: Point) -> Made | None:
        if point.ranks == 8:
            return None
        return Made(
            100.0 * point.ranks, state=PointState("failed", "boom") if point.ranks == 4 else PointState("finished")
        )

    analysis = analysis_of(scale_study(tmp_path / "s", made))
    assert [run.outcome.state.state for run in analysis.runs] == ["finished", "finished", "failed", "waiting"]
    assert [run.speed is None for run in analysis.runs] == [False, False, True, True]
    assert analysis.scaling is not None
    assert [point.ranks for point in analysis.scaling.points] == [1, 2]


def test_a_repeat_far_from_the_others_is_marked_and_still_counted(tmp_path: Path) -> None:
    folder = scale_study(tmp_path / "s", lambda p: Made(500 if p.repeat == 2 else 1000), ranks=(1, 2), repeats=4)
    setting = analysis_of(folder).settings[0]
    assert [run.is_outlier for run in setting.runs] == [False, True, False, False]
    assert setting.speed is not None
    assert (setting.speed.n, setting.speed.low) == (4, 500)


def test_a_sweep_sums_up_seeds_and_counts_collapses(tmp_path: Path) -> None:
    def made(point: Point) -> Made:
        accuracy = 0.1 if point.values["batch.global"] == 1024 else 0.9 + 0.01 * point.repeat
        return Made(
            epochs=[{"train_loss": 0.1, "valid_accuracy": 0.5}, {"train_loss": 0.1, "valid_accuracy": accuracy}]
        )

    goal = Goal("full", metric="valid_accuracy", target=0.9)
    analysis = analysis_of(sweep_study(tmp_path / "s", made, {"batch.global": [64, 1024]}, 3, goal))
    small, large = analysis.settings
    final = small.final("valid_accuracy")
    assert final is not None
    assert (final.n, final.mean, final.low, final.high) == pytest.approx((3, 0.92, 0.91, 0.93))
    assert (len(small.collapsed), len(large.collapsed)) == (0, 3)
    steps = small.steps_to_goal()
    assert steps is not None
    assert (steps.n, steps.median) == (3, 50)
    assert large.steps_to_goal() is None


def test_curves_lie_along_the_batch_and_are_named_by_the_rest(tmp_path: Path) -> None:
    axes = {
        "schedule.scaling": ["none", "linear"],
        "schedule.warmup_epochs": [0, 2],
        "batch.global": [256, 64],
        "optim.name": ["sgd"],
    }
    analysis = analysis_of(sweep_study(tmp_path / "s", lambda _: None, axes, 1))
    assert axis_of(analysis) == "batch.global"
    series = find_series(analysis)
    assert [each.name for each in series] == [
        "no scaling without warm-up",
        "no scaling with 2 epochs of warm-up",
        "linear scaling without warm-up",
        "linear scaling with 2 epochs of warm-up",
    ]
    assert [setting.values["batch.global"] for setting in series[0].settings] == [64, 256]


def test_values_that_are_no_numbers_are_described_too() -> None:
    words = describe({"model.hidden": [128, 64], "optim.name": "lars", "schedule.warmup_steps": 1})
    assert words == "model.hidden [128, 64], lars with 1 step of warm-up"


def test_a_part_is_named_as_shortly_as_tells_it_from_others() -> None:
    lars, other = {"name": "lars", "lr": 0.01, "eta": 0.02}, {"name": "lars", "lr": 0.01, "eta": 0.1}
    sgd = {"name": "sgd", "lr": 0.01}
    assert describe({"optim": lars}, [{"optim": lars}, {"optim": sgd}]) == "lars"
    assert describe({"optim": lars}, [{"optim": lars}, {"optim": other}, {"optim": sgd}]) == "lars, eta 0.02"
    assert value_words(sgd, [lars, other, sgd]) == "sgd"
    assert value_words(lars) == "lars, lr 0.01, eta 0.02"
    assert [value_words(value) for value in (None, True, 1e-3, [64, 32])] == ["none", "true", "0.001", "[64, 32]"]
