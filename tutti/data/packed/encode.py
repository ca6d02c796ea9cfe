"""Samples in the form in which they are stored."""

import io
import os
from dataclasses import dataclass
from typing import NamedTuple

from tutti.data.image_files import as_rgb, find_reason
from tutti.data.jpeg_blocks import add_table
from tutti.data.packed.sources import PackSource, SourceSplit
from tutti.errors import ConfigError

_JPEG = (".jpg", ".jpeg")


@dataclass(frozen=True)
class PackOptions:
    """How samples are stored; the same options and the same source give the same bytes."""

    size: int = 256  # pixels of the shorter side, 0: as they are
    quality: int = 90
    shard_mb: float = 512

    def check(self) -> None:
        """Raises ConfigError for values out of range."""
        for name, given, low, high in (
            ("size", self.size, 0, 1 << 16),
            ("quality", self.quality, 1, 100),
            ("shard-mb", self.shard_mb, 0.01, 1 << 20),
        ):
            if not low <= given <= high:
                raise ConfigError(f"--{name} {given:g}: expected {low} to {high}.")


class PackedSample(NamedTuple):
    """A sample as it is stored; `problem` says why it cannot be."""

    name: str
    label: int
    content: bytes = b""
    width: int = 0
    height: int = 0
    problem: str = ""


def encode(samples: SourceSplit, index: int, kind: str, options: PackOptions) -> PackedSample:
    """Reads a sample and brings it into the form in which it is stored."""
    content = samples.read(index)
    name, label = samples.name(index), samples.label(index)
    if kind == "arrays":
        return PackedSample(name + (".npy" if content.startswith(b"\x93NUMPY") else ".npz"), label, content)
    try:
        stored, suffix, width, height = shrink(content, options.size, options.quality)
    except MemoryError:
        raise
    except Exception as error:  # decoders raise almost anything on bytes that are wrong
        return PackedSample(name, label, problem=find_reason(error, content))
    if os.path.splitext(name)[1].lower() not in _JPEG:
        name += suffix  # beside the old one: a.png may have an a.jpg beside it
    return PackedSample(name, label, stored, width, height)


def shrink(content: bytes, size: int, quality: int) -> tuple[bytes, str, int, int]:
    """Returns an image with its shorter side at most `size`, a new suffix if it has one, and its width and height.

    A shrunk image is a JPEG whose blocks can be decoded alone, so that a reader decodes those of a crop.
    """
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        width, height = image.size
        scale = size / min(width, height)
        if not size or scale >= 1:
            image.load()  # a file that is cut short is found here, not in training
            return content, "", width, height
        shorter, longer = size, round(max(width, height) * scale)
        wanted = (shorter, longer) if width < height else (longer, shorter)
        image.draft(None, (2 * wanted[0], 2 * wanted[1]))
        plain = image if image.mode in ("L", "RGB") else as_rgb(image)
        stored = io.BytesIO()
        plain.resize(wanted, Image.Resampling.BICUBIC).save(
            stored, "JPEG", quality=quality, restart_marker_blocks=1, exif=b"", icc_profile=None
        )
    return add_table(stored.getvalue()), ".jpg", width, height


def encode_chunk(shared: tuple[PackSource, str, PackOptions], chunk: range) -> list[PackedSample]:
    """Encodes some samples of a split."""
    source, split, options = shared
    return [encode(source.splits[split], index, source.kind, options) for index in chunk]
