"""Fits recover the scaling laws of generated data, and intervals have the right coverage."""

import numpy as np
import pytest

from tutti.study.efficiency import (
    Estimate,
    draw_medians,
    estimate,
    fit_amdahl,
    fit_gustafson,
    median_of_runs,
)

RANKS = (1, 2, 4, 8, 16)


def repeated(values: dict[int, float]) -> dict[int, np.ndarray]:
    return {ranks: np.full(10, value) for ranks, value in values.items()}


@pytest.mark.parametrize("ranks", [RANKS, RANKS[1:]])
def test_amdahls_serial_fraction_is_found_whatever_the_smallest_number_of_ranks(ranks: tuple[int, ...]) -> None:
    speeds = {n: 700 / (0.07 + 0.93 / n) for n in ranks}
    found = fit_amdahl(speeds, repeated(speeds))
    assert found is not None
    assert found.law == "Amdahl"
    assert found.fraction.value == pytest.approx(0.07)
    assert found.residual == pytest.approx(0, abs=1e-9)


def test_gustafsons_serial_fraction_is_found() -> None:
    speeds = {n: 700 * (0.2 + 0.8 * n) for n in RANKS}
    found = fit_gustafson(speeds, repeated(speeds))
    assert found is not None
    assert found.fraction.value == pytest.approx(0.2)
    assert (found.fraction.low, found.fraction.high) == pytest.approx((0.2, 0.2))


def test_perfect_scaling_has_no_serial_fraction() -> None:
    speeds = {n: 700.0 * n for n in RANKS}
    for fit in (fit_amdahl, fit_gustafson):
        found = fit(speeds, repeated(speeds))
        assert found is not None
        assert found.fraction.value == pytest.approx(0, abs=1e-12)


def test_one_number_of_ranks_is_too_few_for_a_fit() -> None:
    assert fit_amdahl({2: 1.0}, repeated({2: 1.0})) is None


def test_a_fit_of_noisy_speeds_holds_the_truth_in_its_interval() -> None:
    generator = np.random.default_rng(1)
    runs = {n: [(700 / (0.07 + 0.93 / n)) * generator.normal(1, 0.02, 30) for _ in range(3)] for n in RANKS}
    draws = {n: draw_medians([list(windows) for windows in each], n) for n, each in runs.items()}
    found = fit_amdahl({n: median_of_runs([list(w) for w in each]) for n, each in runs.items()}, draws)
    assert found is not None
    assert found.fraction.low < 0.07 < found.fraction.high
    assert found.fraction.high - found.fraction.low < 0.02


def test_draws_are_the_same_every_time_and_spread_over_runs_and_windows() -> None:
    runs = [[10.0, 11.0, 12.0], [20.0, 21.0, 22.0]]
    draws = draw_medians(runs, 4)
    assert np.array_equal(draws, draw_medians(runs, 4))
    assert draws.min() < 12
    assert draws.max() > 20
    assert median_of_runs(runs) == 16


@pytest.mark.parametrize("size", [7, 8, 30])
def test_medians_are_drawn_as_if_windows_were(size: int) -> None:
    generator = np.random.default_rng(3)
    windows = generator.lognormal(size=size)
    by_hand = np.median(windows[generator.integers(size, size=(20_000, size))], axis=1)
    draws = draw_medians([windows.tolist()], 1, 20_000)
    for part in (2.5, 25, 50, 75, 97.5):
        between = np.percentile(by_hand, [part - 1.5, part + 1.5])
        assert between[0] <= np.percentile(draws, part) <= between[1]
    assert draws.mean() == pytest.approx(by_hand.mean(), rel=0.02)


def test_windows_that_are_all_equal_have_no_width() -> None:
    assert estimate(5.0, draw_medians([[5.0] * 4], 1)) == Estimate(5.0, 5.0, 5.0)


def test_an_interval_holds_95_percent_of_the_draws() -> None:
    assert estimate(500.0, np.arange(1001.0)) == Estimate(500.0, pytest.approx(25.0), pytest.approx(975.0))


def test_estimates_differ_only_beyond_their_intervals() -> None:
    assert Estimate(3, 2.5, 3.5).is_above(Estimate(2, 1.9, 2.4))
    assert not Estimate(3, 2.3, 3.5).is_above(Estimate(2, 1.9, 2.4))
    assert Estimate(0.7, 0.6, 0.79).is_below(0.8)
