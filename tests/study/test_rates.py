"""The search for a learning rate: its runs, what made-up losses recommend, and real runs."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Tutti
from rank_jobs import run_ranks, train
from study_folders import Made, sweep_study

from tutti.errors import Cause, DataError
from tutti.forecast.batches import read_sweep
from tutti.report.study.write import read_study, write_report
from tutti.study.conclusions import conclude
from tutti.study.definition import Definition, Goal, Point, PointState, StudyFolder, write_definition, write_state
from tutti.study.outcome import Epoch, PointOutcome, read_figures
from tutti.study.rates import RateResult, add_rates, advise_rate, rate_goal
from tutti.study.running import decide
from tutti.study.sweep import SweepGrid, read_axes, sweep_points

GOAL = Goal("rate", 100)
DIVERGED = PointState("failed", reason="the loss is nan", attempts=1)


def results(losses: Mapping[float, float | None], seeds: int = 3, spread: float = 0.01) -> list[RateResult]:
    """Results by rate, with a small spread over seeds; None is a rate at which one run collapses."""
    found = []
    for rate, loss in losses.items():
        values = [] if loss is None else [loss * (1 + spread * (seed - 1)) for seed in range(seeds)]
        found.append(RateResult(rate, tuple(values), collapsed=loss is None))
    return found


def test_the_rate_with_the_lowest_loss_is_recommended() -> None:
    advice = advise_rate(results({1e-4: 2.0, 1e-3: 1.0, 1e-2: 0.3, 1e-1: 0.9, 1.0: None}))
    assert (advice.rate, advice.best, advice.open, advice.collapses_at, advice.edge) == (1e-2, 1e-2, (), 1.0, None)


def test_at_the_limit_of_stability_the_rate_below_is_recommended_unless_it_is_worse() -> None:
    losses = {1e-3: 1.0, 1e-2: 0.31, 3e-2: 0.30, 1e-1: None}
    assert advise_rate(results(losses, seeds=1)).rate == 1e-2
    assert advise_rate(results(losses, spread=0.1)).rate == 1e-2
    clear = advise_rate(results(losses | {1e-2: 0.6}))
    assert (clear.rate, clear.best, clear.open) == (3e-2, 3e-2, ())


def test_with_one_seed_only_large_factors_are_told_and_open_rates_are_neighbours() -> None:
    advice = advise_rate(results({1e-5: 9.0, 1e-4: 8.5, 1e-3: 0.5, 1e-2: 0.3, 1e-1: 0.6, 1.0: 20.0}, seeds=1))
    assert (advice.rate, advice.open) == (1e-2, (1e-3, 1e-1))


@pytest.mark.parametrize(
    ("losses", "edge", "rate"),
    [
        ({1e-3: 1.0, 1e-2: 0.5, 1e-1: 0.1}, "largest", 1e-1),
        ({1e-3: 0.1, 1e-2: 0.5, 1e-1: 0.9}, "smallest", 1e-3),
        ({1e-3: None, 1e-2: None}, None, None),
        ({1e-3: 0.5, 1e-2: None}, "smallest", 1e-3),
    ],
)
def test_a_best_rate_at_the_end_of_the_range_is_said_to_be_there(losses, edge, rate) -> None:
    advice = advise_rate(results(losses))
    assert (advice.edge, advice.rate) == (edge, rate)


def made(point: Point) -> Made:
    """Losses that fall fastest at a rate of 0.01, and a rate of 1 at which runs diverge."""
    rate = point.values["optim.lr"]
    if rate >= 1:
        return Made(state=DIVERGED, cause=Cause.DIVERGED)
    speed = 20 * (1 + math.log10(rate / 0.01) ** 2)
    wobble = 1 + 0.01 * point.repeat
    return Made(windows=10, every_steps=10, losses=lambda step: wobble * (0.2 + 2.1 * math.exp(-step / speed)))


def test_a_study_states_rate_and_conditions_and_draws_the_figure(tmp_path: Path) -> None:
    axes = {"optim.lr": [1e-4, 1e-3, 1e-2, 1e-1, 1.0]}
    folder = sweep_study(tmp_path / "rates", made, axes, seeds=3, goal=GOAL)
    report = write_report(folder.path)
    first, last, *_ = report.conclusions
    loss = 0.2 + 2.1 * math.exp(-5)
    assert first == (
        "Recommended: optim.lr=0.01, which has the lowest training loss of the 5 rates from 0.0001 to 1, "
        f"{1.02 * loss:.4f} ({1.01 * loss:.4f} to {1.03 * loss:.4f}) in 3 runs; training collapses at 1."
    )
    assert last.startswith(
        "This holds for a global batch of 64, 100 steps from the first weights at a constant rate wi"
    )
    assert (report.pictures / "metric.png").is_file()
    page = report.page.read_text()
    assert "Learning rates of mnist" in page and "100 steps each at a constant rate" in page
    with pytest.raises(
        DataError, match=r"searched for a learning rate, in 100 steps each: expected whole runs\. Start"
    ):
        read_sweep(folder.path)


def test_each_curve_of_a_search_has_its_own_rate(tmp_path: Path) -> None:
    axes = {"batch.global": [64, 256], "optim.lr": [1e-3, 1e-2, 1e-1]}
    sentences = conclude(read_study(sweep_study(tmp_path / "rates", made, axes, goal=GOAL).path))
    assert [each.partition(", which")[0] for each in sentences if "Recommended" in each] == [
        "global batch 64: Recommended: optim.lr=0.01",
        "global batch 256: Recommended: optim.lr=0.01",
    ]


def test_points_are_short_runs_at_a_constant_rate_around_that_of_the_recipe() -> None:
    grid = SweepGrid(add_rates("digits", ["optim.lr=2e-3"], ()))
    found, _ = sweep_points("digits", ["optim.lr=2e-3"], grid, rate_goal(None), False)
    rates = [2e-5, 6e-5, 2e-4, 6e-4, 2e-3, 6e-3, 0.02, 0.06, 0.2]
    assert [each.config.optim.lr for each in found] == pytest.approx(rates)
    config = found[0].config
    assert (config.max_steps, config.epochs, config.log.every_steps) == (100, 20, 10)
    assert (config.schedule.decay, config.schedule.warmup_steps, config.schedule.warmup_epochs) == ("constant", 0, None)
    assert (config.checkpoint.every_epochs, config.stop_early) == (None, None)
    given = add_rates("digits", [], read_axes(["optim.lr=1e-3,1e-2", "optim.name=adam,adamw"]))
    assert [axis.key for axis in given] == ["optim.lr", "optim.name"]
    assert decide(PointState("running"), GOAL, None, has_checkpoint=True, retry=False) == "start"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--find-rate", "--steps", "5"], "--steps 5: expected 10 or more, of which the last tenth is compared."),
        (["--find-rate", "--target", "valid_loss=1"], "--find-rate with --target valid_loss=1: expected one of them."),
        (
            ["--steps", "50", "--set", "epochs=1,2"],
            "--steps 50 without --find-rate: expected runs of the whole recipe.",
        ),
        (
            ["--find-rate", "--set", "optim={name: sgd, lr: 1.0},{name: adam, lr: 1.0}"],
            "--find-rate with --set optim=...",
        ),
    ],
)
@pytest.mark.ranks
def test_what_does_not_go_together_is_refused(tutti: Tutti, words: list[str], message: str) -> None:
    done = tutti("sweep", "digits", *words)
    assert done.code == 2
    assert message in done.all


@pytest.mark.ranks
def test_real_runs_from_too_small_to_too_large(tmp_path: Path) -> None:
    axes = read_axes(["optim.lr=1e-6,3e-3,1e-2,1e30"])
    goal = rate_goal(20)
    checked, _ = sweep_points("digits/mlp", ["batch.micro=null"], SweepGrid(axes), goal, False)
    folder = StudyFolder(tmp_path / "study")
    folder.points.mkdir(parents=True)
    write_definition(folder, Definition("sweep", "digits/mlp", (), goal, tuple(each.point for each in checked)))
    for number, each in enumerate(checked):
        values = each.config.plain() | {"recipe": "rates", "out": str(tmp_path / str(number))}
        (found,) = run_ranks(1, train, values, expect_failure=True)
        (run,) = (tmp_path / str(number) / "rates").iterdir()
        run.rename(folder.run(each.point.id).path)
        write_state(folder, each.point.id, DIVERGED if isinstance(found, Exception) else PointState("finished"))
    sentences = conclude(read_study(folder.path))
    assert sentences[0].startswith("Recommended: optim.lr=0.003"), sentences
    assert "training collapses at 1e+30" in sentences[0]


@pytest.mark.ranks
@pytest.mark.slow
def test_the_command_searches_and_resumes(tutti: Tutti, tmp_path: Path) -> None:
    done = tutti("sweep", "digits/mlp", "--find-rate", "--steps", "20", "--set", "optim.lr=1e-5,1e-3,1e-2")
    assert done.code == 0, done.all
    assert "sweep study of digits/mlp: 3 points, each 20 steps at a constant rate" in done.out
    assert "Recommended: optim.lr=0.01" in done.out
    (study,) = (tmp_path / "runs" / "studies" / "digits" / "mlp").iterdir()
    again = tutti("sweep", "--resume", str(study))
    assert again.code == 0 and "Recommended: optim.lr=0.01" in again.out


def test_a_loss_without_a_start_may_rise() -> None:
    """A step of the user's own has no loss before its first step, and that of an adversarial one need not fall."""
    point = Point("p1", 1, (), {}, 1, 42)
    epochs = (Epoch(1, 10, 1.0, {"train_loss": 0.9}),)
    outcome = PointOutcome(point, PointState("finished"), "", epochs=epochs, losses=((1, 0.1, 0.5), (10, 1.0, 0.9)))
    assert read_figures(outcome, Goal("full")).collapse is None
    assert read_figures(outcome, GOAL).collapse is None
    known = replace(outcome, start={"train_loss": 0.5})
    assert read_figures(known, Goal("full")).collapse == "the training loss ends at 0.9, above its start of 0.5"
    assert read_figures(known, GOAL).collapse == "the training loss ends at 0.9, above its start of 0.5"
