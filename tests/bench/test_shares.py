"""A step is divided into its exposed parts."""

import pytest
from made_up import by_rank, by_trial, made_up

from tutti.bench.results import Ceilings, Measurement, Work
from tutti.bench.shares import Figure, find_fractions, find_shares
from tutti.runs.step_parts import SHARES, StepPart

WORK = Work(flops=1e9, bytes_moved=4e8, least_bytes=1e8, operators=100, synchronisations=0)


def test_a_figure_is_the_median_with_the_middle_half_as_its_spread() -> None:
    figure = Figure((5.0, 1.0, 2.0, 3.0, 100.0))
    assert (figure.median, figure.quartiles, figure.spread) == (3.0, (2.0, 5.0), 3.0)
    assert figure.relative_spread == 1.0


@pytest.mark.parametrize("trials", [(), (2.0,)])
def test_a_figure_of_no_or_one_trial_has_no_spread(trials: tuple[float, ...]) -> None:
    assert Figure(trials).spread == 0
    assert Figure(trials).median == sum(trials)


def test_figures_are_added_trial_by_trial() -> None:
    assert (Figure((1.0, 2.0)) + Figure((10.0, 20.0))).trials == (11.0, 22.0)
    assert (Figure((1.0, 2.0)) - Figure((1.0, 1.0))).trials == (0.0, 1.0)


def test_the_parts_of_one_rank_are_the_step() -> None:
    shares = find_shares(made_up(data=0.3, computing=0.6, rest=0.1))
    assert {name: pytest.approx(shares.share(name)) for name in SHARES} == {
        "data loading": 0.3,
        "compute": 0.6,
        "communication": 0.0,
        "straggler": 0.0,
        "other": 0.1,
    }


def test_compute_is_the_forward_pass_the_backward_pass_and_the_update() -> None:
    seconds = {"data": 1.0, "forward": 2.0, "backward": 4.0, "communication": 8.0, "update": 16.0, "rest": 32.0}
    parts = {name: [[value]] for name, value in seconds.items()}
    shares = find_shares(made_up(trials=1, parts=parts, seconds={"whole": [[63.0]]}))
    assert {name: figure.median for name, figure in shares.path.items()} == {
        "data loading": 1.0,
        "compute": 22.0,
        "communication": 8.0,
        "straggler": 0.0,
        "other": 32.0,
    }
    assert [figure.median for figure in shares.own] == [23.0], "what a rank does without the others"


def test_communication_is_the_time_of_the_last_rank() -> None:
    shares = find_shares(made_up(ranks=3, computing=by_rank(1.0, 3.0, 1.0), communication=0.5))
    assert shares.path["communication"].median == pytest.approx(0.5)
    assert shares.path["compute"].median == pytest.approx(1.0)
    assert shares.path["straggler"].median == pytest.approx(2.0)
    assert shares.slowest == 1
    assert shares.slowest_in == (1,) * 5
    assert shares.path["other"].median == pytest.approx(0.0)


def test_of_two_ranks_the_faster_one_is_the_reference() -> None:
    shares = find_shares(made_up(ranks=2, data=by_rank(0.1, 0.7), computing=1.0))
    assert shares.path["data loading"].median == pytest.approx(0.1)
    assert shares.path["straggler"].median == pytest.approx(0.6)


def test_what_is_measured_alone_and_not_seen_in_a_step_is_hidden() -> None:
    shares = find_shares(
        made_up(ranks=2, data=0.1, computing=1.0, communication=0.2, phases={"read": 0.9, "exchange": 0.5})
    )
    assert shares.hidden(StepPart.DATA) == pytest.approx(0.8)
    assert shares.hidden(StepPart.COMMUNICATION) == pytest.approx(0.3)


def test_nothing_is_hidden_where_a_step_waits_longer_than_it_takes_alone() -> None:
    assert find_shares(made_up(data=0.5, computing=1.0, phases={"read": 0.4})).hidden(StepPart.DATA) == 0.0


def test_one_rank_hides_no_communication() -> None:
    assert find_shares(made_up(computing=1.0)).hidden(StepPart.COMMUNICATION) is None


def test_compute_is_compared_with_compute_alone() -> None:
    shares = find_shares(made_up(data=0.5, computing=1.5, phases={"compute": 1.0}))
    assert shares.slowdown == pytest.approx(0.5)
    assert shares.sum_check is not None
    assert shares.sum_check.difference == pytest.approx(-0.25)
    assert not shares.sum_check.adds_up


def test_parts_add_up_within_the_spread_of_the_trials() -> None:
    noisy = made_up(data=0.5, computing=by_trial(1.0, 1.1, 1.2, 1.3, 1.4), phases={"compute": 1.1})
    check = find_shares(noisy).sum_check
    assert check is not None
    assert check.tolerance > 0.1
    assert check.adds_up


def test_small_differences_add_up_without_any_spread() -> None:
    check = find_shares(made_up(computing=1.0, phases={"compute": 0.96})).sum_check
    assert check is not None
    assert check.adds_up


def test_without_compute_alone_there_is_no_sum() -> None:
    shares = find_shares(made_up(computing=1.0, phases={"compute": None}))
    assert shares.sum_check is None
    assert shares.slowdown is None


def test_speed_is_samples_over_the_whole_step() -> None:
    shares = find_shares(made_up(ranks=2, computing=by_trial(1.0, 2.0, 4.0), trials=3))
    assert shares.samples_per_second.median == pytest.approx(32.0)
    assert [figure.median for figure in shares.samples_per_second_by_rank] == [16.0, 16.0]
    assert shares.samples_per_second.spread > 0


def test_fractions_of_the_ceilings() -> None:
    found = made_up(computing=1.0, work=WORK, ceilings=(Ceilings(2e9, 8e8),))
    assert find_fractions(found, find_shares(found)).flops == pytest.approx(0.5)
    assert find_fractions(found, find_shares(found)).bytes == pytest.approx(0.5)


def test_what_is_compiled_moves_the_least_bytes() -> None:
    found = made_up("speed.compile=true", computing=1.0, work=WORK, ceilings=(Ceilings(2e9, 8e8),))
    assert find_fractions(found, find_shares(found)).bytes == pytest.approx(0.125)


def test_compiled_on_a_gpu_alone_says_nothing_of_a_cpu() -> None:
    found = made_up("speed.compile=gpu", computing=1.0, work=WORK, ceilings=(Ceilings(2e9, 8e8),))
    assert find_fractions(found, find_shares(found)).bytes == pytest.approx(0.5)


@pytest.mark.parametrize(
    "found",
    [
        made_up(computing=1.0),
        made_up(computing=1.0, work=WORK),
        made_up(computing=1.0, ceilings=(Ceilings(1.0, 1.0),)),
        made_up(computing=1.0, work=WORK, ceilings=(Ceilings(0.0, 0.0),)),
        made_up(computing=0.0, work=WORK, ceilings=(Ceilings(1.0, 1.0),)),
    ],
)
def test_an_unknown_ceiling_gives_no_fraction(found: Measurement) -> None:
    assert find_fractions(found, find_shares(found)).flops is None
    assert find_fractions(found, find_shares(found)).bytes is None


@pytest.mark.parametrize("found", [made_up(), made_up(seconds={}, parts={}), made_up(ranks=2, parts={}, computing=1.0)])
def test_partial_measurements_divide_by_nothing(found: Measurement) -> None:
    shares = find_shares(found)
    assert all(shares.share(name) in (0.0, 1.0) for name in SHARES)
    assert shares.samples_per_second.median >= 0
