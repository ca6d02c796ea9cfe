"""Conclusions are stated if the numbers support them, and only then."""

from collections.abc import Callable
from pathlib import Path

from study_folders import Made, scale_study, sweep_study

from tutti.report.study.write import read_study
from tutti.study.conclusions import conclude
from tutti.study.definition import Goal, Point, PointState, StudyFolder


def sentences(folder: StudyFolder, other: StudyFolder | None = None) -> str:
    return "\n".join(conclude(read_study(folder.path), read_study(other.path) if other else None))


def costly(batch: int, seconds: float, noise: float = 0.01) -> Callable[[Point], Made]:
    """Runs whose exchange takes the same time whatever the batch, of which 32 samples compute in 50 ms."""

    def made(point: Point) -> Made:
        exposed = seconds * 2 * (point.ranks - 1) / point.ranks
        step = 0.05 * batch / 32 + exposed
        return Made(batch * point.ranks / step, exposed / step, noise, windows=20, per_rank_batch=batch)

    return made


def test_how_far_efficiency_holds_and_what_takes_it(tmp_path: Path) -> None:
    said = sentences(scale_study(tmp_path / "s", costly(32, 0.01), ranks=(1, 2, 4, 8), repeats=2))
    assert "Efficiency stays above 80% up to 2 ranks; beyond, it falls to 74%" in said
    assert "at 8, where exposed communication takes 26% of the step." in said
    assert "more than with perfect efficiency; all of that is communication." in said
    assert "8 ranks have 5.9" in said
    assert "2 (n - 1) / n" not in said


def test_efficiency_that_holds_to_the_end_is_said_so(tmp_path: Path) -> None:
    said = sentences(scale_study(tmp_path / "s", costly(32, 0.0005)))
    assert "Efficiency stays above 80% up to 8 ranks, the most that were measured: 99% (98% to 99%) there." in said
    assert "of that is" not in said


def test_noise_leaves_efficiency_open(tmp_path: Path) -> None:
    def made(point: Point) -> Made:
        return Made(1000.0 if point.ranks == 1 else 1600.0 * (1 + 0.1 * (-1) ** point.repeat), noise=0.1)

    said = sentences(scale_study(tmp_path / "s", made, ranks=(1, 2), repeats=2))
    assert "too close to 80% to tell" in said
    assert "stays above" not in said


def test_what_is_plain_beyond_an_open_point_is_said(tmp_path: Path) -> None:
    said = sentences(scale_study(tmp_path / "s", costly(32, 0.0125, noise=0.02), ranks=(1, 2, 8), repeats=2))
    assert "At 2 ranks efficiency is 80% (" in said
    assert "too close to 80% to tell; at 8 it is 70%" in said
    assert "where exposed communication takes 30% of the step." in said


def test_more_ranks_may_be_slower(tmp_path: Path) -> None:
    said = sentences(scale_study(tmp_path / "s", lambda p: Made(1000.0 / p.ranks), ranks=(1, 2, 4)))
    assert "Efficiency is below 80% from 2 ranks on" in said
    assert "4 ranks are slower than 1: 0.25 (0.25 to 0.25) times" in said
    assert "serial" not in said


def test_a_strong_study_names_its_serial_fraction_and_its_limit(tmp_path: Path) -> None:
    said = sentences(scale_study(tmp_path / "s", lambda p: Made(500 / (0.1 + 0.9 / p.ranks)), mode="strong"))
    assert "By Amdahl's law 10.0% (10.0% to 10.0%) of the work is serial" in said
    assert "no number of ranks makes more than 10 times as fast as one" in said


def test_a_larger_batch_raises_efficiency_and_the_order_of_studies_does_not_matter(tmp_path: Path) -> None:
    small = scale_study(tmp_path / "a", costly(64, 0.03), ranks=(1, 2, 4))
    large = scale_study(tmp_path / "b", costly(128, 0.03), ranks=(1, 2, 4))
    expected = (
        "From 64 to 128 samples per rank efficiency at 4 ranks rises from 69% to 82%, "
        "and exposed communication falls from 31% to 18% of the step."
    )
    assert expected in sentences(small, large)
    assert expected in sentences(large, small)


def test_studies_within_their_intervals_are_not_told_apart(tmp_path: Path) -> None:
    one = scale_study(tmp_path / "a", costly(64, 0.03, noise=0.05), ranks=(1, 2))
    other = scale_study(tmp_path / "b", costly(64, 0.0301, noise=0.05), ranks=(1, 2))
    assert "efficiency at 2 ranks does not change beyond the intervals" in sentences(one, other)


def test_ranks_that_share_cores_are_named(tmp_path: Path) -> None:
    said = sentences(scale_study(tmp_path / "s", costly(32, 0.01), ranks=(1, 4, 8, 16)))  # on hosts of 4 cores
    assert "From 8 ranks on, ranks share cores (8 ranks on the 4 cores of a host), which lowers efficiency" in said
    said = sentences(scale_study(tmp_path / "t", costly(32, 0.01), ranks=(1, 2, 4)))
    assert "share cores" not in said


def test_time_to_the_target_is_compared(tmp_path: Path) -> None:
    def made(point: Point) -> Made:
        epochs = [{"valid_accuracy": 0.5}, {"valid_accuracy": 0.96}]
        return Made(1000.0 * point.ranks, epochs=epochs, per_rank_batch=64 // point.ranks)

    goal = Goal("target", metric="valid_accuracy", target=0.95)
    said = sentences(scale_study(tmp_path / "s", made, ranks=(1, 4), goal=goal, mode="strong"))
    times = "4 ranks take 800 ms and 1 rank 3.2 s: 4.00 times as fast (one run each)"
    assert f"To reach a validation accuracy of 95.00%, {times}." in said


def test_what_failed_or_is_missing_is_told(tmp_path: Path) -> None:
    def made(point: Point) -> Made | None:
        return None if point.ranks == 8 else Made(100.0, state=PointState("failed" if point.ranks == 4 else "finished"))

    said = sentences(scale_study(tmp_path / "s", made))
    assert "1 of 4 points failed: n4-r1." in said
    assert "1 of 4 points has not finished yet." in said


def learned(accuracy: float, point: Point) -> Made:
    last = accuracy + 0.001 * point.repeat
    return Made(epochs=[{"train_loss": 1.0, "valid_accuracy": 0.6}, {"train_loss": 0.5, "valid_accuracy": last}])


def test_a_sweep_says_where_each_rule_breaks(tmp_path: Path) -> None:
    def made(point: Point) -> Made:
        batch, rule = point.values["batch.global"], point.values["schedule.scaling"]
        if rule == "linear" and batch >= 1024:
            return learned(0.1, point)
        return learned(0.97 if batch == 4096 else 0.99, point)

    axes = {"batch.global": [64, 1024, 4096], "schedule.scaling": ["linear", "sqrt"], "schedule.warmup_epochs": [0, 1]}
    said = sentences(sweep_study(tmp_path / "s", made, axes, 3))
    assert (
        "Linear scaling without warm-up: training collapses at a global batch of 1,024 and beyond, in every run."
        in said
    )
    assert (
        "No run collapses at any value of the global batch up to 4,096, the largest tried: "
        "sqrt scaling without warm-up; sqrt scaling with 1 epoch of warm-up." in said
    )
    assert "Validation accuracy falls as the global batch grows: from 99.20% at 64 to 97.20% at 4,096 with sqrt" in said
    assert "5 other settings cannot be told from it with 3 seeds." in said


def test_many_curves_are_counted_and_the_ends_are_named(tmp_path: Path) -> None:
    def made(point: Point) -> Made:
        rule, batch = point.values["optim"]["name"], point.values["batch.global"]
        return learned(0.9905 - (0.01 * point.values["optim"]["lr"] + 0.05 * (rule == "lars")) * (batch == 4096), point)

    optim = [{"name": name, "lr": lr} for name in ("sgd", "lars") for lr in (1, 2, 3)]
    said = sentences(sweep_study(tmp_path / "s", made, {"optim": optim, "batch.global": [64, 4096]}, 3))
    assert "No run collapses at any value of the global batch up to 4,096, the largest tried, in 6 of 6 curves." in said
    assert (
        "Validation accuracy falls as the global batch grows in 6 of 6 curves: most from 99.25% at 64 to 91.25% at "
        "4,096 with lars, lr 3; least from 99.25% at 64 to 98.25% at 4,096 with sgd, lr 1." in said
    )


def test_a_collapse_of_some_seeds_is_no_collapse_of_all(tmp_path: Path) -> None:
    def made(point: Point) -> Made:
        return learned(0.1 if point.values["batch.global"] == 256 and point.repeat == 1 else 0.9, point)

    said = sentences(sweep_study(tmp_path / "s", made, {"batch.global": [64, 256]}, 3))
    assert "No run collapses" not in said
    assert "Some runs collapse, by the global batch: 1 of 3 at 256." in said


def test_settings_of_two_sweeps_are_compared_where_both_have_finished(tmp_path: Path) -> None:
    def sweep(name: str, batches: list[int], accuracy: float | None) -> StudyFolder:
        made = None if accuracy is None else lambda point: learned(accuracy, point)
        return sweep_study(tmp_path / name, made or (lambda _: None), {"batch.global": batches}, seeds=3)

    one = sweep("one", [64, 256], 0.9)
    none = "The two studies have no setting in common with a validation accuracy: nothing is compared."
    assert none in sentences(one, sweep("elsewhere", [128, 512], 0.9))
    assert none in sentences(one, sweep("waiting", [64, 256], None))
    assert "None of the 2 settings in both studies differs" in sentences(one, sweep("same", [64, 256], 0.9))
    said = sentences(one, sweep("worse", [64], 0.5))
    assert "Validation accuracy is better here with global batch 64: " in said


def test_the_only_curve_needs_no_name(tmp_path: Path) -> None:
    said = sentences(sweep_study(tmp_path / "s", lambda p: learned(0.9, p), {"batch.global": [64, 256]}))
    assert "No run collapses at any value of the global batch up to 256, the largest tried." in said


def test_the_fewest_steps_to_a_target_are_named(tmp_path: Path) -> None:
    def made(point: Point) -> Made:
        early, late = (0.96, 0.97) if point.values["optim.name"] == "lamb" else (0.5, 0.96)
        return Made(epochs=[{"valid_accuracy": early}, {"valid_accuracy": late}])

    goal = Goal("target", metric="valid_accuracy", target=0.95)
    said = sentences(sweep_study(tmp_path / "s", made, {"optim.name": ["lamb", "sgd"]}, 2, goal))
    assert "in 25 steps; whether 1 other setting needs more cannot be told with 2 seeds." in said
    said = sentences(sweep_study(tmp_path / "t", made, {"optim.name": ["lamb", "sgd"]}, 3, goal))
    assert "Lamb reaches a validation accuracy of 95.00% in the fewest steps: 25." in said


def test_steps_between_validations_are_not_compared(tmp_path: Path) -> None:
    """With a small batch the first validation comes after more steps than a large one needs."""

    def made(point: Point) -> Made:
        small = point.values["batch.global"] == 64
        accuracies = [0.96, 0.97] if small else [0.5, 0.96]
        return Made(epochs=[{"valid_accuracy": each} for each in accuracies], windows=200 if small else 10)

    goal = Goal("target", metric="valid_accuracy", target=0.95)
    said = sentences(sweep_study(tmp_path / "s", made, {"batch.global": [64, 1024]}, 3, goal))
    assert (
        "A global batch of 1,024 reaches a validation accuracy of 95.00% in 50 steps; whether 1 other setting needs "
        "more cannot be told with 3 seeds, each validated after whole epochs."
    ) in said


def test_a_setting_that_reaches_the_target_in_some_runs_is_not_said_to_need_more_steps(tmp_path: Path) -> None:
    def made(point: Point) -> Made:
        if point.values["optim.name"] == "lamb":
            return Made(epochs=[{"valid_accuracy": 0.9}] * 4 + [{"valid_accuracy": 0.96}])
        return Made(epochs=[{"valid_accuracy": 0.96 if point.repeat < 3 else 0.9}] * 5)

    goal = Goal("target", metric="valid_accuracy", target=0.95)
    said = sentences(sweep_study(tmp_path / "s", made, {"optim.name": ["lamb", "sgd"]}, 3, goal))
    assert "in the fewest steps of the settings that reach it in every run: 50." in said


def test_a_study_that_has_not_run_concludes_nothing_but_that(tmp_path: Path) -> None:
    assert sentences(scale_study(tmp_path / "s", lambda _: None)) == "4 of 4 points have not finished yet."
