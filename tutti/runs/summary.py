"""Images, histograms and texts for TensorBoard: `tutti.summary.image(name, ...)` in a metric, a step or a loop.

Rank 0 writes them with the log window or the validation that is under way; on other ranks, in other steps, and where
`log.to` has no TensorBoard, a call does nothing. Of several calls with one name the first counts. A value that cannot
be shown is left out with a warning: no call raises an error.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tutti.errors import summarise_error

_MOST_IMAGES = 64  # of a batch, side by side
_MOST_PIXELS = 1 << 24
_MOST_CHARACTERS = 100_000
_BINS = 64


def image(name: str, value: Any, limits: tuple[float, float] | None = None) -> None:
    """Show an image of the shape (height, width) or (channels, height, width), a batch of them, or a Matplotlib figure.

    Numbers from 0 to 1 are shown as they are, others from their least to their greatest, or between `limits`.
    """
    _add(name, "image", lambda: _as_png(value, limits))


def histogram(name: str, value: Any) -> None:
    """Show how the numbers in a tensor, an array or a list are distributed; those that are not finite are left out."""
    _add(name, "histogram", lambda: _as_histogram(value))


def text(name: str, value: str) -> None:
    """Show a text, which may be in Markdown."""
    _add(name, "text", lambda: str(value)[:_MOST_CHARACTERS])


@dataclass(frozen=True)
class Png:
    """An encoded image."""

    height: int
    width: int
    content: bytes


@dataclass(frozen=True)
class Histogram:
    """The numbers of a histogram: the upper end of each bin, and what it counts."""

    least: float
    greatest: float
    count: int
    total: float
    squares: float
    ends: list[float]
    counts: list[float]


@dataclass
class Collected:
    """The summaries that are collected for an event, by their names between those of `begin` and `end`."""

    begin: str = ""
    end: str = ""
    values: dict[str, Png | Histogram | str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


_collected: Collected | None = None  # None where nothing is collected


def collect(into: Collected | None) -> None:
    """Have the calls that follow collect into this, or do nothing."""
    global _collected
    _collected = into


def _add(name: str, kind: Literal["image", "histogram", "text"], make: Callable[[], Any]) -> None:
    into = _collected
    if into is None:
        return
    key = f"{into.begin}{name}{into.end}"
    if key in into.values or key in into.problems:
        return
    try:
        into.values[key] = make()
    except Exception as error:  # whatever a user gives: training goes on
        into.problems[key] = f"{kind} {name!r}: {summarise_error(error).rstrip('.')}"


def _as_array(value: Any) -> Any:
    """A tensor of torch on any device, of any type, or what NumPy takes, as an array of float32."""
    import numpy as np

    if hasattr(value, "detach"):
        value = value.detach().float().cpu().numpy()
    return np.asarray(value, dtype=np.float32)


def _as_png(value: Any, limits: tuple[float, float] | None) -> Png:
    import numpy as np
    from PIL import Image

    content = io.BytesIO()
    if hasattr(value, "savefig"):
        value.savefig(content, format="png", dpi=110)
        width, height = Image.open(content).size
        return Png(height, width, content.getvalue())
    pixels = _as_grid(_as_array(value))
    if pixels.size > _MOST_PIXELS:
        raise ValueError(f"{pixels.shape[0]} x {pixels.shape[1]} pixels: expected {_MOST_PIXELS:,} numbers at most")
    is_bytes = str(getattr(value, "dtype", "")).endswith("uint8")
    low, high = limits or ((0.0, 255.0) if is_bytes else _range_of(pixels))
    shown = np.nan_to_num((pixels - low) / ((high - low) or 1.0)).clip(0, 1)
    levels = (255 * shown + 0.5).astype(np.uint8)
    picture = Image.fromarray(levels[:, :, 0] if levels.shape[2] == 1 else levels)
    picture.save(content, format="png")
    return Png(picture.height, picture.width, content.getvalue())


def _range_of(pixels: Any) -> tuple[float, float]:
    import numpy as np

    finite = pixels[np.isfinite(pixels)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    return (low, high) if low < 0 or high > 1 else (0.0, 1.0)


def _as_grid(array: Any) -> Any:
    """An image, or the images of a batch in rows, as (height, width, channels)."""
    import numpy as np

    if array.ndim == 2:
        return array[:, :, None]
    if array.ndim == 3 and array.shape[0] in (1, 3, 4):
        return array.transpose(1, 2, 0)
    if array.ndim != 4 or array.shape[1] not in (1, 3, 4):
        raise ValueError(
            f"an array of the shape {array.shape}: expected (height, width), or 1, 3 or 4 channels first, as in "
            "(3, height, width), or a batch of such images"
        )
    array = array[:_MOST_IMAGES]
    count, channels, height, width = array.shape
    columns = int(np.ceil(np.sqrt(count)))
    rows = -(-count // columns)
    grid = np.zeros((rows * columns, channels, height, width), array.dtype)
    grid[:count] = array
    placed = grid.reshape(rows, columns, channels, height, width).transpose(0, 3, 1, 4, 2)
    return placed.reshape(rows * height, columns * width, channels)


def _as_histogram(value: Any) -> Histogram:
    import numpy as np

    numbers = _as_array(value).ravel().astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    if not numbers.size:
        raise ValueError("no finite number: expected at least one")
    counts, ends = np.histogram(numbers, _BINS)
    return Histogram(
        float(numbers.min()),
        float(numbers.max()),
        numbers.size,
        float(numbers.sum()),
        float(np.square(numbers).sum()),
        ends[1:].tolist(),
        counts.astype(float).tolist(),
    )
