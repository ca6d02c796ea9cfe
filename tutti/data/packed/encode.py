"""Samples in the form in which they are stored, made by worker processes in order."""

import contextlib
import io
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from tutti.data.image_files import as_rgb
from tutti.data.packed.sources import Source, SourceSplit
from tutti.errors import ConfigError
from tutti.ranks.process import end_with_parent

T = TypeVar("T")
_AHEAD = 3  # tasks of each worker that may wait


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
        return PackedSample(name, label, problem=str(error) or type(error).__name__)
    return PackedSample(os.path.splitext(name)[0] + suffix if suffix else name, label, stored, width, height)


def shrink(content: bytes, size: int, quality: int) -> tuple[bytes, str, int, int]:
    """Returns an image with its shorter side at most `size`, a new suffix if it has one, and its width and height.

    A shrunk image is a JPEG with a restart marker after every block, so that those of a crop can be decoded alone.
    """
    from PIL import Image

    if not content:
        raise ValueError("it is empty")
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
    return stored.getvalue(), ".jpg", width, height


_work: tuple[Source, PackOptions] | None = None  # of a worker process, set when it starts


def _start_worker(source: Source, options: PackOptions) -> None:
    global _work
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    _work = source, options


def _encode_chunk(split: str, chunk: range) -> list[PackedSample]:
    assert _work is not None
    source, options = _work
    return [encode(source.splits[split], index, source.kind, options) for index in chunk]


@contextlib.contextmanager
def encoder(
    source: Source, split: str, options: PackOptions, workers: int
) -> Iterator[Callable[[Iterable[range]], Iterator[list[PackedSample]]]]:
    """Yields a function that encodes chunks of samples in order, in worker processes if there are several."""
    if workers <= 1:
        yield lambda chunks: (
            [encode(source.splits[split], index, source.kind, options) for index in chunk] for chunk in chunks
        )
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    pool = ProcessPoolExecutor(workers, context, _start_worker, (source, options))
    try:
        yield lambda chunks: _in_order(
            (lambda chunk=chunk: pool.submit(_encode_chunk, split, chunk) for chunk in chunks), _AHEAD * workers
        )
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(tasks: Iterable[Callable[[], Future[T]]], most: int) -> Iterator[T]:
    """Yields results in the order of tasks; at most so many are under way."""
    waiting: deque[Future[T]] = deque()
    for start in tasks:
        waiting.append(start())
        if len(waiting) >= most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
