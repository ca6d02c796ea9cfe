"""The temperature of gas."""

import torch

from tutti.data.nbody.gas import temperature


def test_only_dense_gas_that_converges_is_shocked() -> None:
    density = torch.tensor([0.5, 4.0, 4.0, 4.0])
    kelvin = temperature(density, torch.tensor([-400.0, 400.0, -200.0, -400.0]))
    calm = 1e4 * density.sqrt()
    torch.testing.assert_close(kelvin[:2], calm[:2])
    torch.testing.assert_close(kelvin[2], calm[2] + 13.4 * 100**2 * 0.75)
    torch.testing.assert_close(kelvin[3] - calm[3], 4 * (kelvin[2] - calm[2]))
