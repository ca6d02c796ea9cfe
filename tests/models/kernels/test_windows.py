"""Triton kernels of windows copy what torch copies: on a GPU, or interpreted where there is none."""

import pytest
import torch

import tutti.models.kernels.windows  # noqa: F401 (registers the operators)
from tutti.models import strided

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SHAPES = [(2, 3, (2, 4, 12)), (1, 5, (6, 2, 16))]  # batch, channels, sides of the volume


def made(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def by_tap(windows: torch.Tensor) -> torch.Tensor:
    """B x D x H x W x 4 x 4 x 4 x C as C 64 x B D H W."""
    return windows.permute(7, 4, 5, 6, 0, 1, 2, 3).flatten(4).flatten(0, 3)


@pytest.mark.parametrize(("batch", "channels", "sides"), SHAPES)
def test_windows_by_tap_are_the_windows(batch: int, channels: int, sides: tuple[int, ...]) -> None:
    volume = made(1, batch, channels, *sides)
    rows, sums = torch.ops.tutti.windows_by_tap(volume)
    assert torch.equal(rows, by_tap(strided.windows(volume.permute(0, 2, 3, 4, 1))))
    torch.testing.assert_close(sums.sum(0), volume.sum((0, 2, 3, 4)))


@pytest.mark.parametrize(("batch", "channels", "sides"), SHAPES)
def test_overlap_add_adds_a_bias(batch: int, channels: int, sides: tuple[int, ...]) -> None:
    cells = [side // 2 for side in sides]
    windows, bias = made(1, batch, *cells, 4, 4, 4, channels), made(2, channels)
    expected = strided.overlap_add(windows).permute(0, 4, 1, 2, 3) + bias.view(-1, 1, 1, 1)
    found = torch.ops.tutti.overlap_add(by_tap(windows).contiguous(), bias, [batch, *cells])
    torch.testing.assert_close(found, expected)


def test_the_last_layer_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    volume, weight, bias, grad = made(1, 2, 8, 2, 3, 4), made(2, 8, 5, 4, 4, 4), made(3, 5), made(4, 2, 5, 4, 6, 8)

    def computed(takes: bool) -> list[torch.Tensor]:
        monkeypatch.setattr(strided, "_has_kernels", lambda volume, weight: takes)
        leaves = [tensor.detach().requires_grad_() for tensor in (volume, weight, bias)]
        out = strided.up(*leaves, "product")
        out.backward(grad)
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    for found, expected in zip(computed(True), computed(False), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
