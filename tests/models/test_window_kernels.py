"""The Triton kernel of windows gives torch's numbers: on a GPU, or interpreted where there is none."""

import pytest
import torch

from tutti.models import strided, window_kernels

ON_GPU = torch.cuda.is_available()


@pytest.mark.parametrize("shape", [(2, 1, 2, 5, 3), (1, 3, 1, 2, 4)], ids=str)
def test_windows_are_copied_and_their_cells_summed(shape: tuple[int, ...]) -> None:
    batch, channels, depth, height, width = shape
    volume = torch.randn(batch, channels, 2 * depth, 2 * height, 2 * width, generator=torch.Generator().manual_seed(1))
    volume = volume.to("cuda" if ON_GPU else "cpu")
    rows, sums = window_kernels.windows_first(volume)
    windows = strided.windows(volume.permute(0, 2, 3, 4, 1)).flatten(0, 3)
    assert torch.equal(rows, windows.permute(0, 4, 1, 2, 3).flatten(1))
    torch.testing.assert_close(sums.sum(0), volume.sum((0, 2, 3, 4)))
