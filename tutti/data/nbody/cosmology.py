"""Flat LCDM: the linear power spectrum of matter and its growth; lengths in Mpc/h (comoving), k in h/Mpc."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_CMB_KELVIN = 2.7255
_LN_K = np.linspace(
    np.log(1e-5), np.log(1e4), 4096
)  # the integrals over k are smooth: their sums on this grid are exact


@dataclass(frozen=True)
class Cosmology:
    """The parameters of a flat universe of matter and a cosmological constant."""

    omega_m: float = 0.31
    omega_b: float = 0.049
    h: float = 0.68
    n_s: float = 0.967
    sigma_8: float = 0.81


def transfer(k: np.ndarray, cosmology: Cosmology) -> np.ndarray:
    """The transfer function without acoustic wiggles of Eisenstein & Hu (1998), equations 26 and 28 to 31."""
    matter, baryons = cosmology.omega_m * cosmology.h**2, cosmology.omega_b * cosmology.h**2
    share = cosmology.omega_b / cosmology.omega_m
    sound_horizon = 44.5 * np.log(9.83 / matter) / np.sqrt(1 + 10 * baryons**0.75)  # Mpc, not Mpc/h
    alpha = 1 - 0.328 * np.log(431 * matter) * share + 0.38 * np.log(22.3 * matter) * share**2
    suppression = alpha + (1 - alpha) / (1 + (0.43 * k * cosmology.h * sound_horizon) ** 4)
    q = k * (_CMB_KELVIN / 2.7) ** 2 / (cosmology.omega_m * cosmology.h * suppression)
    log = np.log(2 * np.e + 1.8 * q)
    return log / (log + (14.2 + 731 / (1 + 62.5 * q)) * q**2)


def power(k: np.ndarray, cosmology: Cosmology, z: float = 0.0) -> np.ndarray:
    """The linear power spectrum of matter in (Mpc/h)^3, normalised to sigma_8 in spheres of 8 Mpc/h at z = 0."""
    amplitude = (cosmology.sigma_8 * growth(z, cosmology)) ** 2 / _variance(_shape, cosmology, 8.0, top_hat)
    return amplitude * _shape(k, cosmology)


def sigma(radius: float, cosmology: Cosmology, z: float = 0.0, window: Callable | None = None) -> float:
    """The standard deviation of the linear density in a window of a radius, by default a top hat."""
    return float(np.sqrt(_variance(lambda k, c: power(k, c, z), cosmology, radius, window or top_hat)))


def top_hat(x: np.ndarray) -> np.ndarray:
    """The Fourier transform of a sphere, x = k * radius."""
    series = 1 - x**2 / 10  # the closed form loses all digits at small x
    return np.where(x < 1e-3, series, 3 * (np.sin(x) - x * np.cos(x)) / np.maximum(x, 1e-3) ** 3)


def gaussian(x: np.ndarray) -> np.ndarray:
    """The Fourier transform of a Gaussian, x = k * standard deviation."""
    return np.exp(-(x**2) / 2)


def nonlinear_radius(cosmology: Cosmology, z: float) -> float:
    """The Gaussian radius at which the linear density has standard deviation 1: below it, perturbation theory fails."""
    low, high = 1e-3, 1e2
    for _ in range(60):
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if sigma(middle, cosmology, z, gaussian) > 1 else (low, middle)
    return high


def expansion(z: float, cosmology: Cosmology) -> float:
    """E(z) = H(z) / H(0)."""
    return float(np.sqrt(cosmology.omega_m * (1 + z) ** 3 + 1 - cosmology.omega_m))


def matter_share(z: float, cosmology: Cosmology) -> float:
    """The share of matter in the energy of the universe at a redshift."""
    return cosmology.omega_m * (1 + z) ** 3 / expansion(z, cosmology) ** 2


def growth(z: float, cosmology: Cosmology) -> float:
    """The linear growth factor D(z), 1 today."""
    return _growth(z, cosmology) / _growth(0.0, cosmology)


def growth_rate(z: float, cosmology: Cosmology) -> float:
    """f = d ln D / d ln a."""
    source = 2.5 * cosmology.omega_m * ((1 + z) / expansion(z, cosmology)) ** 2
    return source / _growth(z, cosmology) - 1.5 * matter_share(z, cosmology)


def hubble_flow(z: float, cosmology: Cosmology) -> float:
    """a H(a): the velocity in km/s at 1 comoving Mpc/h."""
    return 100 * expansion(z, cosmology) / (1 + z)


def _growth(z: float, cosmology: Cosmology) -> float:
    """5/2 Omega_m E(a) times the integral of da / (a E)^3, which is a = 1 / (1 + z) in a universe of matter alone."""
    a = 1 / (1 + z)
    nodes, weights = np.polynomial.legendre.leggauss(64)
    root = (nodes + 1) / 2  # a' = a root^2: the integrand is proportional to a'^1.5, which is smooth in the root
    integrand = (a * root**2 / (cosmology.omega_m + (1 - cosmology.omega_m) * (a * root**2) ** 3)) ** 1.5
    integral = float(np.sum(weights * integrand * a * root))
    return 2.5 * cosmology.omega_m * expansion(z, cosmology) * integral


def _shape(k: np.ndarray, cosmology: Cosmology) -> np.ndarray:
    return k**cosmology.n_s * transfer(k, cosmology) ** 2


def _variance(spectrum: Callable, cosmology: Cosmology, radius: float, window: Callable) -> float:
    k = np.exp(_LN_K)
    integrand = k**3 * spectrum(k, cosmology) * window(k * radius) ** 2 / (2 * np.pi**2)
    return float(np.sum(integrand) * (_LN_K[1] - _LN_K[0]))
