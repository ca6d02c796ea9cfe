"""Generated photographs of the size of ImageNet's, which the benchmarks of reading images share."""

import colorsys
import io
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 500, 375


class Photo(NamedTuple):
    """A photograph: the seed of its noise, its class, and how many files have it."""

    seed: int
    label: int
    names: int


def draw_photo(seed: int, label: int | None = None) -> bytes:
    """Draws colours that vary at all scales, with noise, and the stripes of a class, as a JPEG of about 110 KB."""
    generator = np.random.default_rng(seed)
    picture = 128 + generator.normal(0, 16, (HEIGHT, WIDTH, 3)).astype(np.float32)
    for cells in (4, 8, 16, 32, 64, 128):
        coarse = generator.normal(0, 60 / cells**0.7, (3, HEIGHT * cells // 256, WIDTH * cells // 256))
        layers = [Image.fromarray(layer.astype(np.float32)).resize((WIDTH, HEIGHT)) for layer in coarse]
        picture += np.stack([np.asarray(layer) for layer in layers], axis=-1)
    if label is not None:
        picture += _draw_stripes(label, generator)
    stored = io.BytesIO()
    Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(stored, "JPEG", quality=93)
    return stored.getvalue()


def _draw_stripes(label: int, generator: np.random.Generator) -> np.ndarray:
    """Stripes whose hue and direction depend on the class; their width and phase do not."""
    # Multiples of irrational numbers modulo 1 keep any number of classes apart.
    hue, slope = label * 0.6180 % 1 + generator.normal(0, 0.02), label * 0.7549 % 1
    angle = np.pi / 2 * slope + generator.normal(0, 0.05)  # within 90 degrees: a flipped image keeps its class
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH].astype(np.float32) / HEIGHT
    along = columns * np.cos(angle) + rows * np.sin(angle)
    wave = np.sin(2 * np.pi * (generator.uniform(6, 12) * along + generator.uniform()))
    colour = np.array(colorsys.hsv_to_rgb(hue % 1, 1, 1)) - 0.5
    return (generator.uniform(40, 80) * wave[..., None] * colour).astype(np.float32)


def write_tree(folder: Path, photos: Iterable[Photo], workers: int) -> float:
    """Draws photographs and writes each under its names into the folders of the classes; returns bytes per file."""
    chosen = list(photos)
    for label in {photo.label for photo in chosen}:
        _class_folder(folder, label).mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(workers) as pool:
        sizes = list(pool.map(partial(_write_photo, folder), chosen, chunksize=8))
    files = sum(photo.names for photo in chosen)
    return sum(size * photo.names for size, photo in zip(sizes, chosen, strict=True)) / files


def _write_photo(folder: Path, photo: Photo) -> int:
    content = draw_photo(photo.seed, photo.label)
    for number in range(photo.names):
        (_class_folder(folder, photo.label) / f"{photo.seed:06d}_{number:03d}.jpg").write_bytes(content)
    return len(content)


def _class_folder(folder: Path, label: int) -> Path:
    return folder / f"class_{label:03d}"
