"""Density, velocity and temperature of gas, computed from dark matter by the formulas in PRESCRIPTION."""

import numpy as np
import torch

from tutti.data.nbody.grid import Box, Grid, smooth

DENSITY_FLOOR = 1e-3  # of the mean, for empty cells
K_FILTER = 8.0  # h/Mpc
T0, GAMMA, DENSITY_CAP = 1.0e4, 1.5, 1e3  # K
SHOCK_LENGTH, SHOCK_HEAT = 0.5, 13.4  # Mpc/h; K per (km/s)^2, 3 mu m_p / (16 k_B) with mu = 0.59

PRESCRIPTION = f"""\
Dark matter: the linear density at the redshift, smoothed with a Gaussian of the radius at which it varies by 1
(smoothing_radius), moves one particle a cell by Lagrangian perturbation theory of second order; cloud-in-cell.
Gas, densities in units of the mean: delta_b = delta_dm exp(-k^2 / k_F^2), k_F = {K_FILTER} h/Mpc; velocities likewise.
T = {T0:g} K min(rho_b, {DENSITY_CAP:g})^{GAMMA - 1:g} + {SHOCK_HEAT} K (jump / km/s)^2 max(0, 1 - 1 / rho_b),
where jump = max(0, -div v_b) * {SHOCK_LENGTH} Mpc/h: photo-heated gas, and strong shocks where dense gas converges.
Densities below {DENSITY_FLOOR:g} of the mean count as that."""


def smooth_to_gas(box: Box, fields: list[Grid]) -> None:
    """Smooths density and velocities of dark matter in place to those of gas under pressure."""
    filtering = box.table(lambda k: np.exp(-((k / K_FILTER) ** 2)))
    filtering[0] = 1.0
    for done, grid in enumerate(fields):
        smooth(grid, filtering, box.space)
        box.report("gas", done + 1, len(fields))


def divergence(
    before: torch.Tensor, after: torch.Tensor, along_y: torch.Tensor, along_z: torch.Tensor, cell: float
) -> torch.Tensor:
    """Velocity divergence in a plane by central differences, in km/s per Mpc/h; along x from the adjacent planes."""
    differences = after - before
    for axis, velocity in ((0, along_y), (1, along_z)):
        differences = differences + (velocity.roll(-1, axis) - velocity.roll(1, axis))
    return differences / (2 * cell)


def temperature(density: torch.Tensor, divergence: torch.Tensor) -> torch.Tensor:
    """Temperature in kelvin: a power law of density for photo-heated gas, plus shocks where dense gas converges."""
    density = density.clamp(min=DENSITY_FLOOR)
    photoheated = T0 * density.clamp(max=DENSITY_CAP) ** (GAMMA - 1)
    jump = divergence.clamp(max=0) * SHOCK_LENGTH
    return photoheated + SHOCK_HEAT * jump * jump * (1 - 1 / density).clamp(min=0)
