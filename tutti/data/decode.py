"""Parts of encoded images: chosen at random or in the centre, decoded as far as needed, and resized."""

import io
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from tutti.data.image_files import as_rgb

try:
    import simplejpeg
except ImportError:  # an extra; Pillow decodes all formats, more slowly
    simplejpeg = None

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels of the image
Span = tuple[int, int]  # first output pixel, and the one after the last
_TRIES = 10


@dataclass(frozen=True)
class View:
    """A region of an image and the output pixels that it fills; the other output pixels repeat its edges."""

    box: Box
    columns: Span
    rows: Span
    flip: bool = False


Choose = Callable[[int, int, int], View]  # from the width and height of an image and the output size


def centre_view(width: int, height: int, size: int, share: float) -> View:
    """Centre crop: a square whose side is `share` of the shorter side of the image."""
    side = share * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return View((left, top, left + side, top + side), (0, size), (0, size))


def crop_view(
    width: int, height: int, size: int, scale: tuple[float, float], ratio: tuple[float, float], flip: bool
) -> View:
    """Random resized crop: area share in `scale`, width over height in `ratio`, with a random horizontal flip."""
    box = _random_box(width, height, scale, ratio)
    return View(box, (0, size), (0, size), flip and random.random() < 0.5)


def shift_view(width: int, height: int, size: int, shift: float, zoom: float, flip: bool) -> View:
    """The whole image with a random shift and zoom in each direction and a random horizontal flip."""
    left, right, columns = _random_range(width, size, shift, zoom)
    top, bottom, rows = _random_range(height, size, shift, zoom)
    return View((left, top, right, bottom), columns, rows, flip and random.random() < 0.5)


def decode_view(content: bytes, size: int, choose: Choose, original: tuple[int, int] | None = None) -> np.ndarray:
    """Decodes the chosen part of an image and resizes it to size x size x 3 bytes.

    `original` is the width and height of an image that was shrunk since: the same part is chosen from it.
    """
    known = _read_jpeg_size(content)
    image = None if known else Image.open(io.BytesIO(content))
    width, height = known or image.size  # pyright: ignore[reportOptionalMemberAccess]
    view = choose(*(original or (width, height)), size)
    across, down = (width / original[0], height / original[1]) if original else (1.0, 1.0)
    left, top, right, bottom = view.box
    box = left * across, top * down, right * across, bottom * down
    (first_column, end_column), (first_row, end_row) = view.columns, view.rows
    columns, rows = end_column - first_column, end_row - first_row
    wanted = columns / (box[2] - box[0]), rows / (box[3] - box[1])  # output pixels for each pixel
    if known:
        pixels = _decode_jpeg(content, width, height, box, max(wanted), is_stored=original is not None)
    else:
        pixels = _decode_others(image or Image.open(io.BytesIO(content)), box, max(wanted))
    part = resize(pixels, columns, rows)
    if (columns, rows) != (size, size):
        part = np.pad(part, ((first_row, size - end_row), (first_column, size - end_column), (0, 0)), "edge")
    return _flip(part) if view.flip else part


def resize(pixels: np.ndarray, columns: int, rows: int) -> np.ndarray:
    """Resizes height x width x 3 bytes as Pillow's bilinear filter does; torch's kernel is several times as fast."""
    if pixels.shape[:2] == (rows, columns):
        return pixels
    batch = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)[None]
    resized = torch.nn.functional.interpolate(batch, (rows, columns), mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0).numpy()


def _flip(pixels: np.ndarray) -> np.ndarray:
    """Mirrors an image; torch has a fast kernel for the channels-last format, NumPy has none."""
    return torch.from_numpy(pixels).permute(2, 0, 1)[None].flip(-1)[0].permute(1, 2, 0).numpy()


def _read_jpeg_size(content: bytes) -> tuple[int, int] | None:
    """The width and height of a JPEG that libjpeg-turbo decodes to RGB; None leaves it to Pillow."""
    if simplejpeg is None or not content.startswith(b"\xff\xd8"):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
    except ValueError:
        return None
    width, height = int(width), int(height)
    if colours in ("CMYK", "YCCK") or width * height > (Image.MAX_IMAGE_PIXELS or 0):
        return None
    return width, height


def _decode_jpeg(content: bytes, width: int, height: int, box: Box, wanted: float, is_stored: bool) -> np.ndarray:
    """Decodes the pixels of a box, at 1/2, 1/4 or 1/8 of the size if that still has enough pixels.

    Of an image that we stored, whose checksum is right, rows outside of the box are left out.
    """
    divisor = _divisor(wanted)
    columns, rows = _pixels(box, width, height, divisor)
    try:
        if divisor > 1:
            least = {"min_width": math.ceil(width / divisor), "min_height": math.ceil(height / divisor)}
            return simplejpeg.decode_jpeg(content, **least)[rows, columns]  # pyright: ignore
        cut, start = cut_rows(content, rows.start, rows.stop) if is_stored else (content, 0)
        return simplejpeg.decode_jpeg(cut)[rows.start - start : rows.stop - start, columns]  # pyright: ignore
    except (ValueError, IndexError):  # damaged, or with bytes that Pillow accepts
        return _decode_others(Image.open(io.BytesIO(content)), box, wanted)


def _decode_others(image: Image.Image, box: Box, wanted: float) -> np.ndarray:
    """Decodes the pixels of a box by Pillow."""
    width, height = image.size
    divisor = _divisor(wanted)
    drafted = image.draft("RGB", (width // divisor, height // divisor))
    columns, rows = _pixels(box, width, height, round(width / drafted[1][2]) if drafted else 1)
    return np.array(as_rgb(image))[rows, columns]


def _divisor(wanted: float) -> int:
    """The largest divisor of the size that leaves two pixels for each output pixel.

    A box in whole pixels is then at most a quarter of an output pixel away.
    """
    return next(divisor for divisor in (8, 4, 2, 1) if divisor == 1 or 2 * divisor * wanted <= 1)


def _pixels(box: Box, width: int, height: int, divisor: int) -> tuple[slice, slice]:
    """The whole columns and rows of a box in an image that is decoded at a part of its size."""
    ranges = []
    for low, high, length in ((box[0], box[2], width), (box[1], box[3], height)):
        decoded = math.ceil(length / divisor)
        start = min(round(low / divisor), decoded - 1)
        ranges.append(slice(start, min(max(round(high / divisor), start + 1), decoded)))
    return ranges[0], ranges[1]


# The rows of a JPEG that has a restart marker after each row of blocks, as packed images have.

_FRAME, _SCAN, _INTERVAL = 0xC0, 0xDA, 0xDD  # kinds of segments
_UPSAMPLED = 2  # rows beside a row of blocks that enter the colours of its first and last pixels


def cut_rows(content: bytes, first: int, end: int) -> tuple[bytes, int]:
    """Returns a JPEG with at least the given rows of pixels, and which row is its first; all where they are not apart.

    The rows have the same pixels as in the whole image.
    """
    height_place = height = block_height = row_blocks = interval = components = 0
    place = 2
    while content[place] == 0xFF and content[place + 1] != _SCAN:
        kind, length = content[place + 1], int.from_bytes(content[place + 2 : place + 4])
        if kind == _FRAME:
            height_place = place + 5
            height, width = (int.from_bytes(content[place + at : place + at + 2]) for at in (5, 7))
            samplings = content[place + 11 : place + 2 + length : 3]
            components = len(samplings)
            block_height = 8 * max(each & 15 for each in samplings)
            row_blocks = -(-width // (8 * max(each >> 4 for each in samplings)))
            if components == 1:  # the blocks of one component are 8 x 8 whatever its sampling
                block_height, row_blocks = 8, -(-width // 8)
        elif kind == _INTERVAL:
            interval = int.from_bytes(content[place + 4 : place + 6])
        place += 2 + length
    if not interval or interval != row_blocks or content[place + 4] != components:
        return content, 0
    start = max(first - _UPSAMPLED, 0) // block_height
    stop = -(-min(end + _UPSAMPLED, height) // block_height)
    scan = place + 2 + int.from_bytes(content[place + 2 : place + 4])
    begin, marks, at = scan, [], scan
    for row in range(stop):
        found = content.find(bytes((0xFF, 0xD0 + row % 8)), at) if row * block_height + block_height < height else -1
        at = found + 2 if found >= 0 else len(content)
        if row == start - 1:
            begin = at
        elif start <= row < stop - 1:
            marks.append(found)
    if start == 0 and at == len(content):
        return content, 0
    body = bytearray(content[begin : at - 2])
    for number, mark in enumerate(marks):
        body[mark - begin + 1] = 0xD0 + number % 8
    rows = min(stop * block_height, height) - start * block_height
    header = content[:height_place] + rows.to_bytes(2) + content[height_place + 2 : scan]
    return b"".join((header, body, b"\xff\xd9")), start * block_height


def _random_box(width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float]) -> Box:
    """Returns a random box inside the image; if none fits, the largest centred one within the ratio."""
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


def _random_range(length: int, size: int, shift: float, zoom: float) -> tuple[float, float, Span]:
    """Along one axis: the range of the image that is visible, and the output pixels that show it."""
    step = random.uniform(1 - zoom, 1 + zoom) * length / size  # image pixels per output pixel
    start = (length - step * size) / 2 + random.uniform(-shift, shift) * length
    first = min(max(math.ceil(-start / step), 0), size - 1)
    end = max(min(math.floor((length - start) / step), size), first + 1)
    low = min(max(start + first * step, 0.0), length - min(step, length))
    return low, min(low + (end - first) * step, float(length)), (first, end)
