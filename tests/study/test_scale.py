"""The points of scaling studies: batches, order, seeds, and errors before the first run."""

import pytest

from tutti.config.load import resolve
from tutti.errors import ConfigError
from tutti.study.checking import describe_goal, goal_overrides, read_goal
from tutti.study.definition import Goal
from tutti.study.scale import fixed_batch, read_mode, read_ranks, scale_points

TIMED = Goal("steps", 100, 20)


@pytest.mark.parametrize(
    ("mode", "given", "fewest", "expected"),
    [
        ("weak", "batch.global=64", 1, "batch.per_rank=64"),
        ("weak", "batch.global=64", 2, "batch.per_rank=32"),
        ("weak", "batch.per_rank=8", 2, "batch.per_rank=8"),
        ("strong", "batch.global=64", 2, "batch.global=64"),
        ("strong", "batch.per_rank=8", 2, "batch.global=16"),
    ],
)
def test_the_batch_of_the_recipe_is_that_of_the_fewest_ranks(mode, given, fewest, expected) -> None:
    assert fixed_batch(resolve("digits", [given]).config, mode, fewest) == expected


@pytest.mark.parametrize(("mode", "batches"), [("weak", [64, 128, 256]), ("strong", [64, 64, 64])])
def test_weak_keeps_the_batch_of_a_rank_and_strong_that_of_all(mode, batches) -> None:
    points = scale_points("digits", [], [1, 2, 4], mode, TIMED, 1)
    shares = [(each.config.batch.per_rank, each.config.batch.global_batch) for each in points]
    whole = [
        per_rank * each.point.ranks if per_rank else all_ranks
        for each, (per_rank, all_ranks) in zip(points, shares, strict=True)
    ]
    assert [each.point.ranks for each in points] == [1, 2, 4]
    assert whole == batches


def test_an_override_of_the_other_kind_of_batch_gives_way() -> None:
    points = scale_points("digits", ["batch.global=32"], [2, 4], "weak", TIMED, 1)
    assert [each.config.batch.per_rank for each in points] == [16, 16]


def test_repeats_run_in_a_random_order_that_is_always_the_same() -> None:
    once, again = (scale_points("digits", [], [1, 2, 4], "weak", TIMED, 3) for _ in range(2))
    names = [each.point.id for each in once]
    assert names == [each.point.id for each in again]
    assert sorted(names) == [f"n{ranks}-r{repeat}" for ranks in (1, 2, 4) for repeat in (1, 2, 3)]
    assert names != sorted(names)
    other = scale_points("digits", ["seed=7"], [1, 2, 4], "weak", TIMED, 3)
    assert [each.point.id for each in other] != names


def test_runs_that_learn_have_seeds_of_their_own_and_timed_ones_do_not() -> None:
    def seeds(goal: Goal) -> dict[str, int]:
        return {each.point.id: each.config.seed for each in scale_points("digits", ["seed=5"], [1], "weak", goal, 3)}

    assert seeds(Goal("full")) == {"n1-r1": 5, "n1-r2": 6, "n1-r3": 7}
    assert set(seeds(TIMED).values()) == {5}


def test_a_timed_run_ends_after_its_steps_and_saves_nothing() -> None:
    config = scale_points("digits", [], [1], "weak", TIMED, 1)[0].config
    assert (config.max_steps, config.log.every_steps, config.epochs) == (120, 10, 20)
    assert config.checkpoint.every_epochs is config.checkpoint.every_steps is config.checkpoint.best is None


def test_a_timed_run_has_its_steps_where_the_recipe_has_fewer() -> None:
    config = scale_points(
        "digits", ["batch.global=512", "schedule.warmup_epochs=2", "epochs=2"], [1], "weak", TIMED, 1
    )[0].config
    assert config.epochs == 60  # of 2 steps
    long = scale_points("digits", ["schedule.warmup_epochs=10"], [1], "weak", TIMED, 1)[0].config
    assert long.schedule.warmup_steps == 120


def test_no_window_is_half_warm_up() -> None:
    assert read_goal(100, 25, None, False, timed=True) == Goal("steps", 100, 30)
    assert read_goal(None, None, None, False, timed=True) == TIMED
    assert read_goal(None, None, "valid_loss=0.5", False, timed=True) == Goal("target", metric="valid_loss", target=0.5)


def test_a_run_to_a_target_stops_there_and_a_timed_one_does_not() -> None:
    goal = read_goal(None, None, "valid_loss=0.5", False, timed=True)
    own = ["stop_at.valid_accuracy=0.1"]
    assert scale_points("digits", own, [1], "weak", goal, 1)[0].config.stop_at == {"valid_loss": 0.5}
    assert scale_points("digits", own, [1], "weak", TIMED, 1)[0].config.stop_at is None
    assert describe_goal(goal) == "to valid_loss=0.5, or the whole recipe"


def test_where_time_is_not_the_question_a_target_is_noted_and_training_goes_on() -> None:
    goal = read_goal(None, None, "valid_loss=0.5", False, timed=False)
    assert goal == Goal("full", metric="valid_loss", target=0.5)
    assert not any("stop_at" in word for word in goal_overrides(goal, resolve("digits").config, 1))
    assert describe_goal(goal) == "the whole recipe, and when it reaches valid_loss=0.5"


def test_all_points_that_cannot_be_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        scale_points("digits", ["batch.micro=null"], [1, 3, 5], "strong", TIMED, 2)
    text = str(raised.value)
    assert text.startswith("4 of 6 points cannot run:\n")
    assert text.count("ranks=3: batch.global=64 does not split over 3 ranks: expected a multiple of 3.") == 1
    assert "ranks=5: batch.global=64 does not split over 5 ranks" in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: read_mode("weka"), "--mode 'weka': expected weak, .* Did you mean 'weak'?"),
        (lambda: read_ranks("1,x"), "--ranks '1,x': expected numbers of ranks, each 1 or more"),
        (lambda: read_ranks("0,1"), "--ranks '0,1': expected numbers of ranks, each 1 or more"),
        (lambda: read_ranks("2,1,2"), "names 2 twice: .* Measure it several times with --repeat"),
        (
            lambda: scale_points("digits", [], [3], "weak", TIMED, 1),
            "does not split over 3 ranks, .* Set batch.per_rank=21",
        ),
        (lambda: scale_points("digits", [], [1], "weak", TIMED, 0), "--repeat 0: expected 1 or more"),
        (
            lambda: scale_points("digits", ["optim.lrr=1"], [1], "weak", TIMED, 1),
            "unknown key 'optim.lrr'.* Did you mean 'lr'",
        ),
        (
            lambda: scale_points("digits", [], [1], "weak", Goal("target", metric="valid_acuracy", target=0.9), 1),
            "--target valid_acuracy=0.9: digits measures valid_loss, valid_accuracy.* Did you mean 'valid_accuracy'",
        ),
        (
            lambda: scale_points("digits", ["stop_at.valid_top5=0.9"], [1], "weak", TIMED, 1),
            "stop_at.valid_top5=0.9: digits measures valid_loss, valid_accuracy, and no 'valid_top5'",
        ),
        (lambda: read_goal(10, None, "valid_loss=1", False, timed=True), "--steps and --target: expected one goal"),
        (lambda: read_goal(None, 5, None, True, timed=True), "--warmup 5 with --full: expected --steps"),
        (lambda: read_goal(0, None, None, False, timed=True), "--steps 0: expected 1 or more"),
        (lambda: read_goal(None, None, "accuracy", False, timed=True), "--target 'accuracy': expected METRIC=NUMBER"),
    ],
)
def test_what_cannot_be_is_refused(call, message) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
