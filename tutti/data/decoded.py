"""A cache of decoded splits: files of arrays, under other names once what they were decoded from has changed."""

import contextlib
import hashlib
import os
import uuid
from collections.abc import Iterable
from pathlib import Path

import numpy as np

Split = tuple[np.ndarray, np.ndarray]  # images (bytes, N x C x H x W), labels (int64)


def places(
    dataset: str, splits: Iterable[str], source: Path, paths: Iterable[Path], cache: str | None
) -> dict[str, Path]:
    """Where the splits of a source are kept; elsewhere once the archive, or any file of the tree, has changed."""
    key = hashlib.sha256(b"1" + bytes(source.resolve()))  # the version of this layout
    for path in sorted(paths):
        status = path.stat()
        key.update(f"{path.relative_to(source)} {status.st_size} {status.st_mtime_ns}\0".encode())
    folder = _cache_folder(cache)
    return {split: folder / f"{dataset}-{key.hexdigest()[:16]}-{split}.npz" for split in splits}


def _cache_folder(cache: str | None) -> Path:
    try:
        return Path(cache or os.environ.get("TUTTI_CACHE") or "~/.cache/tutti").expanduser()
    except RuntimeError:  # a user without a home
        return Path(os.devnull)


def load(place: Path, shape: tuple[int, ...]) -> Split | None:
    """A split of images of a shape, or nothing when it is not there or damaged."""
    try:
        with open(place, "rb") as file, np.load(file) as arrays:
            images, labels = arrays["images"], arrays["labels"]
    except Exception:  # whatever it is, the split can be decoded again
        return None
    fits = images.dtype == np.uint8 and images.shape == (len(labels), *shape) and labels.dtype == np.int64
    return (images, labels) if fits else None


def save(place: Path, split: Split) -> None:
    """Keep a split; ranks may do so at the same time, and where it cannot be written, it is decoded next time."""
    aside = place.with_name(f"{place.name}.{uuid.uuid4().hex}.part")
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(aside, "xb") as file:
                np.savez(file, images=split[0], labels=split[1])
            aside.replace(place)
        finally:
            aside.unlink(missing_ok=True)
