"""Tiles of volumes: every cell once, no border in the result, and the reach of a border by the model itself."""

import contextlib
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import nn

from tutti.after import tiles as tiling
from tutti.after.tiles import (
    AppliedModel,
    Tiles,
    Transfer,
    by,
    choose_sizes,
    cut,
    find_most_cells,
    find_reach,
    plan_tiles,
)
from tutti.errors import ConfigError
from tutti.memory.prediction import PassMemory
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
    assert len(list(tiles.windows(volume.shape[2:]))) == 18
    torch.testing.assert_close(in_tiles(unet, tiles, volume), unet(volume), rtol=0, atol=1e-5)


def in_tiles(predict: Callable[[torch.Tensor], torch.Tensor], tiles: Tiles, volume: torch.Tensor) -> torch.Tensor:
    joined = torch.full((1, 5, *volume.shape[2:]), torch.nan)
    for windows in tiles.windows(volume.shape[2:]):
        part = predict(volume[(..., *(slice(each.start, each.stop) for each in windows))])
        kept = part[(..., *(slice(each.first - each.start, each.end - each.start) for each in windows))]
        joined[(..., *(slice(each.first, each.end) for each in windows))] = kept
    return joined


def test_six_levels_reach_further_than_their_crop_and_tiles_still_give_what_one_pass_does() -> None:
    torch.manual_seed(0)
    model = UNet3d(width=2, depth=6)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    predict, volume = predictor(model), torch.randn(1, 4, 448, 64, 64, generator=torch.Generator().manual_seed(1))
    tiles = plan_tiles(predict, (4, 64, 64, 64), volume.shape[2:], None, None, lambda sizes: 448 * 64 * 64 - 1)
    assert tiles.multiple == 64 and tiles.sizes == (384, 64, 64) and tiles.overlaps == (127, 64, 64)
    assert "as one pass over the whole volume" in tiles.note and "They have 1.7 times its cells" in tiles.note
    whole = predict(volume)
    torch.testing.assert_close(in_tiles(predict, tiles, volume), whole, rtol=0, atol=1e-5)
    short = plan_tiles(predict, (4, 64, 64, 64), volume.shape[2:], 320, 64)
    assert "The borders of tiles influence the outputs" in short.note
    assert (in_tiles(predict, short, volume) - whole).abs().max() > 1e-3


def test_the_coarsest_level_sets_the_multiple_also_where_it_barely_counts() -> None:
    torch.manual_seed(0)
    model = UNet3d(width=2, depth=3)
    with torch.no_grad():
        model.ups[0].weight.mul_(1e-3)  # pyright: ignore[reportCallIssue, reportArgumentType]
    tiles = plan_tiles(predictor(model), (4, 8, 8, 8), (64, 64, 64), None, None)
    assert tiles.multiple == 8 and tiles.overlaps == (15, 15, 15)
    assert all(each.start % 8 == 0 for each in tiles.along((64, 64, 64))[0])


@pytest.mark.parametrize(
    ("volume", "most_cells", "sizes"),
    [
        ((512, 512, 512), 512**3, (512, 512, 512)),
        ((512, 512, 512), 512**3 - 1, (384, 512, 512)),  # two tiles with 1.5 times the cells
        ((512, 512, 512), 384**3, (384, 384, 384)),  # eight tiles with 3.4 times the cells
        ((512, 512, 512), 384**3 - 1, (320, 384, 384)),  # 16 tiles with 5.6 times the cells
        ((512, 512, 512), 1, (320, 320, 320)),  # the least ones, 64 tiles with 15.6 times the cells
        ((320, 512, 1024), 320 * 512 * 640, (320, 512, 640)),
    ],
    ids=lambda value: by(value) if isinstance(value, tuple) else str(value),
)
def test_tiles_that_fit_have_the_fewest_cells_together(
    volume: tuple[int, ...], most_cells: int, sizes: tuple[int, ...]
) -> None:
    assert choose_sizes(volume, (127, 127, 127), 64, (320, 320, 320), most_cells) == sizes


@pytest.mark.parametrize("overlap", [15, 16, 20, 32])
def test_a_volume_that_a_border_reaches_through_is_one_tile(overlap: int) -> None:
    assert choose_sizes((32, 32), (overlap, overlap), 8, (32, 32), 1 << 20) == (32, 32)


def test_without_a_tile_the_memory_decides(unet: Callable[[torch.Tensor], torch.Tensor]) -> None:
    volume, asked = (32, 36, 40), []

    def most_cells(sizes: Sequence[int]) -> int:
        asked.append(tuple(sizes))
        return 32 * 36 * 40 - 1

    tiles = plan_tiles(unet, (4, 8, 8, 8), volume, None, None, most_cells)
    assert asked == [(24, 24, 24)] and tiles.sizes == (32, 36, 28)
    assert tiles.note.startswith("2 tiles of 32 x 36 x 28 cells") and "as one pass over the whole volume" in tiles.note
    assert plan_tiles(unet, (4, 8, 8, 8), volume, 24, None, most_cells).sizes == (24, 24, 24)
    whole = plan_tiles(unet, (4, 8, 8, 8), volume, None, None, lambda sizes: 32 * 36 * 40)
    assert whole.note == "one pass over the whole volume"


@pytest.mark.parametrize(
    ("kind", "free", "expected"),
    [
        ("cpu", 2 * 1000 * 8 * 148, 8000),  # half of the memory, 100 bytes a cell and 48 for its neighbours
        ("cuda", 2 * 1000 * 8 * 148, 8000),
        ("cpu", 1 << 50, None),
        ("cuda", 1 << 50, (2**31 - 1) * 8 // 128),  # cells of a tile whose largest tensor has less than 2^31 elements
        ("cpu", 0, 8),  # not known: the tile that was asked for
    ],
)
def test_a_tile_fits_into_half_of_the_memory_and_into_32_bits(
    monkeypatch: pytest.MonkeyPatch, kind: str, free: int, expected: int | None
) -> None:
    monkeypatch.setattr(tiling, "_free_memory", lambda device: free)
    model = AppliedModel(torch.device(kind), lambda batch: batch, lambda shape: PassMemory(8 * 100, 128))
    found = find_most_cells(model, 6, (2, 2, 2))
    assert found == expected if expected is not None else found > 2**31


def test_a_model_that_does_not_run_without_data_keeps_the_least_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(shape: Sequence[int]) -> PassMemory:
        raise ValueError("no data")

    monkeypatch.setattr(tiling, "_free_memory", lambda device: 1 << 50)
    assert find_most_cells(AppliedModel(torch.device("cpu"), lambda batch: batch, fail), 4, (8, 8, 8)) == 512


class _Stream:
    """In place of a stream of a GPU."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def wait_event(self, event: str) -> None:
        self.calls.append(event)


@pytest.mark.parametrize("planes", [1, 3, 5, 16, 20, 100])
def test_a_tile_goes_to_a_device_and_back_in_pieces(monkeypatch: pytest.MonkeyPatch, planes: int) -> None:
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(tiling, "_make_pinned", torch.empty)
    monkeypatch.setattr(tiling, "_PIECE_BYTES", planes * 2 * 6 * 5 * 4)
    transfer, (reading, writing) = Transfer(torch.device("cpu")), (_Stream(), _Stream())
    transfer._streams = [reading, writing]  # pyright: ignore[reportAttributeAccessIssue]
    volume = np.random.default_rng(0).standard_normal((1, 2, 40, 9, 9)).astype(np.float32)
    back, place = np.full_like(volume, np.nan), (slice(4, 40), slice(1, 7), slice(2, 7))
    read: list[int] = []

    def read_part(window: tuple[slice, ...]) -> np.ndarray:
        read.append(window[0].stop - window[0].start)
        return volume[(..., *window)].copy()

    def write(window: tuple[slice, ...], values: np.ndarray) -> None:
        back[(..., *window)] = values

    tile = transfer.read(read_part, place, 2)
    assert sum(read) == 36 and max(read) == min(36, planes // 16 * 16 or planes)
    transfer.write(tile.double(), write, place, "computed")
    np.testing.assert_array_equal(back[(..., *place)], volume[(..., *place)])
    assert np.isnan(back).sum() == volume.size - tile.numel()
    assert reading.calls == ["synchronize"] and writing.calls == ["computed", *["synchronize"] * len(read)]


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
