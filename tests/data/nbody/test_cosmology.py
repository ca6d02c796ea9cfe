"""The power spectrum and growth of the cosmology of boxes."""

import numpy as np
import pytest

from tutti.data.nbody.cosmology import (
    Cosmology,
    gaussian,
    growth,
    growth_rate,
    hubble_flow,
    nonlinear_radius,
    power,
    sigma,
    transfer,
)

EINSTEIN_DE_SITTER = Cosmology(omega_m=1.0)


def test_spheres_of_8_mpc_vary_by_sigma_8() -> None:
    # An integral of its own: other nodes, other rule, and the window from its series where x is small.
    k = np.geomspace(1e-4, 50, 200_001)
    x = 8 * k
    window = np.where(x < 0.01, 1 - x**2 / 10, 3 * (np.sin(x) - x * np.cos(x)) / x**3)
    integrand = k**2 * power(k, Cosmology()) * window**2 / (2 * np.pi**2)
    variance = np.sum((integrand[1:] + integrand[:-1]) / 2 * np.diff(k))
    assert np.sqrt(variance) == pytest.approx(0.81, rel=1e-3)
    assert sigma(8.0, Cosmology()) == pytest.approx(0.81, rel=1e-9)


def test_power_rises_as_its_index_on_large_scales_and_falls_on_small_ones() -> None:
    k = np.array([1e-5, 2e-5])
    low, high = power(k, Cosmology())
    assert np.log(high / low) / np.log(2) == pytest.approx(0.967, abs=0.01)
    low, high = power(np.array([50.0, 100.0]), Cosmology())
    assert -3 < np.log(high / low) / np.log(2) < -2.5  # n_s - 4, and a logarithm


def test_transfer_is_one_on_large_scales_and_lowered_by_baryons() -> None:
    k = np.array([1e-6, 0.3])
    with_baryons, without = transfer(k, Cosmology()), transfer(k, Cosmology(omega_b=1e-6))
    assert with_baryons[0] == pytest.approx(1, abs=1e-4)
    assert with_baryons[1] < 0.9 * without[1]


def test_growth_is_one_today_and_a_in_a_universe_of_matter() -> None:
    assert growth(0.0, Cosmology()) == pytest.approx(1)
    for z in (0.5, 3.0, 20.0):
        assert growth(z, EINSTEIN_DE_SITTER) == pytest.approx(1 / (1 + z), rel=1e-9)
        assert growth_rate(z, EINSTEIN_DE_SITTER) == pytest.approx(1, rel=1e-9)
    assert growth(3.0, Cosmology()) > 1 / 4  # lambda slows it later


def test_growth_rate_is_the_slope_of_growth() -> None:
    for z in (0.0, 1.0, 3.0):
        step = 1e-4
        a = 1 / (1 + z)
        later, earlier = (growth(1 / (a * np.exp(s)) - 1, Cosmology()) for s in (step, -step))
        assert growth_rate(z, Cosmology()) == pytest.approx(np.log(later / earlier) / (2 * step), rel=1e-6)
        assert growth_rate(z, Cosmology()) == pytest.approx(
            (0.31 * (1 + z) ** 3 / (0.31 * (1 + z) ** 3 + 0.69)) ** 0.55, rel=0.01
        )


def test_power_grows_with_the_square_of_the_growth_factor() -> None:
    k = np.array([0.1, 5.0])
    assert power(k, Cosmology(), 3.0) / power(k, Cosmology()) == pytest.approx(growth(3.0, Cosmology()) ** 2)


def test_density_varies_by_one_at_the_nonlinear_radius() -> None:
    radius = nonlinear_radius(Cosmology(), 3.0)
    assert sigma(radius, Cosmology(), 3.0, gaussian) == pytest.approx(1, rel=1e-6)
    assert radius < nonlinear_radius(Cosmology(), 0.0)


def test_hubble_flow_is_100_km_per_second_at_1_mpc_today() -> None:
    assert hubble_flow(0.0, Cosmology()) == pytest.approx(100)
    assert hubble_flow(3.0, EINSTEIN_DE_SITTER) == pytest.approx(100 * 8 / 4)
