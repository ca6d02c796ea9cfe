"""Decoded parts of images: Pillow's pixels within a tolerance, with libjpeg-turbo and without."""

import io
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from tutti.data import decode
from tutti.data.decode import Choose, View, centre_view, crop_view
from tutti.data.jpeg_blocks import add_table, cut_blocks, find_frame
from tutti.data.packed.encode import shrink


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours with some noise."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 255, (6, 8, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(float)
    return Image.fromarray((smooth + generator.normal(0, 8, smooth.shape)).clip(0, 255).astype(np.uint8))


def jpeg(image: Image.Image, **options: Any) -> bytes:
    stored = io.BytesIO()
    image.save(stored, "JPEG", **{"quality": 90} | options)
    return stored.getvalue()


def decode_view(content: bytes, size: int, choose: Choose, original: tuple[int, int] | None = None) -> np.ndarray:
    image = torch.empty((size, size, 3), dtype=torch.uint8)
    decode.decode_view(content, image.permute(2, 0, 1), choose, original)
    return image.numpy()


def pillow_view(content: bytes, size: int, view: View) -> np.ndarray:
    """The same part by Pillow alone: decoded whole, cropped, resized, mirrored."""
    with Image.open(io.BytesIO(content)) as image:
        box = tuple(round(each) for each in view.box)
        part = image.convert("RGB").crop(box).resize((size, size), Image.Resampling.BILINEAR)  # pyright: ignore
    pixels = np.asarray(part)
    return pixels[:, ::-1] if view.flip else pixels


@pytest.mark.parametrize(("width", "height"), [(500, 375), (341, 256), (120, 90), (224, 224)])
def test_random_crops_are_pillows_to_three_levels(width: int, height: int) -> None:
    content = jpeg(photo(width, height))
    choose = partial(crop_view, scale=(0.08, 1.0), ratio=(0.75, 4 / 3), flip=True)
    for seed in range(20):
        random.seed(seed)
        found = decode_view(content, 224, choose)
        random.seed(seed)
        expected = pillow_view(content, 224, choose(width, height, 224))
        difference = np.abs(found.astype(int) - expected)
        assert difference.max() <= 3 and difference.mean() < 0.5


@pytest.mark.parametrize("side", [1, 5, 64, 223, 224, 225, 512])
def test_resizing_is_pillows_to_two_levels(side: int) -> None:
    pixels = np.array(photo(side, side))
    expected = np.asarray(Image.fromarray(pixels).resize((224, 200), Image.Resampling.BILINEAR))
    for flip in (False, True):
        out = torch.empty((200, 224, 3), dtype=torch.uint8)
        decode.resize(pixels, flip, out.permute(2, 0, 1))
        found = out.numpy()[:, ::-1] if flip else out.numpy()
        assert np.abs(found.astype(int) - expected).max() <= 2


@pytest.mark.parametrize("seed", range(3))
def test_a_shrunk_image_shows_the_same_part(seed: int) -> None:
    """The size before shrinking makes the draws the same; a pixel of the box may be rounded."""
    content = jpeg(photo(500, 375, seed), quality=95)
    stored, _, *original = shrink(content, 256, 90)
    choose = partial(crop_view, scale=(0.3, 1.0), ratio=(0.75, 4 / 3), flip=True)
    differences = []
    for draw in range(10):
        random.seed(draw)
        first = decode_view(content, 224, choose).astype(int)
        random.seed(draw)
        differences.append(np.abs(decode_view(stored, 224, choose, (original[0], original[1])) - first).mean())
    assert max(differences) < 6 and np.mean(differences) < 4, differences


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize(("width", "height"), [(341, 256), (256, 256), (400, 250), (33, 200), (16, 8), (300, 129)])
@pytest.mark.parametrize("subsampling", ["4:2:0", "4:2:2", "4:4:4"])
def test_cut_blocks_have_the_pixels_of_the_whole(mode: str, width: int, height: int, subsampling: str) -> None:
    options = {} if mode == "L" else {"subsampling": subsampling}
    content = add_table(jpeg(photo(width, height).convert(mode), restart_marker_blocks=1, **options))
    whole, frame = simplejpeg.decode_jpeg(content), find_frame(content)
    assert frame is not None and (frame.width, frame.height) == (width, height)
    generator = random.Random(0)
    lengths = []
    for _ in range(20):
        columns, rows = (slice(*sorted(generator.sample(range(length + 1), 2))) for length in (width, height))
        cut, left, top = cut_blocks(content, frame, columns, rows)
        lengths.append(len(cut))
        part = simplejpeg.decode_jpeg(cut)[
            rows.start - top : rows.stop - top, columns.start - left : columns.stop - left
        ]
        assert np.array_equal(part, whole[rows, columns])
    if height > 150:
        assert min(lengths) < len(content) / 2, "blocks are left out"


def test_files_whose_blocks_are_not_apart_are_left_whole() -> None:
    image = photo(100, 80)
    for content in (jpeg(image), jpeg(image, progressive=True), jpeg(image, restart_marker_rows=1), b"", b"\xff\xd8"):
        assert add_table(content) == content and find_frame(content) is None
    apart = jpeg(image, restart_marker_blocks=1)
    assert find_frame(apart) is None, "without a table of its blocks"
    whole = add_table(apart)
    assert whole.startswith(apart) and find_frame(whole) is not None
    with Image.open(io.BytesIO(whole)) as opened, Image.open(io.BytesIO(apart)) as expected:
        assert np.array_equal(np.asarray(opened), np.asarray(expected))
    for length in range(0, len(apart), 37):
        assert add_table(apart[:length]) == apart[:length], "a file that is cut short"
        find_frame(whole[:length] + whole[-6:])


def test_a_table_of_other_blocks_is_found_and_the_image_decoded_whole() -> None:
    content = add_table(jpeg(photo(100, 80), restart_marker_blocks=1))
    changed = bytearray(content)
    changed[-8] ^= 1  # the size of the last block
    frame = find_frame(bytes(changed))
    assert frame is not None
    with pytest.raises(ValueError, match="other blocks than its header says"):
        cut_blocks(bytes(changed), frame, slice(0, 50), slice(0, 50))
    view = partial(centre_view, share=0.5)
    found, expected = (decode_view(each, 40, view, (100, 80)).astype(int) for each in (bytes(changed), content))
    assert np.abs(found - expected).max() <= 3


@pytest.mark.parametrize("kind", ["jpeg", "grey", "cmyk", "png", "progressive"])
def test_without_the_decoder_the_pixels_are_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image = photo(300, 200)
    if kind == "png":
        stored = io.BytesIO()
        image.save(stored, "PNG")
        content = stored.getvalue()
    else:
        modes = {"grey": "L", "cmyk": "CMYK"}
        content = jpeg(image.convert(modes.get(kind, "RGB")), progressive=kind == "progressive")
    choose = partial(centre_view, share=0.875)
    first = [decode_view(content, size, choose).astype(int) for size in (128, 20)]
    monkeypatch.setattr(decode, "simplejpeg", None)
    for found, size in zip(first, (128, 20), strict=True):
        assert np.abs(found - decode_view(content, size, choose)).max() <= 3


def test_a_file_with_bytes_too_many_is_decoded_as_by_pillow(tmp_path: Path) -> None:
    content = jpeg(photo(64, 48))
    extra = content[:-2] + b"\x00\x00\x00" + content[-2:]
    choose = partial(centre_view, share=1.0)
    assert np.abs(decode_view(extra, 32, choose).astype(int) - decode_view(content, 32, choose)).max() <= 3


def test_what_the_decoder_refuses_is_decoded_whole_by_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    stored, _, *original = shrink(jpeg(photo(500, 375)), 256, 90)
    choose = partial(crop_view, scale=(0.1, 0.3), ratio=(1, 1), flip=True)
    random.seed(4)
    expected = decode_view(stored, 64, choose, (original[0], original[1]))

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("Corrupt JPEG data")

    monkeypatch.setattr(simplejpeg, "decode_jpeg", refuse)
    random.seed(4)
    assert np.abs(decode_view(stored, 64, choose, (original[0], original[1])).astype(int) - expected).max() <= 3


@pytest.mark.parametrize("size", [0, 32])
def test_grey_images_of_16_bits_are_shown_in_full_range(size: int) -> None:
    """Pillow would show everything above 255 as white."""
    ramp = np.linspace(0, 0xFFFF, 64).astype(np.uint16)
    stored = io.BytesIO()
    Image.fromarray(np.tile(ramp, (64, 1))).save(stored, "PNG")
    content = shrink(stored.getvalue(), size, 90)[0]
    found = decode_view(content, 32, partial(centre_view, share=1.0)).astype(int)
    assert np.abs(found - np.linspace(0, 255, 32)[:, None]).max() <= 6
