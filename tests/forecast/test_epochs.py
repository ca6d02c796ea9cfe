"""Epochs to a target by global batch."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.forecast.epochs import EpochsCurve, EpochsPoint, NoiseBelief, believe, fit_epochs


def law(batch: float, first: float = 20.0, noise: float = 1000.0) -> float:
    return first * (1 + batch / noise)


def points(batches: list[float], first: float = 20.0, noise: float = 1000.0) -> list[EpochsPoint]:
    return [EpochsPoint(batch, law(batch, first, noise)) for batch in batches]


def test_a_sweep_across_the_critical_batch_finds_it() -> None:
    found = fit_epochs(points([64, 256, 1024, 4096]))
    assert found.noise_quantile(0.5) == pytest.approx(1000, rel=0.15)
    assert found.noise_quantile(0.05) < 1000 < found.noise_quantile(0.95)
    assert found.quantile(8192, 0.5) == pytest.approx(law(8192), rel=0.1)


def test_intervals_contain_what_a_larger_batch_takes() -> None:
    """Runs that scatter by 4 % around the law, at 60 critical batches: 9 of 10 intervals contain the next run."""
    generator = np.random.default_rng(3)
    inside = 0
    for log_noise in np.linspace(math.log(300), math.log(100_000), 60):
        noise = math.exp(log_noise)
        batches = [share * noise for share in (1 / 32, 1 / 16, 1 / 8, 1 / 4) for _ in range(2)]
        runs = [law(batch, 50, noise) * math.exp(0.04 * generator.standard_normal()) for batch in (*batches, 2 * noise)]
        found = fit_epochs(list(map(EpochsPoint, batches, runs[:-1])))
        inside += found.quantile(2 * noise, 0.05) <= runs[-1] <= found.quantile(2 * noise, 0.95)
    assert 51 <= inside <= 60


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(1, 1e4)), min_size=1, max_size=8), st.floats(1, 1e7))
def test_any_points_give_finite_epochs_in_order(measured: list[tuple[float, float]], asked: float) -> None:
    found = fit_epochs([EpochsPoint(*each) for each in measured])
    low, middle, high = (found.quantile(asked, each) for each in (0.05, 0.5, 0.95))
    assert 0 < low <= middle <= high < math.inf
    assert found.draws(asked).shape == found.log_noise.shape


def test_the_interval_grows_beyond_the_measured_batches() -> None:
    found = fit_epochs(points([64, 128, 256]))
    widths = [math.log(found.quantile(batch, 0.95) / found.quantile(batch, 0.05)) for batch in (128, 1024, 8192)]
    assert widths == sorted(widths)
    assert widths[-1] > 2 * widths[0]


def test_a_batch_at_which_no_run_reached_the_target_lowers_the_critical_batch() -> None:
    measured = points([64, 128], noise=4000)
    missed = EpochsPoint(4096, 60, is_reached=False)
    open_, bounded = fit_epochs(measured), fit_epochs([*measured, missed])
    assert bounded.noise_quantile(0.5) < open_.noise_quantile(0.5)
    assert bounded.quantile(4096, 0.05) > 0.8 * 60


def test_one_run_that_disagrees_is_passed_over() -> None:
    clean = [*points([64, 64, 128, 128, 256, 256, 512, 512, 1024, 1024])]
    spoiled = [*clean, EpochsPoint(128, 3 * law(128))]
    assert fit_epochs(spoiled).noise_quantile(0.5) == pytest.approx(fit_epochs(clean).noise_quantile(0.5), rel=0.2)


def test_a_noise_scale_alone_gives_the_critical_batch_within_a_factor_of_two() -> None:
    found = fit_epochs([EpochsPoint(64, 20)], believe(1000, 800, 1250))
    assert found.noise_quantile(0.5) == pytest.approx(1000, rel=0.1)
    assert 2.5 < found.noise_quantile(0.95) / found.noise_quantile(0.5) < 4.5  # 1.645 deviations of a factor of 2
    assert found.quantile(1000, 0.5) == pytest.approx(law(1000) / law(64) * 20, rel=0.1)


def test_a_biased_noise_scale_says_less() -> None:
    one, other = (fit_epochs([EpochsPoint(64, 20)], believe(1000, 800, 1250, biased)) for biased in (False, True))
    assert other.noise_quantile(0.95) > 1.3 * one.noise_quantile(0.95)


def test_a_noise_scale_that_is_only_bounded_keeps_the_critical_batch_above() -> None:
    belief = believe(None, 20_000, None)
    found = fit_epochs([EpochsPoint(64, 20)], belief)
    assert found.noise_quantile(0.05) > 8000
    assert found.noise_quantile(0.5) > fit_epochs([EpochsPoint(64, 20)], NoiseBelief()).noise_quantile(0.5)
    assert "above 20,000" in belief.source


def test_a_sweep_and_a_noise_scale_narrow_each_other() -> None:
    measured, belief = points([64, 128]), believe(1000, 800, 1250)

    def width(found: EpochsCurve) -> float:
        return found.quantile(2048, 0.95) / found.quantile(2048, 0.05)

    both = width(fit_epochs(measured, belief))
    assert both < width(fit_epochs(measured))
    assert both < width(fit_epochs([EpochsPoint(64, 21)], belief))


def test_the_same_points_give_the_same_draws() -> None:
    one, two = (fit_epochs(points([64, 256])) for _ in range(2))
    assert np.array_equal(one.draws(1024), two.draws(1024))
