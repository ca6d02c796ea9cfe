"""Tiles of volumes: every cell once, no border in the result, and the reach of a border by the model itself."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tutti.after.tiles import Tiles, cut, find_reach, plan_tiles
from tutti.errors import ConfigError
from tutti.models.unet3d import UNet3d


def predictor(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    @torch.no_grad()
    def predict(batch: torch.Tensor) -> torch.Tensor:
        return model.eval()(batch)

    return predict


@pytest.fixture(scope="module")
def unet() -> Callable[[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    model = UNet3d(width=4, depth=2)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    return predictor(model)


@pytest.mark.parametrize("cells", [8, 9, 16, 17, 40, 41, 64])
@pytest.mark.parametrize(("size", "overlap"), [(8, 0), (8, 2), (8, 3), (16, 5)])
def test_every_cell_is_kept_from_one_window(cells: int, size: int, overlap: int) -> None:
    windows = cut(cells, size, overlap, 1)
    assert [cell for each in windows for cell in range(each.first, each.end)] == list(range(cells))
    for each in windows:
        assert each.first == 0 or each.first - each.start >= overlap
        assert each.end == cells or each.stop - each.end >= overlap


def test_windows_begin_at_multiples() -> None:
    assert all(each.start % 4 == 0 for each in cut(64, 20, 3, 4))


def test_the_reach_of_a_convolution_is_its_own() -> None:
    one = predictor(nn.Conv1d(1, 1, 7, padding=3))
    assert find_reach(one, (1, 8), 64) == (3,)
    two = predictor(nn.Sequential(nn.Conv2d(1, 2, (3, 5), padding=(1, 2)), nn.ReLU(), nn.Conv2d(2, 1, 3, padding=1)))
    assert find_reach(two, (1, 8, 8), 64) == (2, 3)


def test_tiles_of_the_unet_give_what_one_pass_does(unet: Callable[[torch.Tensor], torch.Tensor]) -> None:
    volume = torch.randn(1, 4, 32, 36, 40, generator=torch.Generator().manual_seed(1))
    tiles = plan_tiles(unet, (4, 8, 8, 8), volume.shape[2:], 24, None)
    assert tiles.multiple == 4 and tiles.sizes == (24, 24, 24) and tiles.overlaps == (7, 7, 7)
    assert "as one pass over the whole volume" in tiles.note
    whole, joined = unet(volume), torch.full((1, 5, 32, 36, 40), torch.nan)
    places = list(tiles.windows(volume.shape[2:]))
    assert len(places) == 18
    for windows in places:
        part = unet(volume[(..., *(slice(each.start, each.stop) for each in windows))])
        kept = part[(..., *(slice(each.first - each.start, each.end - each.start) for each in windows))]
        joined[(..., *(slice(each.first, each.end) for each in windows))] = kept
    torch.testing.assert_close(joined, whole, rtol=0, atol=1e-5)


def test_a_smaller_overlap_is_told(unet: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tiles = plan_tiles(unet, (4, 8, 8, 8), (32, 32, 32), 16, 2)
    assert isinstance(tiles, Tiles) and tiles.overlaps == (2, 2, 2)
    assert "The borders of tiles influence the outputs" in tiles.note


@pytest.mark.parametrize(
    ("volume", "tile", "said"),
    [
        ((32, 32, 30), None, r"a volume of 32 x 32 x 30 cells: expected multiples of 4.*to 32 x 32 x 32"),
        ((32, 32, 32), 18, r"--tile 18: expected a multiple of 4, and \d+ or more"),
        ((32, 32, 32), 8, r"--tile 8: expected a multiple of 4, and \d+ or more"),
    ],
)
def test_what_does_not_fit_is_refused(
    unet: Callable[[torch.Tensor], torch.Tensor], volume: tuple[int, ...], tile: int | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_tiles(unet, (4, 8, 8, 8), volume, tile, None)


def test_a_model_that_sees_everything_is_not_cut() -> None:
    seeing = predictor(nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.GroupNorm(1, 2)))
    with pytest.raises(ConfigError, match=r"depends on all of its input.*--tile 64 for one pass"):
        plan_tiles(seeing, (2, 8), (64,), None, None)
    assert plan_tiles(seeing, (2, 8), (64,), 64, None).note == "one pass over the whole volume"
    assert "reaches all cells" in plan_tiles(seeing, (2, 8), (64,), 16, 4).note
