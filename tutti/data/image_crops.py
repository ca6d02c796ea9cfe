"""Which part of an image a sample shows, and the one resampling that brings it to size."""

import io
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels of the image
Span = tuple[int, int]  # the first pixel of the picture and the one after the last
_TRIES = 10


@dataclass(frozen=True)
class View:
    """A part of an image, and where in the picture it lands; beyond that its edges are repeated."""

    box: Box
    columns: Span
    rows: Span
    flip: bool = False


Choose = Callable[[int, int, int], View]  # from the width and height of an image and the size of the picture


def centre_view(width: int, height: int, size: int, share: float) -> View:
    """The square in the middle, with a side of the given share of the shorter side of the image."""
    side = share * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return View((left, top, left + side, top + side), (0, size), (0, size))


def crop_view(
    width: int, height: int, size: int, scale: tuple[float, float], ratio: tuple[float, float], flip: bool
) -> View:
    """A random part with a share of the area in `scale` and a width over height in `ratio`, perhaps mirrored."""
    box = _random_box(width, height, scale, ratio)
    return View(box, (0, size), (0, size), flip and random.random() < 0.5)


def shift_view(width: int, height: int, size: int, shift: float, zoom: float, flip: bool) -> View:
    """The whole image, shifted and zoomed at random in each direction by itself, perhaps mirrored."""
    left, right, columns = _random_stretch(width, size, shift, zoom)
    top, bottom, rows = _random_stretch(height, size, shift, zoom)
    return View((left, top, right, bottom), columns, rows, flip and random.random() < 0.5)


def take_picture(content: bytes, size: int, choose: Choose) -> np.ndarray:
    """The chosen part of an encoded image as size x size x 3 bytes."""
    with Image.open(io.BytesIO(content)) as image:
        width, height = image.size
        view = choose(width, height, size)
        left, top, right, bottom = view.box
        (first_column, end_column), (first_row, end_row) = view.columns, view.rows
        columns, rows = end_column - first_column, end_row - first_row
        # A JPEG decodes at a half, a quarter or an eighth of its size where that still has the pixels of the picture.
        wanted = math.ceil(width * columns / (right - left)), math.ceil(height * rows / (bottom - top))
        drafted = image.draft("RGB", wanted)
        shrink = drafted[1][2] / width if drafted else 1.0  # the size itself is rounded up to whole pixels
        box = left * shrink, top * shrink, min(right * shrink, image.width), min(bottom * shrink, image.height)
        pixels = np.asarray(_as_rgb(image).resize((columns, rows), Image.Resampling.BILINEAR, box, reducing_gap=2.0))
    if (columns, rows) != (size, size):
        pixels = np.pad(pixels, ((first_row, size - end_row), (first_column, size - end_column), (0, 0)), "edge")
    return pixels[:, ::-1] if view.flip else pixels


def _random_box(width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float]) -> Box:
    """A random box inside the image; where none fits, the largest in the middle that keeps to the ratio."""
    for _ in range(_TRIES):
        area = width * height * random.uniform(*scale)
        aspect = math.exp(random.uniform(math.log(ratio[0]), math.log(ratio[1])))
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            left, top = random.randint(0, width - wide), random.randint(0, height - high)
            return left, top, left + wide, top + high
    wide, high = min(width, height * ratio[1]), min(height, width / ratio[0])
    left, top = (width - wide) / 2, (height - high) / 2
    return left, top, left + wide, top + high


def _random_stretch(length: int, size: int, shift: float, zoom: float) -> tuple[float, float, Span]:
    """Along one direction: the stretch of the image that is seen, and the pixels of the picture that show it."""
    step = random.uniform(1 - zoom, 1 + zoom) * length / size  # pixels of the image for one of the picture
    start = (length - step * size) / 2 + random.uniform(-shift, shift) * length
    first = min(max(math.ceil(-start / step), 0), size - 1)
    end = max(min(math.floor((length - start) / step), size), first + 1)
    low = min(max(start + first * step, 0.0), length - min(step, length))
    return low, min(low + (end - first) * step, float(length)), (first, end)


def _as_rgb(image: Image.Image) -> Image.Image:
    """Red, green and blue of any image; transparency is left out."""
    if image.mode == "P":
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")
