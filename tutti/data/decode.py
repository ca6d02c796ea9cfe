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
from tutti.data.jpeg_blocks import BlockFrame, cut_blocks, find_frame

try:
    import simplejpeg
except ImportError:  # an extra; Pillow decodes all formats, more slowly
    simplejpeg = None

# As torch.nn.functional.interpolate calls it, which has no `out`.
_resize = torch._C._nn._upsample_bilinear2d_aa  # pyright: ignore[reportAttributeAccessIssue]
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


def decode_view(content: bytes, out: torch.Tensor, choose: Choose, original: tuple[int, int] | None = None) -> None:
    """Decodes the chosen part of an image and resizes it into bytes of the shape (3, size, size), channels last.

    `original` is the width and height of an image that was shrunk since: the same part is chosen from it.
    """
    size = out.shape[-1]
    # Blocks are left out of images that we stored alone: what is read of them has been compared with its checksum.
    frame = find_frame(content) if original and simplejpeg else None
    known = (frame.width, frame.height) if frame else _read_jpeg_size(content)
    image = None if known else Image.open(io.BytesIO(content))
    width, height = known or image.size  # pyright: ignore[reportOptionalMemberAccess]
    view = choose(*(original or (width, height)), size)
    across, down = (width / original[0], height / original[1]) if original else (1.0, 1.0)
    left, top, right, bottom = view.box
    box = left * across, top * down, right * across, bottom * down
    (first_column, end_column), (first_row, end_row) = view.columns, view.rows
    columns, rows = end_column - first_column, end_row - first_row
    wanted = max(columns / (box[2] - box[0]), rows / (box[3] - box[1]))  # output pixels for each pixel
    if image is None:
        pixels = _decode_jpeg(content, width, height, box, wanted, frame)
    else:
        pixels = _decode_others(image, box, wanted)
    if (columns, rows) == (size, size):
        resize(pixels, view.flip, out)
        return
    part = torch.empty((rows, columns, 3), dtype=torch.uint8)
    resize(pixels, False, part.permute(2, 0, 1))
    edges = (first_row, size - end_row), (first_column, size - end_column), (0, 0)
    padded = torch.from_numpy(np.pad(part.numpy(), edges, "edge")).permute(2, 0, 1)
    out.copy_(padded.flip(-1) if view.flip else padded)


def resize(pixels: np.ndarray, flip: bool, out: torch.Tensor) -> None:
    """Resizes height x width x 3 bytes as Pillow's bilinear filter does, by torch's kernel, which is much faster."""
    # The kernel is fast for the channels-last memory format alone, and a flip copies as well.
    whole = torch.from_numpy(pixels).flip(1) if flip else torch.from_numpy(np.ascontiguousarray(pixels))
    batch = whole[None].permute(0, 3, 1, 2)
    if batch.shape[1:] == out.shape:
        out.copy_(batch[0])
    else:
        _resize(batch, out.shape[1:], False, None, None, out=out[None])


def _read_jpeg_size(content: bytes) -> tuple[int, int] | None:
    """The width and height of a JPEG that libjpeg-turbo decodes to RGB; None leaves it to Pillow."""
    if simplejpeg is None or not content.startswith(b"\xff\xd8"):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
    except ValueError:
        return None
    width, height = int(width), int(height)
    if colours in ("CMYK", "YCCK") or width * height > (Image.MAX_IMAGE_PIXELS or math.inf):
        return None
    return width, height


def _decode_jpeg(
    content: bytes, width: int, height: int, box: Box, wanted: float, frame: BlockFrame | None
) -> np.ndarray:
    """Decodes the pixels of a box, at 1/2, 1/4 or 1/8 of the size if that still has enough pixels."""
    divisor = _divisor(wanted)
    columns, rows = _pixels(box, width, height, divisor)
    try:
        if divisor > 1:
            least = {"min_width": math.ceil(width / divisor), "min_height": math.ceil(height / divisor)}
            return simplejpeg.decode_jpeg(content, **least)[rows, columns]  # pyright: ignore
        cut, left, top = cut_blocks(content, frame, columns, rows) if frame else (content, 0, 0)
        decoded = simplejpeg.decode_jpeg(cut)  # pyright: ignore[reportOptionalMemberAccess]
        return decoded[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left]
    except ValueError:  # damaged, or with bytes that Pillow accepts
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
